"""Signals request a stop: the current step finishes and is saved. A second Ctrl-C stops at once.

SIGTERM comes from ``kill`` and from schedulers, SIGHUP from a terminal that closes, SIGUSR1, SIGUSR2 and SIGXCPU from
batch systems shortly before the time limit.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))  # Windows has the first two


class Stopper:
    """A context in which these signals only set ``requested``."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.note, self.requested = note, False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopper:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if number != signal.SIGINT and signal.getsignal(number) == signal.SIG_IGN:
                    continue  # ignored on purpose, as by nohup
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.requested:  # a closing terminal may send SIGHUP twice, which must not lose the step
            return
        self.requested = True
        self.note("stopping after the step or evaluation under way; press Ctrl-C again to stop at once")
