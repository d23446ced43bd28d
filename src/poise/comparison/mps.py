"""NVIDIA's MPS, which lets processes use one GPU at the same time instead of in turns. Without it runs are slower."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
TRIAL = "import torch; torch.zeros(1, device='cuda').sum().item()"  # what fails where a client cannot connect


@contextmanager
def served(folder: Path, note: Callable[[str], None]) -> Iterator[None]:
    """Inside, MPS runs, if it can be started. It is stopped afterwards, unless somebody else started it.

    A file in ``folder`` says that it is ours, so that a comparison that goes on after a kill stops it too.
    """
    mark = folder / "mps"
    started = shutil.which(CONTROL) is not None and (_start(mark, note) if not _running() else mark.exists())
    try:
        yield
    finally:
        if started:
            _quit()
            mark.unlink(missing_ok=True)


def _running() -> bool:
    return _ask("get_server_list")


def _ask(command: str) -> bool:
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run([CONTROL], input=command + "\n", text=True, capture_output=True, timeout=30, check=False)
        return done.returncode == 0
    return False


def _start(mark: Path, note: Callable[[str], None]) -> bool:
    """Start it, and try it: whether it works."""
    try:
        begun = subprocess.run([CONTROL, "-d"], capture_output=True, timeout=30, check=False).returncode == 0
        if begun:
            mark.touch()
            trial = subprocess.run([sys.executable, "-c", TRIAL], capture_output=True, timeout=120, check=False)
            if trial.returncode == 0:
                return True
            _quit()
            mark.unlink(missing_ok=True)
    except (OSError, subprocess.TimeoutExpired):
        pass
    note("NVIDIA's MPS cannot be started: runs take turns on the GPU, which is slower")
    return False


def _quit() -> None:
    _ask("quit")
