"""A model's layers through torch.compile, for the packed passes of the update only.

Layers of a transformer are alike, so one is compiled for all of them, which takes about fifteen seconds. The modules
stay as they are for everybody else: sampling, saving, the user.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch import nn

FEWEST_TOKENS = 1024  # in a pass: below, there is nothing to gain


def can_compile(device: torch.device) -> bool:
    """Whether it pays, and what torch.compile needs is there: Triton and a C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    return device.type == "cuda" and find_spec("triton") is not None and compiler is not None


class CompiledLayers:
    """The layers of a trunk, compiled for any number of tokens."""

    def __init__(self, trunk: nn.Module) -> None:
        layers = getattr(trunk, "layers", None)
        self.layers = list(layers) if isinstance(layers, nn.ModuleList) else []
        self.forwards = [torch.compile(layer.forward, dynamic=True) for layer in self.layers]

    @contextmanager
    def active(self, tokens: int) -> Iterator[None]:
        """Inside, the layers run compiled, if there are enough tokens."""
        if tokens < FEWEST_TOKENS:
            yield
            return
        for layer, forward in zip(self.layers, self.forwards, strict=True):
            layer.forward = forward
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.forward
