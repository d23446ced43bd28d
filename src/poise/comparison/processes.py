"""Runs in processes of their own, from the side of the comparison that starts them; ``nursery`` is the other side."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from poise.comparison.nursery import STOPPED
from poise.config.schema import Config
from poise.tasks import data_fingerprint
from poise.training.resume import TrainError


class Ended(NamedTuple):
    """A run has ended: its number and its exit code (negative: the signal that killed it)."""

    number: int
    status: int


class Processes(Protocol):
    """What carries out runs."""

    def start(self, number: int, config: Config, log: Path, before: Path | None = None) -> None:
        """Begin a run, or go on with it; ``before`` has its accuracy before training, if another run measured it."""

    def wait(self, seconds: float) -> list[Ended]:
        """The runs that have ended meanwhile, after at most this time."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every run."""

    def close(self) -> None:
        """Kill what still runs."""


class NurseryError(TrainError):
    """The process that starts runs cannot be started."""


class Nursery:
    """Runs as children of one process that imports torch and the trainer once; it is started when first needed."""

    COMMAND = (sys.executable, "-P", "-m", "poise.comparison.nursery")
    MOST_STARTS = 3  # of that process: it does so little that it should never die

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self._process: subprocess.Popen[bytes] | None = None
        self._running: set[int] = set()
        self._rest, self._starts = b"", 0

    def start(self, number: int, config: Config, log: Path, before: Path | None = None) -> None:
        """Begin a run, or go on with it, and write what it says to the end of ``log``.

        The file ``before`` has its accuracy before training, if another run has measured it.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        settings = config.model_dump(mode="json")
        self._running.add(number)
        known = None if before is None else str(before)
        data = data_fingerprint(config.task.build())
        self._send(
            {
                "start": number, "config": settings, "log": str(log), "threads": self.threads, "before": known,
                "data": data,
            }
        )  # fmt: skip

    def wait(self, seconds: float) -> list[Ended]:
        """The runs that have ended meanwhile, after at most this time."""
        if self._process is None:
            return []
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        if not ready:
            return []
        part = os.read(self._process.stdout.fileno(), 1 << 20)
        if not part:
            return self._lost()
        *lines, self._rest = (self._rest + part).split(b"\n")
        ended = [Ended(news["ended"], news["status"]) for news in map(json.loads, lines) if "ended" in news]
        self._running -= {each.number for each in ended}
        return ended

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every run."""
        if self._process is not None:
            self._send({"signal": number.name})

    def close(self) -> None:
        """Kill what still runs."""
        if self._process is not None:
            self._finalizer()
            self._process = None

    def _send(self, message: dict[str, Any]) -> None:
        if self._process is None:
            self._launch()
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has died, and ``wait`` finds that out
            self._process.stdin.write(json.dumps(message).encode("ascii") + b"\n")
            self._process.stdin.flush()

    def _launch(self) -> None:
        self._starts += 1
        if self._starts > self.MOST_STARTS:
            raise NurseryError(
                f"the process that starts runs has ended {self.MOST_STARTS} times: see what it printed above"
            )
        self._process = subprocess.Popen(
            self.COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C on the terminal reaches the comparison alone
        )
        self._finalizer = weakref.finalize(self, _end, self._process, os.getpid())
        assert self._process.stdout is not None
        self._rest = self._process.stdout.readline()[:0]  # wait until it is ready: imports are not a run's time

    def _lost(self) -> list[Ended]:
        """The nursery has died, and the system has killed its children, which are not to blame."""
        assert self._process is not None
        self._finalizer()
        self._process = None
        lost, self._running = self._running, set()
        return [Ended(number, STOPPED) for number in sorted(lost)]


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:
        return
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(OSError):
        process.stdin.close()  # the nursery kills its children and ends
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def ending(status: int) -> str:
    """What an exit code means."""
    if status < 0:
        with suppress(ValueError):
            name = signal.Signals(-status).name
            return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"exit code {status}"


def last_lines(log: Path, count: int = 5) -> list[str]:
    """The end of what a run has said."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-count:]
