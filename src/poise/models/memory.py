"""Less memory for an update, at the cost of time: layers computed twice, then fewer tokens per pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


class OutOfMemoryError(RuntimeError):
    """Not even a single response fits, with everything done to save memory."""

    def __init__(self, doing: str) -> None:
        super().__init__(
            f"out of memory {doing}: lower rollout.max_tokens, train an adapter (lora.rank=16), or, unless it is that "
            "already, set dtype=bfloat16"
        )


def enable_checkpointing(trunk: Any) -> bool:
    """Let the layers be computed again in the backward pass wherever ``checkpointed`` says so; False: they cannot."""
    layers = _layers(trunk)
    if not layers:
        return False
    # Nothing is random in a layer here, so the state of the generators need not be kept.
    trunk.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": False}
    )
    trunk.disable_input_require_grads()  # only the other kind of checkpointing needs them
    for layer in layers:
        for name, value in vars(layer).items():
            if "dropout" in name and isinstance(value, float):
                setattr(layer, name, 0.0)  # see below
    return True


@contextmanager
def checkpointed(trunk: nn.Module, on: bool) -> Iterator[None]:
    """Inside, layers keep nothing but their input.

    transformers does this in training mode only, which would also turn dropout on and the cache off. So the layers
    themselves are put into training mode, for this one pass, and nothing inside them.
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
