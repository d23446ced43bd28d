"""Linear layers that read the same input, as one product: queries, keys, values; gate and up.

The cost of a small model's decoding step is the number of its kernels. This module places the weights of such layers
side by side in memory, each still the module's own parameter, so that one matrix product covers them all. The fused
decoding step uses that (``engines/native/fused_step.py``); all other code runs unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


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
