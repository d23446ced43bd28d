"""The progress of a comparison on standard error: a line for every run that ends, and one at least every 30 seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from poise.comparison import shared_start
from poise.comparison.plan import PlannedRun
from poise.comparison.results import ACCURACY, RunResult
from poise.runs.console import duration, shorten, visible

MOST_SHOWN = 4  # runs under way
SILENCE = 30.0  # seconds


@dataclass(frozen=True)
class Status:
    """How far a comparison is. ``left`` is in seconds, and None until a run has told how long one takes."""

    done: int
    waiting: int
    running: list[PlannedRun]
    left: float | None

    def __str__(self) -> str:
        end = "" if self.left is None else f", {duration(self.left)} to the end"
        return f"[{self.done} done, {len(self.running)} running, {self.waiting} left{end}]"


class Progress:
    """Prints what is done, running and left, and the time to the end."""

    def __init__(
        self, *, quiet: bool = False, file: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._quiet, self._file, self._clock = quiet, file or sys.stderr, clock
        self._printed = clock()  # the last line

    def note(self, text: str) -> None:
        """Print a message."""
        self._printed = self._clock()
        if not self._quiet:
            print(visible(text), file=self._file, flush=True)

    def ended(self, run: PlannedRun, result: RunResult | None, why: str, status: Status) -> None:
        """Print how a run has ended: with a result, or without one and ``why``."""
        self.note(f"{status} {run.name}: {_ending(result, why)}")

    def update(self, status: Status) -> None:
        """Print how far the comparison is, if nothing was printed for long."""
        if status.running and self._clock() - self._printed >= SILENCE:
            runs = [f"{run.name} ({_stage(run)})" for run in status.running[:MOST_SHOWN]]
            others = len(status.running) - len(runs)
            self.note(f"{status} {'; '.join(runs)}" + (f" and {others} others" if others else ""))


def _ending(result: RunResult | None, why: str) -> str:
    if result is None:
        return f"failed: {shorten(why, 200, 1)}"
    if result.state == "diverged":
        return f"diverged at {shorten(result.why, 200, 1)}"
    scores = [point.scores.get(ACCURACY) for point in (result.curve[0], result.curve[-1])] if result.curve else []
    numbers = " → ".join(f"{score:.3f}" for score in scores if score is not None)
    return f"accuracy {numbers}, {result.cost.tokens:,.0f} tokens"


def _stage(run: PlannedRun) -> str:
    """What a run is doing."""
    if shared_start.is_measuring(run):
        return "accuracy before training"
    try:
        steps = (run.folder / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        steps = 0
    return f"step {steps}/{run.config.steps}"
