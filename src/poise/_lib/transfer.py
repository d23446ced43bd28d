"""From the host to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def send(values: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """The values on the device. An ordinary copy would make the host wait for all that the device still has to do."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values)
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
