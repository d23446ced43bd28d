"""How a model's layers run: compiled, checkpointed, and with joined projections.

Compiled, in the packed passes of the update and in decoding: the layers of a transformer are alike, so compiling one
serves all; it takes about fifteen seconds. Any other call of a layer runs the uncompiled code.

Checkpointed, to save memory in the update: layers keep their input and recompute the rest.

Joined: the cost of a small model's decoding step is the number of its kernels. Linear layers that read the same input
(queries, keys, values; gate and up) get their weights side by side in memory, each still the module's own parameter, so
that one matrix product covers them all. The fused decoding step uses that (``engines/native/fused_step.py``); all other
code runs unchanged.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from poise._lib import device as _device
from poise.models.packing import Packed
from poise.models.places import ModelError

FEWEST_TOKENS = 1024  # per pass: below this, compiled code gains nothing
# Tokens × layers × width of the updates from which on compiling saves more time than it takes. On an H200 it takes 15 s
# and saves 1.1e-10 s for each.
WORTH = 1.36e11
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


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


class OutOfMemoryError(ModelError):
    """Not even a single response fits, with every way to save memory in use."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"out of memory {where}: lower rollout.max_tokens, train an adapter (lora.rank=16), or, unless it is that "
            "already, set dtype=bfloat16"
        )


def enable_checkpointing(trunk: Any) -> bool:
    """Prepare the layers for ``checkpointed``. False: the model does not support gradient checkpointing."""
    layers = _layers(trunk)
    if not layers:
        return False
    # Layers draw no random numbers here, so generator states need not be saved.
    kind = "activation" if hasattr(trunk, "activation_checkpointing_enable") else "gradient"  # before transformers 5.23
    settings = {f"{kind}_checkpointing_kwargs": {"use_reentrant": False, "preserve_rng_state": False}}
    getattr(trunk, f"{kind}_checkpointing_enable")(**settings)
    trunk.disable_input_require_grads()  # only reentrant checkpointing needs them
    for layer in layers:
        for name, value in vars(layer).items():
            if "dropout" in name and isinstance(value, float):
                setattr(layer, name, 0.0)  # ``checkpointed`` puts the layer into training mode
    return True


@contextmanager
def checkpointed(trunk: nn.Module, on: bool) -> Iterator[None]:
    """Inside, layers keep only their input and recompute the rest in the backward pass.

    transformers checkpoints in training mode only, which would also turn dropout on and the KV cache off. So only the
    layers' own flag is set, for this one pass, and not that of their submodules.
    """
    layers = _layers(trunk) if on and torch.is_grad_enabled() else []
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def _layers(trunk: nn.Module) -> list[nn.Module]:
    return [module for module in trunk.modules() if isinstance(module, GradientCheckpointingLayer)]


class Joined(nn.Linear):
    """A linear layer whose weight is a slice of ``whole``, shared with its siblings."""

    whole: Tensor
    whole_bias: Tensor | None

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        """A plain linear layer: a copy of ``whole`` would not follow the copy's weight."""
        plain = nn.Linear.__new__(nn.Linear)
        memo[id(self)] = plain
        own = dict(self.__dict__)
        own["_buffers"] = {key: value for key, value in self._buffers.items() if key not in {"whole", "whole_bias"}}
        plain.__dict__.update(copy.deepcopy(own, memo))
        return plain

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Moving to another device or dtype separates the weights: become a plain linear layer again."""
        del self.whole, self.whole_bias
        self.__class__ = nn.Linear  # type: ignore[assignment]
        return nn.Linear._apply(self, fn, recurse)  # type: ignore[no-any-return]


def join_projections(trunk: nn.Module) -> None:
    """Join the projections of ``TOGETHER`` in every module. Other kinds of layers, such as LoRA's, stay as they are."""
    for module in list(trunk.modules()):
        for names in TOGETHER:
            layers = [getattr(module, name, None) for name in names]
            if all(type(layer) is nn.Linear for layer in layers):
                _join([layer for layer in layers if isinstance(layer, nn.Linear)])


@torch.no_grad()
def _join(layers: Sequence[nn.Linear]) -> None:
    kinds = {(layer.in_features, layer.weight.dtype, layer.weight.device, layer.bias is None) for layer in layers}
    if len(kinds) > 1:
        return
    whole = torch.cat([layer.weight for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    first = 0
    for layer in layers:
        rows = slice(first, first + layer.out_features)
        layer.weight.data = whole[rows]
        if bias is not None:
            layer.bias.data = bias[rows]
        layer.__class__ = Joined
        # Not saved with the model: these are views of the parameters.
        layer.register_buffer("whole", whole, persistent=False)
        layer.register_buffer("whole_bias", bias, persistent=False)
        first = rows.stop
