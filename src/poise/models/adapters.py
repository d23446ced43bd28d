"""Compute peft's LoRA adapters in poise's own matrix products, in training and in the fused decoding step.

An adapted layer computes ``W x + s·B(A x)``, with A (r, in), B (out, r) and s = alpha / r. Sampling does not merge the
adapter into a copy ``W + s·B A``: the copy would double the model's memory, and bfloat16 rounds a small update away.
After ten Adam steps at a learning rate of 1e-5 the merged weights lack nine tenths of the adapter's effect
(``tests/models/test_adapters.py``), so sampling would use a different policy.

In training, ``use_lean_forward`` replaces peft's forward pass, which reads and writes a layer's outputs three times
more often. With float32 adapters on bfloat16 weights, peft also converts inputs and outputs, and keeps the converted
inputs for the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

TRIAL_SIZE = 0.02  # size of B's elements in a trial: like the weights of a layer


class Adapter(NamedTuple):
    """The factors of one layer's adapter. They are peft's own parameters, so in-place updates take effect."""

    down: Tensor  # A (r, in)
    up: Tensor  # B (out, r)
    scale: float


def base_layer(layer: Any) -> Any:
    """The layer without its adapter."""
    return layer.base_layer if _is_adapted(layer) else layer


def adapter_of(layer: Any) -> Adapter | None:
    """The layer's plain LoRA adapter; None if the layer has no adapter or another kind."""
    return _plain_adapter(layer) if _is_adapted(layer) else None


def is_linear(layer: Any) -> bool:
    """Whether a layer is a plain linear layer, with or without a single plain LoRA adapter.

    False for LoRA variants (DoRA and others), dropout, a bias in the adapter, several adapters or a merged adapter.
    """
    return type(base_layer(layer)) is nn.Linear and (not _is_adapted(layer) or _plain_adapter(layer) is not None)


def _is_adapted(layer: Any) -> bool:
    if not hasattr(layer, "lora_A"):
        return False
    from peft.tuners.lora.layer import Linear

    return type(layer) in (Linear, _lean_class())


def _plain_adapter(layer: Any) -> Adapter | None:
    names = list(layer.lora_A)
    if len(names) != 1 or list(layer.active_adapters) != names or layer.merged or layer.lora_variant:
        return None
    (name,) = names
    down, up = layer.lora_A[name], layer.lora_B[name]
    plain = all(type(part) is nn.Linear and part.bias is None for part in (down, up))
    same = down.weight.dtype == up.weight.dtype and type(layer.lora_dropout[name]) is nn.Identity
    return Adapter(down.weight, up.weight, float(layer.scaling[name])) if plain and same else None


def use_lean_forward(model: nn.Module) -> None:
    """Replace the forward pass of layers with a plain adapter by one that reads and writes less memory.

    All other layers run peft's own code.
    """
    for layer in model.modules():
        if adapter_of(layer) is not None and is_linear(layer):
            # With an attribute of the layer instead, torch.compile would compile every layer separately.
            layer.__class__ = _lean_class()


@cache
def _lean_class() -> type:
    """peft's LoRA layer with poise's forward pass. Defined on first use, because peft may not be installed."""
    from peft.tuners.lora.layer import Linear

    class LeanLinear(Linear):  # type: ignore[misc]
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            base, adapter = self.base_layer, _plain_adapter(self)
            same = adapter is not None and x.dtype == adapter.down.dtype == base.weight.dtype
            if args or kwargs or adapter is None or not same or self.disable_adapters:
                return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
            return _AdaptedLinear.apply(x, base.weight, base.bias, *adapter)  # type: ignore[no-untyped-call,no-any-return]

    return LeanLinear


class _AdaptedLinear(torch.autograd.Function):
    """``W x + b + s·B(A x)`` with frozen W and b. The adapter's output and gradient are added in place."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out, inner = torch.nn.functional.linear(rows, weight, bias), rows @ down.T
        out.addmm_(inner, up.T, alpha=scale)
        ctx.save_for_backward(x, inner, weight, down, up)
        ctx.scale = scale
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, inner, weight, down, up = ctx.saved_tensors
        gradient = gradient.reshape(-1, gradient.shape[-1])
        grad_inner = ctx.scale * (gradient @ up)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (gradient @ weight).addmm_(grad_inner, down).view(x.shape)
        grad_down = grad_inner.T @ x.reshape(-1, x.shape[-1])
        return grad_x, None, None, grad_down, ctx.scale * (gradient.T @ inner), None


class Part(NamedTuple):
    """An adapted layer among joined layers, with its columns of the joined output and its rows of the joined A."""

    layer: Any
    outputs: slice
    ranks: slice


class JoinedAdapters(NamedTuple):
    """The adapters of linear layers that read the same input, with their A matrices stacked into one."""

    down: Tensor  # (sum of ranks, in)
    parts: Sequence[Part]

    def add_to(self, product: Tensor, x: Tensor) -> Tensor:
        """Add the adapters' outputs for ``x`` (n, in) in place to ``product`` (n, out), the output without adapters.

        An adapter whose dtype differs from the layer's is computed in its own dtype, as in peft. Disabled adapters add
        nothing.
        """
        parts = [part for part in self.parts if not part.layer.disable_adapters]
        if not parts:
            return product
        inner = torch.nn.functional.linear(x.to(self.down.dtype), self.down)
        for layer, outputs, ranks in parts:
            adapter, own = adapter_of(layer), product[:, outputs]
            assert adapter is not None
            if own.dtype == inner.dtype:
                own.addmm_(inner[:, ranks], adapter.up.T, alpha=adapter.scale)
            else:
                own.copy_(own + inner[:, ranks] @ adapter.up.T * adapter.scale)
        return product


def adapted_parts(layers: Sequence[Any]) -> list[Part]:
    """One ``Part`` for each layer that has an adapter."""
    parts, output, rank = [], 0, 0
    for layer in layers:
        adapter, end = adapter_of(layer), output + layer.out_features
        if adapter is not None:
            parts.append(Part(layer, slice(output, end), slice(rank, rank + len(adapter.down))))
            rank += len(adapter.down)
        output = end
    return parts


@contextmanager
def untrained_adapters_filled(trunk: nn.Module) -> Iterator[None]:
    """Inside the context, fill adapters that are still zero with random values.

    With zeros, a trial would not notice a decoding step that ignores adapters.
    """
    found = (adapter_of(module) for module in trunk.modules())
    zero = [adapter.up for adapter in found if adapter is not None and not adapter.up.any()]
    with torch.no_grad():
        try:
            for number, up in enumerate(zero):
                generator = torch.Generator(up.device).manual_seed(number)
                up.copy_(TRIAL_SIZE * torch.randn(up.shape, generator=generator, dtype=up.dtype, device=up.device))
            yield
        finally:
            for up in zero:
                up.zero_()
