"""Bit-identical runs on one GPU model: what ``deterministic=true`` changes in the process while a run lasts.

torch's deterministic algorithms cover the backward pass of attention (flash attention obeys torch's switch), sums over
repeated indices, and inductor. Decisions that otherwise depend on free memory use the run's planned memory
(``device.free_bytes``), and a pass that runs out of memory ends the run (``models.scoring.take_less``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from poise._lib import device as _device
from poise._lib.errors import UserError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
FIXED = (":4096:8", ":16:8")  # cuBLAS guarantees the same result on every stream with these values
INDUCTOR = "TORCHINDUCTOR_DETERMINISTIC"  # inductor chooses kernels without timing them


class NotRepeatableError(UserError, RuntimeError):
    """This process cannot compute the same bits twice. The message says what to do."""


@contextmanager
def deterministic(device: torch.device, held: int | None) -> Iterator[None]:
    """Within this context, a CUDA device computes the same bits from the same inputs.

    ``held`` is the number of bytes that the run holds on the device from start to end, computed from its settings
    alone. If it is None, half of the device's memory is assumed.
    """
    fix_workspace()
    fix_inductor()
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill, cudnn = torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing reads it
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass has no deterministic form
    try:
        with _device.planned(_device.total_bytes(device) // 2 if held is None else held):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.backends.cuda.enable_cudnn_sdp(cudnn)


def fix_workspace() -> None:
    """Give cuBLAS a workspace of fixed size. cuBLAS reads the environment variable when CUDA starts."""
    found = os.environ.get(WORKSPACE)
    if found in FIXED:
        return
    if found is not None:
        raise NotRepeatableError(
            f"deterministic=true: the environment has {WORKSPACE}={found}, which lets cuBLAS compute different bits: "
            f"unset it, or set it to {FIXED[0]}"
        )
    if torch.cuda.is_initialized():
        raise NotRepeatableError(
            f"deterministic=true: this process has used CUDA before, without {WORKSPACE}={FIXED[0]}: set it in the "
            "environment, and start a new process"
        )
    os.environ[WORKSPACE] = FIXED[0]


def fix_inductor() -> None:
    """Make torch.compile choose kernels without timing them. Its worker processes read the environment variable."""
    os.environ[INDUCTOR] = "1"
    if (config := sys.modules.get("torch._inductor.config")) is not None:
        config.deterministic = True  # type: ignore[attr-defined]
