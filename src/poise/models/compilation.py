"""torch.compile for a model's layers, in the packed passes of the update and in decoding.

The layers of a transformer are alike, so compiling one serves all; it takes about fifteen seconds. Any other call of a
layer runs the uncompiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from poise._lib import triton as _triton
from poise.models.fused_projections import compiler, join_projections
from poise.models.packing import Packed

FEWEST_TOKENS = 1024  # per pass: below this, compiled code gains nothing
COST = 15.0  # seconds of compiling, on a machine that has not done it before
# Seconds that it saves on an H200 (docs/measurements.md, docs/log.md): for each token, layer and channel of the update,
SAVED_TRAINING = 1.1e-10
SAVED_DECODING = 5.6e-5  # and for each layer of a decoding step of the model's own code
FUSED = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3"})  # have another one (engines/native/fused_step.py)


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile can run on this device, and makes passes faster there."""
    return device.type == "cuda" and _triton.available()


class Work(NamedTuple):
    """What a run has left to do if every response is as long as it may be."""

    tokens: int  # of responses, to train on
    draws: int  # decoding steps, each of which draws a token of many responses


def compiling_pays(model: Any, work: Work) -> bool:
    """Whether compiling saves more time than it takes. Of a model whose size its configuration does not tell: yes."""
    if not can_compile(model.device):
        return False
    config = model.config.get_text_config()
    layers, width = (getattr(config, name, None) for name in ("num_hidden_layers", "hidden_size"))
    if layers is None or width is None:
        return True
    fused = config.model_type in FUSED and not hasattr(model, "peft_config")
    a_layer = SAVED_TRAINING * work.tokens * width + (0.0 if fused else SAVED_DECODING * work.draws)
    return bool(a_layer * layers > COST)


def compile_layers(trunk: nn.Module, backend: str = "inductor") -> None:
    """Compile the trunk's layers for packed passes of any number of tokens, and for decoding of any number of rows.

    Each call of a layer chooses by its ``packing`` and ``decoding`` keywords. Gradient checkpointing calls the layer
    again in the backward pass, and that call must choose the same code.
    """
    join_projections(trunk)
    own_backend = compiler(backend)
    for name in ("rotary_emb", "norm"):  # uncompiled, each is many small kernels
        if isinstance(getattr(trunk, name, None), nn.Module):
            getattr(trunk, name).compile(dynamic=True, backend=own_backend)
    layers = getattr(trunk, "layers", None)
    for layer in layers if isinstance(layers, nn.ModuleList) else ():
        layer.forward = _dispatch(layer.forward, torch.compile(layer.forward, dynamic=True, backend=own_backend))


def _dispatch(plain: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, packing: Packed | None = None, decoding: Any = None, **kwargs: Any) -> Any:
        if packing is None and decoding is None:
            return plain(*args, **kwargs)
        large = packing is None or packing.ids.shape[1] >= FEWEST_TOKENS
        keywords = {"packing": packing, "decoding": decoding}
        return (compiled if large else plain)(*args, **{k: v for k, v in keywords.items() if v is not None}, **kwargs)

    return forward
