"""Forecast the memory of a packed pass with gradients from a model without weights, and choose the size of passes.

The model runs one group on torch's meta device, which has shapes but no values. For any architecture, autograd saves
the same tensors there as on CUDA with uncompiled layers and the flash kernel. Compiled layers save fewer bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.modeling_layers import GradientCheckpointingLayer

from poise.batch import Prompt
from poise.head.loss import LARGE_CHUNK
from poise.models import attention
from poise.models.packing import layout_group

# Share of the device's memory. The rest is for CUDA itself, the workspaces of its libraries, and fragmentation. On an
# H200 a pass that would have reached 94 % did not fit.
USABLE_SHARE = 0.92
# Extra bytes while a layer's gradients are computed, as a share of the bytes that the layer keeps. With checkpointing
# the recomputed layer's bytes are added for that time.
LAYER_BACKWARD = 0.6
FEWEST_TOKENS = 4096  # per pass: with fewer, matrix products of large models become slow
MOST_ROWS = 8  # responses in the measured group; more share a prompt's memory and would take slightly less per token
Storages = dict[int, torch.UntypedStorage]


@dataclass(frozen=True)
class Activations:
    """The bytes of a pass with gradients, and of sampling's KV cache."""

    layers: int
    layer: float  # per token: what a layer keeps for its backward pass
    outside: float  # per token: what the rest of the trunk keeps
    inputs: float  # per token: the inputs of all layers (states, rotary embeddings, …), kept by checkpointed layers
    states: int  # per token: the trunk's result
    logits: int  # per token
    head_gradient: int  # float32 gradient of the head's weight; 0 if the head is not trained
    cache: int  # per token: keys and values of all layers

    def kept(self, tokens: int, *, checkpointed: bool) -> float:
        """The bytes that the trunk keeps for the backward pass, besides its result."""
        return tokens * (self.outside + (self.inputs if checkpointed else self.layers * self.layer))

    def peak(self, tokens: int, *, checkpointed: bool) -> int:
        """The peak bytes of a pass: reached with the head's chunk of logits, or in the backward pass of a layer.

        At the head, the trunk's result and its gradient are there too.
        """
        head = min(tokens * self.logits, max(LARGE_CHUNK, self.logits)) + 2 * tokens * self.states + self.head_gradient
        layer = tokens * self.layer * (LAYER_BACKWARD + checkpointed)
        return int(self.kept(tokens, checkpointed=checkpointed) + max(head, layer))


@dataclass(frozen=True)
class Passes:
    """The size of the update's passes over a mini-batch, and whether their layers are checkpointed."""

    tokens: int
    checkpointed: bool


def choose_passes(of: Activations, room: float, most: int, busy: int, longest: int) -> Passes | None:
    """The largest pass that fits into ``room`` bytes; None if a single response of ``longest`` tokens does not fit.

    A pass has ``most`` tokens, or a half, a quarter … of ``most``, but at least ``longest``. A pass of ``busy`` tokens
    already keeps the device busy, so passes are made smaller, down to ``busy``, before gradient checkpointing is used.
    """
    least, smallest = (min(most, max(tokens, longest)) for tokens in (busy, longest))
    halves = {size for power in range(most.bit_length()) if (size := most >> power) >= smallest}
    sizes = sorted(halves | {least, smallest}, reverse=True)
    order = [(size, False) for size in sizes if size >= least] + [(size, True) for size in sizes]
    chosen = (Passes(s, c) for s, c in order if of.peak(s, checkpointed=c) <= room)
    return next(chosen, None)


def measure(model: Any, prompt: int, response: int, group: int) -> Activations | None:
    """The memory of a pass over one group's responses, measured with a model on the meta device.

    None if the model cannot be run packed.
    """
    model.eval()
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    trunk, head = getattr(base, base.base_model_prefix), base.get_output_embeddings()
    if not attention.adopt(base):
        return None
    device = torch.device("meta")
    packed = layout_group(Prompt((0,) * prompt), [response] * min(group, MOST_ROWS), device)
    counter, recorder = _Counter(trunk), attention.ShapeRecorder()
    with counter, torch.autograd.graph.saved_tensors_hooks(counter.keep, lambda kept: kept):
        states = attention.run(trunk, packed.ids, packed.positions, packing=packed, decoding=recorder)
    count, size, weight = packed.ids.shape[1], states.element_size(), head.weight
    return Activations(
        layers=len(counter.layers),
        layer=_bytes(counter.inside) / count / max(1, len(counter.layers)),
        outside=_bytes(counter.outside) / count,
        inputs=(_bytes(counter.inputs | counter.outside) - _bytes(counter.outside)) / count,
        states=states.shape[-1] * size,
        logits=weight.shape[0] * size,
        head_gradient=weight.numel() * 4 if weight.requires_grad else 0,
        cache=size * sum(heads * (key + value) for heads, key, value in recorder.shapes.values()),
    )


class _Counter:
    """Finds what autograd keeps inside and outside the layers that can be checkpointed, and the layers' inputs.

    Storages are held, so that no other storage gets the address of a freed one.
    """

    def __init__(self, trunk: nn.Module) -> None:
        self.layers = [module for module in trunk.modules() if isinstance(module, GradientCheckpointingLayer)]
        self.weights = {_storage(x) for x in trunk.parameters()}
        self.inside: Storages = {}
        self.outside: Storages = {}
        self.inputs: Storages = {}
        self.depth = 0

    def keep(self, x: Tensor) -> Tensor:
        place = _storage(x)
        if place not in self.weights and place not in self.inside and place not in self.outside:
            (self.inside if self.depth else self.outside)[place] = x.untyped_storage()
        return x

    def __enter__(self) -> None:
        def enter(_: nn.Module, *given: Any) -> None:
            for x in tree_leaves(given) if not self.depth else ():
                if isinstance(x, Tensor) and _storage(x) not in self.weights:
                    self.inputs[_storage(x)] = x.untyped_storage()
            self.depth += 1

        def leave(*_: object) -> None:
            self.depth -= 1

        self.hooks = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in self.layers]
        self.hooks += [layer.register_forward_hook(leave) for layer in self.layers]

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()


def _bytes(storages: Storages) -> int:
    return sum(storage.nbytes() for storage in storages.values())


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)  # on the meta device all addresses are 0
