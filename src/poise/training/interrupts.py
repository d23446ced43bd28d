"""Signals request a stop: a step finishes and is saved; an evaluation ends at once. A second Ctrl-C ends both.

``kill`` and schedulers send SIGTERM; a terminal that closes sends SIGHUP; batch systems send SIGUSR1, SIGUSR2 and
SIGXCPU shortly before the time limit.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))  # Windows has only the first two


class Stopper:
    """A context in which these signals only set ``requested``; within ``at_once`` they also raise KeyboardInterrupt."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.note, self.requested = note, False
        self._at_once = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopper:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if number != signal.SIGINT and signal.getsignal(number) == signal.SIG_IGN:
                    continue  # ignored on purpose, for example by nohup
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within this context, a signal raises KeyboardInterrupt at once; an earlier signal raises it on entry.

        Use it for work that a resumed run repeats.
        """
        self._at_once = True
        try:
            self.check()
            yield
        finally:
            self._at_once = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if a stop was requested."""
        if self.requested:
            raise KeyboardInterrupt

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.requested:  # a closing terminal may send SIGHUP twice; the step must not be lost
            return
        self.requested = True
        if self._at_once:
            raise KeyboardInterrupt
        self.note("stopping after the current step; press Ctrl-C again to stop at once")
