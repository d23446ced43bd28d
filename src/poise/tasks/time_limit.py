"""Call code that may hang: run it in a daemon thread, with a time limit."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from poise.tasks.rewards.worker import result_of


class HungError(RuntimeError):
    """The call did not return in time."""


class Worker:
    """Runs calls one at a time in one thread, because some libraries must always be used from the same thread.

    If a call does not return in time, the worker abandons the thread. The thread cannot be killed, but it does not keep
    the process alive. The next call gets a new thread.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Any] | None = None
        self._lock = threading.Lock()

    def run(self, seconds: float, function: Callable[..., Any], /, *args: Any, **settings: Any) -> Any:
        """Call ``function`` and return its result or its coroutine's result. Its exceptions reach the caller."""
        with self._lock:
            if self._jobs is None:
                self._jobs = queue.SimpleQueue()
                threading.Thread(target=_work, args=(self._jobs,), daemon=True, name="poise-environment").start()
            results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
            self._jobs.put((results, function, args, settings))
            try:
                value, error = results.get(timeout=seconds)
            except queue.Empty:
                self._jobs.put(None)  # ends the thread if the call ever returns
                self._jobs = None
                raise HungError(f"did not return within {seconds:g} s") from None
        if error is not None:
            raise error
        return value

    def __del__(self) -> None:
        if self._jobs is not None:
            self._jobs.put(None)  # ends the thread


def _work(jobs: queue.SimpleQueue[Any]) -> None:
    while (job := jobs.get()) is not None:
        results, function, args, settings = job
        try:
            results.put((result_of(function(*args, **settings)), None))
        except BaseException as error:  # raised again in ``run``
            results.put((None, error))
