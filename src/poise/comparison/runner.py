"""Carries out the runs of a plan side by side: tuning first, then seed by seed over all arms, so that what is finished
is paired.

What is done is read from the run folders alone. So a comparison that was stopped, killed or extended goes on where it
was: finished and diverged runs are results, and all others are begun or resumed. ``Progress`` prints a line to standard
error for every run that ends, and one at least every 30 seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

from poise._lib.files import dumps, remove, replacing
from poise.comparison import shared_start
from poise.comparison.arms import PlannedArm, Variant
from poise.comparison.plan import Plan, PlannedRun
from poise.comparison.processes import Ended, Processes, ending, last_lines
from poise.comparison.results import ACCURACY, RunResult, choose_rate, result_of
from poise.comparison.worker import STOPPED
from poise.runs.console import duration, shorten, visible

MOST_SHOWN = 4  # runs under way
SILENCE = 30.0  # seconds
HOPELESS = 3  # the first runs all fail: what is wrong with them is wrong with the others too
PAUSE = 0.25  # seconds between looks


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


@dataclass
class Started:
    """A run that is under way."""

    run: PlannedRun
    since: float
    fresh: bool  # begun now, not resumed: its time tells how long a run takes


@dataclass
class Runner:
    """The runs of a plan: which are done, which are under way, which come next."""

    plan: Plan
    processes: Processes
    view: Progress
    jobs: int
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._results: dict[Path, RunResult | None] = {}
        self._running: dict[int, Started] = {}
        self._tries: dict[Path, int] = {}
        self._count = self._succeeded = 0
        self._begin = self.clock()
        self._seconds: list[float] = []  # of the runs that were begun and finished since
        self.failures: dict[str, dict[str, Any]] = {}
        self.stopped = False
        self.out_of_time = False

    # What is known of a run

    def result(self, folder: Path) -> RunResult | None:
        """The result of the run in a folder; None while it has none."""
        if folder not in self._results:  # read once, and again when the run has ended
            self._results[folder] = result_of(folder)
        return self._results[folder]

    def left(self) -> list[PlannedRun]:
        """The runs of the plan that have no result yet and a learning rate already."""
        return [run for run in self.runs() if run and self.result(run.folder) is None]

    def unmeasured(self) -> bool:
        """Whether the first run that is left has to measure its accuracy before training: none has done so yet."""
        return any(self._before(run) is None for run in self.left()[:1])

    def chosen(self, arm: PlannedArm) -> Variant | None:
        """The variant of an arm that is compared; None while it is tuned."""
        return choose_rate(self.plan, arm, self.result)

    # The loop

    def run(self, interrupted: Callable[[], bool]) -> None:
        """Carry out all runs that have no result yet. ``interrupted`` asks to stop: runs finish their step and save."""
        asked = False
        (self.plan.folder / "failures.json").unlink(missing_ok=True)  # of the command before, which are tried again
        for planned in filter(None, self.runs()):
            if self.result(planned.folder) is not None:
                self._thin(planned.folder)
        try:
            while True:
                if interrupted() and not asked:
                    asked = self.stopped = True
                    self.processes.stop()
                while not self.stopped and len(self._running) < self.jobs and (run := self._next()):
                    self._start(run)
                if not self._running:
                    return
                for each in self.processes.wait(PAUSE):
                    self._end(each)
                self.view.update(self.status())
        except KeyboardInterrupt:  # the second Ctrl-C
            self.stopped = True
        finally:
            self.processes.close()

    def _next(self) -> PlannedRun | None:
        """The run to start next; None if there is none, no time for one, or all must wait."""
        under_way = {started.run.folder for started in self._running.values()}

        def is_open(run: PlannedRun) -> bool:
            tried = self._tries.get(run.folder, 0) > self.plan.limits.retries
            return run.folder not in under_way and not tried and self.result(run.folder) is None

        for runs in self._rounds():
            if waiting := [run for run in runs if is_open(run)]:
                begun = len(waiting) < len(runs)  # then all its arms are trained, if there is time
                if self._too_late([] if begun else waiting):
                    return None
                return self._first_ready(waiting)
        return None

    def _rounds(self) -> Iterator[list[PlannedRun]]:
        """The runs in their order: those that tune, then those of each seed."""
        yield self.plan.tuning_runs()
        for seed in self.plan.seeds:
            yield [self.plan.run(arm, variant, seed) for arm in self.plan.arms if (variant := self.chosen(arm))]

    def _first_ready(self, runs: Sequence[PlannedRun]) -> PlannedRun | None:
        """The first of these runs that need not wait for its accuracy before training, which another is measuring."""
        measuring = [each.run for each in self._running.values() if shared_start.is_measuring(each.run)]
        for run in runs:
            if not any(shared_start.alike(run, other) for other in measuring) or self._before(run) is not None:
                return run
        return None

    def _start(self, run: PlannedRun) -> None:
        self._count += 1
        self._tries[run.folder] = self._tries.get(run.folder, 0) + 1
        self.failures.pop(str(run.folder), None)
        fresh = not (run.folder / "config.json").exists()
        self.processes.start(self._count, run.config, self.plan.log_of(run), self._before(run))
        self._running[self._count] = Started(run, self.clock(), fresh)  # after imports, which take no run's time

    def _before(self, run: PlannedRun) -> Path | None:
        """A file with the run's accuracy before training, if another run has measured it."""
        return shared_start.measured(run, filter(None, self.runs()))

    def _end(self, ended: Ended) -> None:
        started = self._running.pop(ended.number)
        run, seconds = started.run, self.clock() - started.since
        self._results.pop(run.folder, None)
        result = self.result(run.folder)
        if result is not None:
            self._succeeded += 1
            self._thin(run.folder)
            if started.fresh and result.state == "finished":
                self._seconds.append(seconds)
            self.view.ended(run, result, "", self.status())
        elif ended.status == STOPPED or self.stopped:
            self._tries[run.folder] -= 1
        else:
            self._fail(run, ended.status)

    def _thin(self, folder: Path) -> None:
        """Remove the weights of a run that has a result, if they are not to be kept."""
        if self.plan.limits.keep == "results":
            for checkpoint in folder.glob("checkpoints/*"):
                remove(checkpoint)

    def _fail(self, run: PlannedRun, status: int) -> None:
        log = self.plan.log_of(run)
        lines = last_lines(log)
        why = lines[-1] if lines and status > 0 else ending(status)
        self.failures[str(run.folder)] = {
            "arm": run.arm.name, "seed": run.seed, "ended": ending(status), "log": str(log), "last_lines": lines,
        }  # fmt: skip
        with replacing(self.plan.folder / "failures.json") as file:
            file.write(dumps(self.failures, indent=1))
        self.view.ended(run, None, why, self.status())
        if not self._succeeded and len(self.failures) >= HOPELESS and not self.stopped:
            self.stopped = True
            self.view.note(f"the first {len(self.failures)} runs all failed: no more are started; fix it and run again")

    # Time

    def _too_late(self, runs: Sequence[PlannedRun]) -> bool:
        """Whether ``hours`` are over, or would be before these runs end, if they take as long as those before."""
        ahead = 0.0
        if runs and self._seconds:
            ahead = max((self._left_of_running() + len(runs) * self._mean()) / self.jobs, self._mean())
        hours = self.plan.limits.hours
        if not self.out_of_time and self.clock() - self._begin + ahead > hours * 3600:
            self.out_of_time = True
            self.view.note(f"hours={hours:g} have no room for another seed of all arms: no more runs are started")
        return self.out_of_time

    def _mean(self) -> float:
        return fmean(self._seconds)

    def _left_of_running(self) -> float:
        """Seconds of work that the runs under way still need."""
        whole, now = self._mean(), self.clock()
        return sum(max(whole - (now - each.since), 0.05 * whole) for each in self._running.values())

    def status(self) -> Status:
        """How far the comparison is."""
        runs, running = self.runs(), [each.run for each in self._running.values()]
        done = sum(run is not None and self.result(run.folder) is not None for run in runs)
        waiting, left = len(runs) - done - len(running) - len(self.failures), None
        if self._seconds:
            whole = 0 if self.out_of_time or self.stopped else waiting * self._mean()
            left = (self._left_of_running() + whole) / min(self.jobs, max(1, waiting + len(running)))
        return Status(done, waiting, running, left)

    def runs(self) -> list[PlannedRun | None]:
        """All runs of the plan; None for those whose learning rate is not chosen yet."""
        plan = self.plan
        chosen = [(arm, self.chosen(arm)) for arm in plan.arms]
        return [
            *plan.tuning_runs(),
            *(plan.run(arm, variant, seed) if variant else None for seed in plan.seeds for arm, variant in chosen),
        ]
