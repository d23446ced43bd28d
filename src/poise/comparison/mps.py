"""NVIDIA's MPS, which lets processes use one GPU at the same time instead of in turns. Without it runs are slower."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

CONTROL = "nvidia-cuda-mps-control"
TRIAL = "import torch; torch.zeros(1, device='cuda').sum().item()"  # what fails where a client cannot connect


@contextmanager
def served(note: Callable[[str], None]) -> Iterator[None]:
    """Inside, MPS runs, if it is installed and works. It is stopped afterwards, unless it ran before."""
    started = shutil.which(CONTROL) is not None and not _works(CONTROL, asked="get_server_list")
    if started and not (_works(CONTROL, "-d") and _works(sys.executable, "-c", TRIAL)):
        note("NVIDIA's MPS cannot be started: runs take turns on the GPU, which is slower")
        _works(CONTROL, asked="quit")
        started = False
    try:
        yield
    finally:
        if started:
            _works(CONTROL, asked="quit")


def _works(*command: str, asked: str = "") -> bool:
    try:
        return subprocess.run(command, input=f"{asked}\n".encode(), capture_output=True, timeout=120).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
