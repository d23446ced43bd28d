"""One process per run, forked from a server that has imported torch and the trainer (``preload``).

If a run crashes or is killed, the others continue. If the comparison is killed, Linux also kills the server and the
runs.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection
from pathlib import Path
from typing import NamedTuple

from poise.referee.compare import worker
from poise.tasks import data_fingerprint
from poise.training.config.schema import Config
from poise.training.resume import TrainError

MOST_LOSSES = 3  # give up after this many deaths of the server, which does little and should never die
TRIES = 50  # to reach a new server, a tenth of a second apart
SERVER_DIED = 255  # multiprocessing's exit code for a process whose server has died
# NVIDIA's MPS lets processes use one GPU at the same time instead of in turns, which is faster.
CONTROL = "nvidia-cuda-mps-control"
TRIAL = "import torch; torch.zeros(1, device='cuda').sum().item()"  # fails if a client cannot connect


class RunExit(NamedTuple):
    """An ended run: its folder and its exit code (negative: the signal that killed the process)."""

    folder: Path
    status: int


class Processes:
    """The processes of active runs, by folder. The server that forks them starts with the first run."""

    def __init__(self, threads: int = 1, share: float | None = None) -> None:
        self.threads, self.share = threads, share  # CPU threads of a run; its share of the GPU's memory
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["poise.referee.compare.preload"])
        self._running: dict[Path, multiprocessing.context.ForkServerProcess] = {}
        self._losses = 0

    def start(self, config: Config, log: Path, before: Path | None = None) -> None:
        """Start or resume a run, and append its output to ``log``. ``before``: see ``worker.Job``."""
        log.parent.mkdir(parents=True, exist_ok=True)
        data = data_fingerprint(config.task.build())
        job = worker.Job(config.model_dump(mode="json"), self.threads, before, data, config.code, self.share)
        process = self._context.Process(target=worker.main, args=(job, log))
        try:
            with _safe_path():
                _start(process)  # waits for the server's imports, before the run's time starts
        except (OSError, EOFError) as error:
            raise TrainError("the process that starts runs has ended: see its output above") from error
        self._running[Path(config.run)] = process

    def wait(self, seconds: float) -> list[RunExit]:
        """Wait at most ``seconds`` for a run to end; return the runs that have ended."""
        ready = connection.wait([process.sentinel for process in self._running.values()], seconds)
        done = {folder: process for folder, process in self._running.items() if process.sentinel in ready}
        if any(process.exitcode == SERVER_DIED for process in done.values()):
            self._losses += 1
            if self._losses == MOST_LOSSES:
                raise TrainError(f"the process that starts runs has ended {MOST_LOSSES} times: is there enough memory?")
            done = dict(self._running)  # all runs die with their server; none of them has failed
        exits = []
        for folder, process in done.items():
            process.join()
            del self._running[folder]
            exits.append(RunExit(folder, worker.STOPPED if process.exitcode == SERVER_DIED else process.exitcode or 0))
        return exits

    def stop(self) -> None:
        """Ask every run to finish its step and save it."""
        for process in self._running.values():
            process.terminate()

    def close(self) -> None:
        """Kill all active runs."""
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.join()
        self._running.clear()


def _start(process: multiprocessing.context.ForkServerProcess) -> None:
    """Start a process. Retry if the server has just died and the system has not noticed yet."""
    for _ in range(TRIES):
        with suppress(ConnectionRefusedError):
            return process.start()
        time.sleep(0.1)
    return process.start()


@contextmanager
def _safe_path() -> Iterator[None]:
    """Keep new Python processes from importing files of the current folder, which may shadow libraries."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def ending(status: int) -> str:
    """An exit code in words."""
    if status < 0:
        with suppress(ValueError):
            name = signal.Signals(-status).name
            return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"exit code {status}"


def last_lines(log: Path) -> list[str]:
    """The last five lines of a run's output."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-5:]


@contextmanager
def mps(note: Callable[[str], None]) -> Iterator[None]:
    """Run MPS within this context, if it is installed and works. Stop it afterwards, unless it was already running."""
    started = shutil.which(CONTROL) is not None and not _works(CONTROL, request="get_server_list")
    if started and not (_works(CONTROL, "-d") and _works(sys.executable, "-c", TRIAL)):
        note("NVIDIA's MPS cannot be started: runs take turns on the GPU, which is slower")
        _works(CONTROL, request="quit")
        started = False
    try:
        yield
    finally:
        if started:
            _works(CONTROL, request="quit")


def _works(*command: str, request: str = "") -> bool:
    try:
        return subprocess.run(command, input=f"{request}\n".encode(), capture_output=True, timeout=120).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
