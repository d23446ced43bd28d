"""A model's layers through torch.compile, for the packed passes of the update and for decoding.

Layers of a transformer are alike, so one is compiled for all of them, which takes about fifteen seconds. Everybody else
who calls a layer gets it as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from poise._lib import triton as _triton
from poise.models.fused_projections import compiler, join_projections
from poise.models.packing import Packed

FEWEST_TOKENS = 1024  # in a pass: below, there is nothing to gain


def can_compile(device: torch.device) -> bool:
    """Whether it pays, and what torch.compile needs is there."""
    return device.type == "cuda" and _triton.available()


def compile_layers(trunk: nn.Module, backend: str = "inductor") -> None:
    """Compile the trunk's layers for packed passes of any number of tokens, and for decoding of any number of rows.

    The layer itself decides, by its ``packing`` and ``decoding`` keywords, whenever it is called: where layers are
    computed again in the backward pass, that must be done as it was done the first time.
    """
    join_projections(trunk)
    joint = compiler(backend)
    for name in ("rotary_emb", "norm"):  # many small kernels each, if they are not
        if isinstance(getattr(trunk, name, None), nn.Module):
            getattr(trunk, name).compile(dynamic=True, backend=joint)
    layers = getattr(trunk, "layers", None)
    for layer in layers if isinstance(layers, nn.ModuleList) else ():
        layer.forward = _dispatch(layer.forward, torch.compile(layer.forward, dynamic=True, backend=joint))


def _dispatch(plain: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, packing: Packed | None = None, decoding: Any = None, **kwargs: Any) -> Any:
        if packing is None and decoding is None:
            return plain(*args, **kwargs)
        large = packing is None or packing.ids.shape[1] >= FEWEST_TOKENS
        chosen = {"packing": packing, "decoding": decoding}
        return (compiled if large else plain)(*args, **{k: v for k, v in chosen.items() if v is not None}, **kwargs)

    return forward
