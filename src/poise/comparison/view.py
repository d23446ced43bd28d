"""The progress of a comparison: one view that changes on a terminal, a line for every finished run, and at least
every 30 seconds, elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from poise.comparison import shared_start
from poise.comparison.plan import PlannedRun
from poise.comparison.results import ACCURACY, RunResult
from poise.comparison.runner import Status
from poise.runs.console import duration, shorten, visible

MOST_SHOWN = 16  # runs under way
SHOWN_IN_LINE = 4
SILENCE = 30.0  # seconds without a line, where there is no view that changes


class Progress:
    """Shows what is done, running and left, and the time to the end."""

    def __init__(
        self, *, quiet: bool = False, file: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._file = file or sys.stderr
        self._quiet = quiet
        self._live: Live | None = None
        if not quiet and self._file.isatty():
            console = Console(file=self._file, markup=False, emoji=False, highlight=False)
            if not console.is_dumb_terminal:
                self._live = Live(console=console, refresh_per_second=2, transient=True)
        self._status: Status | None = None
        self._shown = 0.0 if self._live else self._clock()  # the view, or the last line

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def note(self, text: str) -> None:
        """Show a message."""
        if self._quiet:
            return
        if self._live:
            self._live.console.print(Text(visible(text)))
        else:
            self._shown = self._clock()
            print(visible(text), file=self._file, flush=True)

    def ended(self, run: PlannedRun, result: RunResult | None, why: str) -> None:
        """Show how a run has ended."""
        self.note(f"{self._numbers()}{run.name}: {_ending(result, why)}")

    def update(self, status: Status) -> None:
        """Show how far the comparison is."""
        self._status = status
        now = self._clock()
        if self._live and now - self._shown > 0.5:
            self._shown = now
            self._live.update(_panel(status))
        elif not self._live and not self._quiet and status.running and now - self._shown >= SILENCE:
            runs = [f"{run.name} ({_stage(run)})" for run, _ in status.running[:SHOWN_IN_LINE]]
            others = len(status.running) - len(runs)
            self.note(self._numbers() + "; ".join(runs) + (f" and {others} others" if others else ""))

    def _numbers(self) -> str:
        if self._live or self._status is None:
            return ""
        status = self._status
        end = "" if status.left is None else f", {duration(status.left)} to the end"
        return f"[{status.done} done, {len(status.running)} running, {status.waiting} left{end}] "


def _ending(result: RunResult | None, why: str) -> str:
    if result is None:
        return f"failed: {shorten(why, 200, 1)}"
    scores = [point.scores.get(ACCURACY) for point in (result.curve[0], result.curve[-1])] if result.curve else []
    numbers = " → ".join(f"{score:.3f}" for score in scores if score is not None)
    if result.state == "diverged":
        return f"diverged at {shorten(result.why, 200, 1)}"
    return f"accuracy {numbers}, {result.cost.tokens:,.0f} tokens"


def _panel(status: Status) -> Group:
    """The view of a moment."""
    parts = [f"{status.done} of {status.total} runs done", f"{len(status.running)} running", f"{status.waiting} left"]
    parts += [f"{status.failed} failed"] if status.failed else []
    parts += [f"{duration(status.left)} to the end"] if status.left is not None else []
    table = Table.grid(padding=(0, 2))
    for run, seconds in status.running[:MOST_SHOWN]:
        table.add_row(Text(f"  {shorten(visible(run.name), 60, 1)}"), Text(_stage(run)), duration(seconds))
    return Group(ProgressBar(max(status.total, 1), status.done), Text(", ".join(parts)), table)


def _stage(run: PlannedRun) -> str:
    """What a run is doing."""
    if shared_start.is_measuring(run):
        return "accuracy before training"
    return f"step {_steps(run)}/{run.config.steps}"


def _steps(run: PlannedRun) -> int:
    """The steps that a run has taken."""
    try:
        return (run.folder / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0
