"""How a model's layers run: compiled, checkpointed, and with joined projections.

Compiled: the update's packed passes and decoding use compiled layers. All layers have the same code, so one compilation
serves all.

Checkpointed: to save memory in the update, layers keep only their input and recompute their activations.

Joined: linear layers that read the same input (queries, keys, values; gate and up) store their weights side by side in
memory, and their adapters' A matrices too. The fused decoding step (``sampling/native/fused_step.py``) then computes
all of them in one matrix product, because its time depends on the number of kernel launches. All other code runs
unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from poise._lib import device as _device
from poise.models.adapters import JoinedAdapters, Part, adapted_parts, adapter_of, base_layer, is_linear
from poise.models.location import ModelError
from poise.models.packing import Packed

FEWEST_TOKENS = 1024  # per pass: below this, compiled code gains nothing
# Compiling pays if the run's updates have more tokens × layers × width than this: on an H200 it takes 15 s and saves
# 1.1e-10 s per unit of this product.
WORTH = 1.36e11


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile can run on this device, and makes passes faster there."""
    return device.type == "cuda" and _device.has_triton()


def compiling_pays(model: Any, tokens: float) -> bool:
    """Whether compiling saves more time than it takes in training on ``tokens`` tokens.

    A model whose config states no sizes counts as large.
    """
    config = model.config.get_text_config()
    layers, width = (getattr(config, name, None) or math.inf for name in ("num_hidden_layers", "hidden_size"))
    return can_compile(model.device) and tokens * layers * width > WORTH


def compile_layers(trunk: nn.Module, backend: str = "inductor") -> None:
    """Compile the trunk's layers for packed passes of any length and for decoding with any number of rows.

    Each call of a layer selects compiled or plain code by its ``packing`` and ``decoding`` keywords. Gradient
    checkpointing calls the layer again in the backward pass, and that call must select the same code.
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
    """A single response does not fit in memory, even with every memory-saving option on."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"out of memory {where}: lower rollout.max_tokens, train an adapter (lora.rank=16), or set "
            "dtype=bfloat16 if it is not set already"
        )


class FixedPassError(OutOfMemoryError):
    """A pass does not fit in memory, and ``deterministic=true`` does not allow smaller passes."""

    def __init__(self, tokens: int) -> None:
        ModelError.__init__(
            self,
            f"out of memory in a pass of {tokens} tokens, and deterministic=true does not allow smaller passes, "
            f"because they would change the run's bits: start a new run with optim.micro_tokens={max(1, tokens // 2)}",
        )


def enable_checkpointing(trunk: Any) -> bool:
    """Prepare the layers for ``checkpointed``. Return False if the model does not support gradient checkpointing."""
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
def checkpointed(trunk: nn.Module) -> Iterator[None]:
    """Inside the context, layers keep only their input and recompute their activations in the backward pass.

    transformers checkpoints only in training mode, which would also turn dropout on and the KV cache off. So this sets
    only the layers' own ``training`` flag, not their submodules' flags, and only for this pass.
    """
    layers = _layers(trunk) if torch.is_grad_enabled() else []
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def _layers(trunk: nn.Module) -> list[nn.Module]:
    return [module for module in trunk.modules() if isinstance(module, GradientCheckpointingLayer)]


class JoinedLinear(NamedTuple):
    """Linear layers that read the same input, run as one layer. Its weight is a view of their weights."""

    weight: Tensor
    bias: Tensor | None
    adapters: JoinedAdapters | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """The layers' outputs for ``x`` (n, in), concatenated."""
        product = torch.nn.functional.linear(x, self.weight, self.bias)
        return product if self.adapters is None else self.adapters.add_to(product, x)

    def covers(self, layers: Sequence[Any]) -> bool:
        """Whether these layers' weights still share this layer's memory.

        Moving a model to another device separates them.
        """
        parts, adapters = adapted_parts(layers), self.adapters
        if parts != (adapters.parts if adapters else []):
            return False
        return _is_joined(self.weight, [base_layer(layer).weight for layer in layers]) and (
            adapters is None or _is_joined(adapters.down, _downs(parts))
        )


@torch.no_grad()
def join(layers: Sequence[Any]) -> JoinedLinear:
    """Store the weights of these layers side by side in memory. The weights remain the layers' own parameters."""
    weights, biases = zip(*((base_layer(layer).weight, base_layer(layer).bias) for layer in layers), strict=True)
    parts = adapted_parts(layers)
    adapters = JoinedAdapters(_join(_downs(parts)), parts) if parts else None
    return JoinedLinear(_join(weights), None if biases[0] is None else _join(biases), adapters)


def _downs(parts: Sequence[Part]) -> list[Tensor]:
    return [adapter.down for part in parts if (adapter := adapter_of(part.layer)) is not None]


def _join(parts: Sequence[Tensor]) -> Tensor:
    whole = _side_by_side(parts)
    if whole is None:
        whole = torch.cat(list(parts))
        for part, rows in zip(parts, whole.split([len(part) for part in parts]), strict=True):
            part.data = rows
    return whole


def _is_joined(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    found = _side_by_side(parts)
    return found is not None and found.data_ptr() == whole.data_ptr()


def _side_by_side(parts: Sequence[Tensor]) -> Tensor | None:
    """A view of the parts as one tensor; None if they are not contiguous in memory."""
    first, begin, rows = parts[0], parts[0].storage_offset(), 0
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and part.dtype == first.dtype
        if not same or not part.is_contiguous() or part.storage_offset() != begin + rows * first[0].numel():
            return None
        rows += len(part)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def can_join(layers: Sequence[object]) -> bool:
    """Whether these are linear layers of one kind, with or without plain LoRA adapters of one dtype."""
    if not all(map(is_linear, layers)):
        return False
    bases = [base_layer(layer) for layer in layers]
    kinds = {(each.in_features, each.weight.dtype, each.weight.device, each.bias is None) for each in bases}
    adapters = {(down.dtype, down.device) for down in _downs(adapted_parts(layers))}
    return len(kinds) == 1 and len(adapters) <= 1
