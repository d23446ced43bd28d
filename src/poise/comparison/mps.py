"""NVIDIA's MPS, which lets processes use one GPU at the same time instead of in turns. Without it runs are slower."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
TRIAL = "import torch; torch.zeros(1, device='cuda').sum().item()"  # what fails where a client cannot connect
PATIENCE = 5.0  # seconds in which processes that have just ended should be off the list of clients


@contextmanager
def served(folder: Path, note: Callable[[str], None]) -> Iterator[None]:
    """Inside, MPS runs, if it can be started. It is stopped afterwards, unless somebody else started or uses it.

    A file in ``folder`` says that it is ours, so that a comparison that goes on after a kill stops it too.
    """
    mark = folder / "mps"
    started = shutil.which(CONTROL) is not None and (_start(mark, note) if not _running() else mark.exists())
    try:
        yield
    finally:
        if started:
            _quit(mark)


def _running() -> bool:
    return _ask("get_server_list") is not None


def _ask(command: str) -> str | None:
    """What it answers; None if it does not run, or does not answer."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run([CONTROL], input=command + "\n", text=True, capture_output=True, timeout=30, check=False)
        return done.stdout if done.returncode == 0 else None
    return None


def _start(mark: Path, note: Callable[[str], None]) -> bool:
    """Start it, and try it: whether it works."""
    try:
        begun = subprocess.run([CONTROL, "-d"], capture_output=True, timeout=30, check=False).returncode == 0
        if begun:
            mark.touch()
            trial = subprocess.run([sys.executable, "-c", TRIAL], capture_output=True, timeout=120, check=False)
            if trial.returncode == 0:
                return True
            _quit(mark)
    except (OSError, subprocess.TimeoutExpired):
        pass
    note("NVIDIA's MPS cannot be started: runs take turns on the GPU, which is slower")
    return False


def _quit(mark: Path) -> None:
    """Stop it, unless other programs use it: it would wait for them to end, and let no new process of theirs in."""
    ends = time.monotonic() + PATIENCE
    while used := _used():
        if time.monotonic() > ends:
            break
        time.sleep(0.2)
    if not used:
        _ask("quit")
        mark.unlink(missing_ok=True)


def _used() -> bool:
    """Whether a process other than this one is a client."""
    clients = [client for server in _numbers("get_server_list") for client in _numbers(f"get_client_list {server}")]
    return any(client != os.getpid() for client in clients)


def _numbers(command: str) -> list[int]:
    return [int(word) for word in (_ask(command) or "").split() if word.isdigit()]
