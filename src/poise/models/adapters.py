"""LoRA adapters of peft, as poise's own code multiplies with them: in the fused decoding step.

An adapted layer computes ``W x + s·B(A x)``, with A (r, in), B (out, r) and s = alpha / r: two skinny products. At the
shape of Qwen2.5-7B with rank 16 and 512 rows they add 0.6 % to a step's FLOP (41 GFLOP to 7.2 TFLOP) and to the bytes
of its weights (81 MB to 14.1 GB); most of their cost is that the layers' outputs are read and written once more
(3.7 GB a step with inputs). The alternative, a merged copy ``W + s·B A`` for each sampling phase, needs 13 GB more, and
bfloat16 rounds a small update away: after ten Adam steps at a learning rate of 1e-5 the merged weights lack nine tenths
of what the adapter does (``tests/models/test_adapters.py``), so another policy would sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

TRIAL_SIZE = 0.02  # of B's elements in a trial: like the weights of a layer


class Adapter(NamedTuple):
    """The factors of one layer's adapter: peft's own parameters, so that an update in place is seen."""

    down: Tensor  # A (r, in)
    up: Tensor  # B (out, r)
    scale: float


def base_layer(layer: Any) -> Any:
    """The layer without its adapter."""
    return layer.base_layer if _is_adapted(layer) else layer


def adapter_of(layer: Any) -> Adapter | None:
    """The adapter of a layer; None if it has none, or one that computes something else."""
    return _plain_adapter(layer) if _is_adapted(layer) else None


def is_linear(layer: Any) -> bool:
    """Whether a layer is a plain linear one, or one with a single plain LoRA adapter.

    Not with a variant (DoRA and others), a dropout, a bias in the adapter, several adapters or merged ones.
    """
    if not _is_adapted(layer):
        return type(layer) is nn.Linear
    return type(layer.base_layer) is nn.Linear and _plain_adapter(layer) is not None


def _is_adapted(layer: Any) -> bool:
    if not hasattr(layer, "lora_A"):
        return False
    from peft.tuners.lora.layer import Linear

    return type(layer) is Linear


def _plain_adapter(layer: Any) -> Adapter | None:
    names = list(layer.lora_A)
    if len(names) != 1 or list(layer.active_adapters) != names or layer.merged or layer.lora_variant:
        return None
    (name,) = names
    down, up = layer.lora_A[name], layer.lora_B[name]
    plain = all(type(part) is nn.Linear and part.bias is None for part in (down, up))
    same = down.weight.dtype == up.weight.dtype and type(layer.lora_dropout[name]) is nn.Identity
    return Adapter(down.weight, up.weight, float(layer.scaling[name])) if plain and same else None


class Part(NamedTuple):
    """An adapted layer among joined ones: its columns in their product, and its rows in the joined A."""

    layer: Any
    outputs: slice
    ranks: slice


class JoinedAdapters(NamedTuple):
    """The adapters of linear layers that read the same input; their As lie side by side, as one matrix."""

    down: Tensor  # (sum of ranks, in)
    parts: Sequence[Part]

    def add_to(self, product: Tensor, x: Tensor) -> Tensor:
        """``product`` (n, out) of the layers' own weights, to which the adapters' of ``x`` (n, in) are added in place.

        An adapter of another dtype than the layer's is computed in its own, as by peft. Disabled ones add nothing.
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
    """The layers that have an adapter, each with its place among all of them."""
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
    """Inside, adapters that are still zero are random: else a trial would not notice a step that leaves them out."""
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
