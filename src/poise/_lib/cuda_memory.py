"""The memory of a CUDA device."""

from __future__ import annotations

import torch


def free_bytes(device: torch.device) -> int:
    """What CUDA has left, and what torch has reserved and does not use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused
