"""torch.compile for a model's layers, in the packed passes of the update and in decoding.

The layers of a transformer are alike, so compiling one serves all; it takes about fifteen seconds. Any other call of a
layer runs the uncompiled code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from poise._lib import device as _device
from poise.models.packing import Packed

FEWEST_TOKENS = 1024  # per pass: below this, compiled code gains nothing
# Tokens × layers × width of the updates from which on compiling saves more time than it takes. On an H200 it takes 15 s
# and saves 1.1e-10 s for each.
WORTH = 1.36e11


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile can run on this device, and makes passes faster there."""
    return device.type == "cuda" and _device.has_triton()


def compiling_pays(model: Any, tokens: float) -> bool:
    """Whether compiling is worth its time for training on so many tokens. True if the config lacks the model's size."""
    config = model.config.get_text_config()
    layers, width = (getattr(config, name, None) or math.inf for name in ("num_hidden_layers", "hidden_size"))
    return can_compile(model.device) and tokens * layers * width > WORTH


def compile_layers(trunk: nn.Module, backend: str = "inductor") -> None:
    """Compile the trunk's layers for packed passes of any number of tokens, and for decoding of any number of rows.

    Each call of a layer chooses by its ``packing`` and ``decoding`` keywords. Gradient checkpointing calls the layer
    again in the backward pass, and that call must choose the same code.
    """
    for name in ("rotary_emb", "norm"):  # uncompiled, each is many small kernels
        if isinstance(getattr(trunk, name, None), nn.Module):
            getattr(trunk, name).compile(dynamic=True, backend=backend)
    layers = getattr(trunk, "layers", None)
    for layer in layers if isinstance(layers, nn.ModuleList) else ():
        layer.forward = _dispatch(layer.forward, torch.compile(layer.forward, dynamic=True, backend=backend))


def _dispatch(plain: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, packing: Packed | None = None, decoding: Any = None, **kwargs: Any) -> Any:
        if packing is None and decoding is None:
            return plain(*args, **kwargs)
        large = packing is None or packing.ids.shape[1] >= FEWEST_TOKENS
        keywords = {"packing": packing, "decoding": decoding}
        return (compiled if large else plain)(*args, **{k: v for k, v in keywords.items() if v is not None}, **kwargs)

    return forward
