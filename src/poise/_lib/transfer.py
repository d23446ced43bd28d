"""Copies from the host to the device that do not block the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def send(values: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """Copy values to the device. A plain ``.to(device)`` would block the host until the device finished its queue."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values)
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
