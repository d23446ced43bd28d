"""Ctrl-C as a request: the step under way is finished and kept; a second one stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Stopper:
    """A context in which the first SIGINT or SIGTERM only sets ``asked``."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.asked = say, False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopper:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.say("stopping after this step; press Ctrl-C again to stop at once")
