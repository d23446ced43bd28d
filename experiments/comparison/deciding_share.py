"""How much of each method's gradient falls on words that decide? For Knights & Knaves and for sums.

    python experiments/comparison/deciding_share.py runs/models/kk-w1 deciding.json task.people=3 rollout.max_tokens=192
    python experiments/comparison/deciding_share.py runs/models/sums-w16 deciding.json task.words=16 task.digits=true \\
      task.name=experiments/learning/learning_tasks.py:Sums task.low=10 task.high=99 rollout.max_tokens=22

Verdicts ("true", and six other words for it) and roles decide who is who; the rest is wording, names and form. Sums are
decided by their digits. The size of a token's gradient is taken at the logits, w·|A|·(1 − p) with w the regulator's
weight, all phases together. Batches come from one policy, with its weights as they are, and are those of
``signal_share.py``. ``share`` is the mean over batches of the deciding words' part, ``error`` its standard error;
``ratio`` is the share divided by GRPO's on the same batches, with its standard error.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from oracles import has_digit, texts_of, word_kinds
from signal_share import arguments, batches_of, trainer_of
from torch import Tensor

from poise import regulators
from poise.batch import Phase, TokenBatch

METHODS = ("grpo", "ar", "ar(alpha=1.0)", "tr-grpo", "nthr", "blame", "amplify", "stare", "entropy")
DECIDING = ("verdict", "role")


def share(batch: TokenBatch, phases: list[Phase], decides: Tensor) -> float:
    """The part of a batch's gradient, at the logits, that falls on the tokens ``decides`` (B, T)."""
    weight = torch.stack([phase.policy for phase in phases]).sum(0)
    size = torch.where(batch.mask, weight.abs() * batch.token_advantages.abs() * (1 - batch.prob), 0.0).double()
    return float(size[decides].sum() / size.sum())


def deciding(task: str, texts: list[str]) -> Tensor:
    """(V,) bool: the tokens that decide an answer."""
    if task.endswith(":Sums"):
        return has_digit(texts)
    if task != "kk":
        raise SystemExit(f"which tokens decide is known for kk and Sums, not for {task}")
    kinds = word_kinds(texts)
    return torch.stack([kinds[kind] for kind in DECIDING]).any(0)


def summary(values: list[float], plain: list[float]) -> dict[str, Any]:
    root = len(values) ** 0.5
    ratios = [value / base for value, base in zip(values, plain, strict=True)]
    found = {"share": mean(values), "error": stdev(values) / root}
    return found | {"ratio": mean(ratios), "ratio_error": stdev(ratios) / root}


def main() -> None:
    options = arguments(__doc__).parse_intermixed_args()
    chosen = {name: regulators.parse(name) for name in METHODS}
    shares: dict[str, list[float]] = {name: [] for name in chosen}
    tokens = []
    with trainer_of(options.model, options.settings) as trainer:
        decide = deciding(trainer.config.task.name, texts_of(trainer.policy.tokenizer)).to(trainer.policy.device)
        for number, batch in enumerate(batches_of(trainer, options.batches), 1):
            assert batch.targets is not None
            decides = decide[batch.targets.clamp(min=0)] & batch.mask
            tokens.append(float(decides.sum() / batch.mask.sum()))
            for name, regulator in chosen.items():
                shares[name].append(share(batch, regulator(batch), decides))
            print(f"{number} of {options.batches} batches", end="\r", flush=True)
    found = {name: summary(values, shares["grpo"]) for name, values in shares.items()}
    for name, row in found.items():
        beside = f"{row['ratio']:.3f} ± {row['ratio_error']:.3f} of GRPO's"
        print(f"{name:14} {row['share']:6.1%} ± {row['error']:.1%}, {beside}")
    command = {"model": Path(options.model).name, "settings": options.settings, "batches": options.batches}
    options.out.write_text(json.dumps({"tokens": mean(tokens), "methods": found, "command": command}, indent=1) + "\n")


if __name__ == "__main__":
    main()
