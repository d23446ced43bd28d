"""Rotary embeddings that change with the length of a sequence, held at one length for every sequence.

Two kinds do so in transformers: ``longrope`` (Phi-3, 3.5, 4) has other frequencies past its original length;
``dynamic`` lowers its frequencies as a sequence grows. Both look at the longest sequence of the whole pass, so a
response's log-probabilities would depend on its neighbours. And a cache keeps the keys that were rotated while the
response was short, where the update rotates all of them as those of a long one. So poise fixes the frequencies once,
at load: those that transformers takes for a sequence of ``longest`` tokens. vLLM does the same.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def pin(model: nn.Module, longest: int | None = None) -> int | None:
    """Fix the frequencies for sequences of up to ``longest`` tokens; by default, of up to the original length.

    Returns the most tokens that a sequence may have with these frequencies; None: they never depended on the length.
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
    module.unpinned_rope_type = module.rope_type = types  # a model may be pinned again, for another length
    for layer in originals:
        own: dict[str, Any] = {} if layer is None else {"layer_type": layer}
        for last in (0, length - 1):  # the first takes back what an earlier and longer sequence has set
            module(place.new_zeros((1, 1, 1)), torch.tensor([[last]], device=place.device), **own)
    pinned = {layer: "pinned" if layer in originals else rope_type for layer, rope_type in by_layer.items()}
    module.rope_type = pinned if isinstance(types, dict) else "pinned"  # type: ignore[assignment]
    return length


def _varies(rope_type: object) -> bool:
    return isinstance(rope_type, str) and (rope_type == "longrope" or "dynamic" in rope_type)


def _original(module: Any, layer: str | None) -> int:
    """The length up to which the frequencies do not change."""
    settings = module.config.rope_parameters
    settings = settings if layer is None else settings[layer]
    if settings["rope_type"] == "longrope":
        return int(settings["original_max_position_embeddings"])
    return int(module.original_max_seq_len)


@torch.no_grad()
def varying(model: nn.Module) -> str | None:
    """The name of a rotary embedding that gives a position other angles beside a distant one, if there is one.

    A position costs nothing, however distant, so lengths are tried here that no trial of the whole model could afford.
    On a copy, since there may be a state; on the CPU, where a position outside of a table can be caught.
    """
    for name, module in model.named_modules():
        if not any(buffer.endswith("inv_freq") for buffer, _ in module.named_buffers(recurse=False)):
            continue
        own = copy.deepcopy(module).cpu()
        types = getattr(module, "rope_type", None)
        for layer in types if isinstance(types, dict) else [None]:
            more = {} if layer is None else {"layer_type": layer}
            try:
                x = torch.zeros((1, 1, 1))
                near = own(x, torch.arange(4)[None], **more)
                beside = own(x, torch.tensor([[0, 1, 2, 3, 1 << 24]]), **more)
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
                continue  # not called with positions, or a table of few
            if not all(torch.allclose(a, b[..., :4, :], atol=1e-5) for a, b in zip(near, beside, strict=True)):
                return str(name)
    return None
