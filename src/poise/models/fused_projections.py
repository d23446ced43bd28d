"""Linear layers that read the same input, as one product in compiled code: queries, keys, values; gate and up.

A decoding step of a small model is many short kernels, and their number is what it costs. The weights of such layers
are laid side by side in memory, each still the module's own parameter, so that one product can take all of them. Only
code that torch.compile traces without gradients does so: there each layer asks for the whole product and takes its
part, and what is asked for several times is computed once. All else runs as it did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Joined(nn.Linear):
    """One of several linear layers, whose weight is a part of ``whole``."""

    whole: Tensor
    whole_bias: Tensor | None
    first: int

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """The layer's own output, however it is computed."""
        if torch.compiler.is_compiling() and not torch.is_grad_enabled():
            return linear(input, self.whole, self.whole_bias)[..., self.first : self.first + self.out_features]
        return super().forward(input)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """To another device or precision: weights no longer lie side by side there, and the layer is alone again."""
        del self.whole, self.whole_bias, self.first
        self.__class__ = nn.Linear  # type: ignore[assignment]
        return nn.Linear._apply(self, fn, recurse)  # type: ignore[no-any-return]


def join_projections(trunk: nn.Module) -> None:
    """Join what belongs together in all of the trunk's modules. Layers of any other kind, an adapter's, stay alone."""
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
        layer.first = first  # type: ignore[assignment]
        # Not saved with the model: it is the parameters themselves, seen as one.
        layer.register_buffer("whole", whole, persistent=False)
        layer.register_buffer("whole_bias", bias, persistent=False)
        first = rows.stop


@cache
def compiler(backend: str) -> Callable[..., Any]:
    """A backend of torch.compile that computes a product once where it is asked for several times.

    Always the same for the same backend: what was compiled for one model serves the next of its kind.
    """

    def compile_once(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        found: dict[Any, torch.fx.Node] = {}
        for node in list(module.graph.nodes):
            if node.target is linear and not node.kwargs:
                first = found.setdefault(node.args, node)
                if first is not node:
                    node.replace_all_uses_with(first)
                    module.graph.erase_node(node)
        module.recompile()
        return torch._dynamo.lookup_backend(backend)(module, inputs)

    return compile_once
