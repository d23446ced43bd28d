"""Calls into code that may hang: in a daemon thread, with a time limit."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from poise.rewards.worker import settled


class HungError(RuntimeError):
    """A call that did not return in time."""


class Worker:
    """Runs calls one after another, all in one thread: some libraries want to be used from the thread that began.

    A call that does not return in time is given up with its thread, which cannot be killed but does not keep the
    process alive; the next call gets a new thread.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Any] | None = None
        self._lock = threading.Lock()

    def run(self, seconds: float, function: Callable[..., Any], /, *args: Any, **settings: Any) -> Any:
        """The function's result; a coroutine is run to its end. What it raises is raised here."""
        with self._lock:
            if self._jobs is None:
                self._jobs = queue.SimpleQueue()
                threading.Thread(target=_work, args=(self._jobs,), daemon=True, name="poise-environment").start()
            results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
            self._jobs.put((results, function, args, settings))
            try:
                value, error = results.get(timeout=seconds)
            except queue.Empty:
                self._jobs.put(None)  # should it return one day, its thread ends
                self._jobs = None
                raise HungError(f"did not return within {seconds:g} s") from None
        if error is not None:
            raise error
        return value

    def __del__(self) -> None:
        if self._jobs is not None:
            self._jobs.put(None)  # the thread ends


def _work(jobs: queue.SimpleQueue[Any]) -> None:
    while (job := jobs.get()) is not None:
        results, function, args, settings = job
        try:
            results.put((settled(function(*args, **settings)), None))
        except BaseException as error:  # the one who asked decides what it means
            results.put((None, error))
