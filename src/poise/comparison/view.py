"""The progress of a comparison: one view that changes on a terminal, a line for every finished run elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from poise.comparison.plan import PlannedRun
from poise.comparison.results import ACCURACY, RunResult
from poise.comparison.runner import Status
from poise.runs.console import duration, shorten, visible

MOST_SHOWN = 16  # runs under way


class Progress:
    """Shows what is done, running and left, and the time to the end."""

    def __init__(self, *, quiet: bool = False, file: TextIO | None = None) -> None:
        self._file = file or sys.stderr
        self._quiet = quiet
        self._live: Live | None = None
        if not quiet and self._file.isatty():
            console = Console(file=self._file, markup=False, emoji=False, highlight=False)
            if not console.is_dumb_terminal:
                self._live = Live(console=console, refresh_per_second=2, transient=True)
        self._status: Status | None = None
        self._shown = 0.0

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
            print(visible(text), file=self._file, flush=True)

    def ended(self, run: PlannedRun, result: RunResult | None, why: str) -> None:
        """Show how a run has ended."""
        self.note(f"{self._numbers()}{run.name}: {_ending(result, why)}")

    def update(self, status: Status) -> None:
        """Show how far the comparison is."""
        self._status = status
        if self._live and time.monotonic() - self._shown > 0.5:
            self._shown = time.monotonic()
            self._live.update(_panel(status))

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
        step, steps = _steps(run), run.config.steps
        table.add_row(Text(f"  {shorten(visible(run.name), 60, 1)}"), Text(f"step {step}/{steps}"), duration(seconds))
    return Group(ProgressBar(max(status.total, 1), status.done), Text(", ".join(parts)), table)


def _steps(run: PlannedRun) -> int:
    """The steps that a run has taken."""
    try:
        return (run.folder / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0
