"""Signals as a request: the step under way is finished and kept; a second Ctrl-C stops at once.

SIGTERM comes from ``kill`` and from schedulers, SIGHUP from a terminal that closes, SIGUSR1, SIGUSR2 and SIGXCPU from
batch systems shortly before the time is up.
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
    """A context in which these signals only set ``asked``."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.asked = say, False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopper:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if number != signal.SIGINT and signal.getsignal(number) == signal.SIG_IGN:
                    continue  # nohup: asked to ignore it
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.asked:  # a terminal that closes may send SIGHUP twice: that is no reason to lose the step
            return
        self.asked = True
        self.say("stopping after the step or evaluation under way; press Ctrl-C again to stop at once")
