"""Fix the frequencies of rotary embeddings that otherwise depend on the sequence length.

transformers has two such kinds. ``longrope`` (Phi-3, 3.5, 4) switches frequencies past its original length; ``dynamic``
lowers its frequencies as a sequence grows. Both use the longest sequence of the whole pass, so a response's
log-probabilities would depend on its neighbours. Sampling and update would differ too: a KV cache keeps keys that were
rotated while the response was short, but the update rotates all keys for the full length. So when it loads a model,
poise pins the frequencies to those that transformers uses for a sequence of ``longest`` tokens. vLLM does the same.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def pin(model: nn.Module, longest: int | None = None) -> int | None:
    """Fix the frequencies for sequences of up to ``longest`` tokens, or of the original length if it is larger.

    Returns the largest sequence length for which the frequencies are valid; None if no frequencies depend on the
    length.
    """
    limits = [_pin(module, longest) for module in model.modules()]
    return min((limit for limit in limits if limit is not None), default=None)


def _pin(module: nn.Module, longest: int | None) -> int | None:
    types: Any = getattr(module, "unpinned_rope_type", None) or getattr(module, "rope_type", None)
    by_layer: dict[str | None, Any] = types if isinstance(types, dict) else {None: types}
    originals = {layer: _original(module, layer) for layer, rope_type in by_layer.items() if _varies(rope_type)}
    if not originals:
        return None
    length = max(longest or 0, min(originals.values()))
    place = next((buffer for buffer in module.buffers()), torch.zeros(()))
    module.unpinned_rope_type = module.rope_type = types  # undo an earlier pin to another length
    for layer in originals:
        own: dict[str, Any] = {} if layer is None else {"layer_type": layer}
        for last in (0, length - 1):  # position 0 resets the state that a longer sequence left
            module(place.new_zeros((1, 1, 1)), torch.tensor([[last]], device=place.device), **own)
    pinned = {layer: "pinned" if layer in originals else rope_type for layer, rope_type in by_layer.items()}
    module.rope_type = pinned if isinstance(types, dict) else "pinned"  # type: ignore[assignment]
    return length


def _varies(rope_type: object) -> bool:
    return isinstance(rope_type, str) and (rope_type == "longrope" or "dynamic" in rope_type)


def _original(module: Any, layer: str | None) -> int:
    """The sequence length up to which the frequencies are constant."""
    settings = module.config.rope_parameters
    settings = settings if layer is None else settings[layer]
    if settings["rope_type"] == "longrope":
        return int(settings["original_max_position_embeddings"])
    return int(module.original_max_seq_len)


@torch.no_grad()
def varying(model: nn.Module) -> str | None:
    """The name of a rotary embedding whose angles change when a distant position joins the pass; None if there is none.

    Only the rotary embedding runs, so this can test positions that would be too slow in a trial of the whole model. It
    runs on a copy, because the module may have state, and on the CPU, where an index beyond a table raises an error.
    """
    for name, module in model.named_modules():
        if not any(buffer.endswith("inv_freq") for buffer, _ in module.named_buffers(recurse=False)):
            continue
        rotary = copy.deepcopy(module).cpu()
        types = getattr(module, "rope_type", None)
        for layer in types if isinstance(types, dict) else [None]:
            more = {} if layer is None else {"layer_type": layer}
            try:
                x = torch.zeros((1, 1, 1))
                near = rotary(x, torch.arange(4)[None], **more)
                beside = rotary(x, torch.tensor([[0, 1, 2, 3, 1 << 24]]), **more)
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
                continue  # the module does not take positions, or has a short table
            if not all(torch.allclose(a, b[..., :4, :], atol=1e-5) for a, b in zip(near, beside, strict=True)):
                return str(name)
    return None
