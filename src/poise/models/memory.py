"""Gradient checkpointing for the update, and the error for when even that does not fit in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


class OutOfMemoryError(RuntimeError):
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
    trunk.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": False}
    )
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
