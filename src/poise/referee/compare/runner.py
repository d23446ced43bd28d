"""Runs a plan in parallel: tuning first, then seed by seed over all arms, so that finished runs are paired.

Only the run folders record which runs are done. So a comparison that was stopped, killed or extended continues from
its run folders: finished and diverged runs are results, and all other runs are started or resumed. ``Progress`` prints
a line to standard error when a run ends, and at least every 30 seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any

from poise._lib.errors import visible
from poise._lib.files import dumps, remove, replacing
from poise.referee.compare import shared_start
from poise.referee.compare.arms import PlannedArm, Variant
from poise.referee.compare.plan import Plan, PlannedRun
from poise.referee.compare.processes import Processes, RunExit, ending, last_lines
from poise.referee.compare.results import ACCURACY, RunResult, choose_rate, result_of
from poise.referee.compare.worker import STOPPED
from poise.runs.subscribers.console import duration, shorten

MOST_LISTED = 4  # active runs named in a line
SILENCE = 30.0  # seconds
HOPELESS = 3  # stop if this many runs fail before any run succeeds
PAUSE = 0.25  # seconds between checks


@dataclass(frozen=True)
class Status:
    """The progress of a comparison. ``left`` is in seconds, None until a run has finished."""

    done: int
    waiting: int
    running: list[PlannedRun]
    left: float | None

    def __str__(self) -> str:
        end = "" if self.left is None else f", {duration(self.left)} to the end"
        return f"[{self.done} done, {len(self.running)} running, {self.waiting} left{end}]"


class Progress:
    """Prints the numbers of runs that are done, running and left, and the remaining time."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet, self._last_line = quiet, monotonic()

    def note(self, text: str) -> None:
        """Print a message."""
        self._last_line = monotonic()
        if not self._quiet:
            print(visible(text), file=sys.stderr, flush=True)

    def ended(self, run: PlannedRun, result: RunResult | None, why: str, status: Status) -> None:
        """Print how a run ended: its result, or the reason ``why`` it has no result."""
        self.note(f"{status} {run.name}: {_ending(result, why)}")

    def update(self, status: Status) -> None:
        """Print the status if nothing was printed for 30 seconds."""
        if status.running and monotonic() - self._last_line >= SILENCE:
            runs = [f"{run.name} ({_stage(run)})" for run in status.running[:MOST_LISTED]]
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
    """What an active run is doing: measuring accuracy before training, or its training step."""
    if shared_start.is_measuring(run):
        return "accuracy before training"
    try:
        steps = (run.folder / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        steps = 0
    return f"step {steps}/{run.config.steps}"


@dataclass
class ActiveRun:
    """A run in a process."""

    run: PlannedRun
    since: float
    fresh: bool  # started, not resumed: its time covers the whole run


@dataclass
class Runner:
    """Trains the runs of a plan, and tracks which are done, active and next."""

    plan: Plan
    processes: Processes
    view: Progress
    jobs: int

    def __post_init__(self) -> None:
        self._results: dict[Path, RunResult | None] = {}
        self._running: dict[Path, ActiveRun] = {}
        self._tries: dict[Path, int] = {}
        self._succeeded = 0
        self._begin = monotonic()
        self._seconds: list[float] = []  # the time of each run that this runner started and finished
        self.failures: dict[str, dict[str, Any]] = {}
        self.stopped = False
        self.out_of_time = False

    # Results

    def result(self, folder: Path) -> RunResult | None:
        """The result of the run in a folder; None if it has none yet."""
        if folder not in self._results:  # read once, and again after the run ends
            self._results[folder] = result_of(folder)
        return self._results[folder]

    def left(self) -> list[PlannedRun]:
        """The runs without a result."""
        return [run for run in self.runs() if self.result(run.folder) is None]

    def variant_of(self, arm: PlannedArm) -> Variant | None:
        """The variant of an arm for the comparison; None until its learning rate is chosen."""
        return choose_rate(self.plan, arm, self.result)

    # The loop

    def run(self, interrupted: Callable[[], bool]) -> None:
        """Train all runs without a result. When ``interrupted()`` is true, runs finish their step, save and stop."""
        stopping = False
        (self.plan.folder / "failures.json").unlink(missing_ok=True)  # from the last command; failed runs are retried
        for planned in self.runs():
            if self.result(planned.folder) is not None:
                self._remove_checkpoints(planned.folder)
        try:
            while True:
                if interrupted() and not stopping:
                    stopping = self.stopped = True
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
        """The next run to start; None if no run or no time is left, or if every run must wait."""

        def is_open(run: PlannedRun) -> bool:
            given_up = self._tries.get(run.folder, 0) > self.plan.settings.retries
            return run.folder not in self._running and not given_up and self.result(run.folder) is None

        for runs in self._rounds():
            if waiting := [run for run in runs if is_open(run)]:
                started = len(waiting) < len(runs)  # a round that has started is finished unless time is already up
                if self._too_late([] if started else waiting):
                    return None
                return self._first_ready(waiting)
        return None

    def _rounds(self) -> Iterator[list[PlannedRun]]:
        """The runs in order: first the tuning runs, then each seed's runs of the arms whose learning rate is known."""
        yield self.plan.tuning_runs()
        variants = [(arm, variant) for arm in self.plan.arms if (variant := self.variant_of(arm))]
        for seed in self.plan.seeds:
            yield [self.plan.run(arm, variant, seed) for arm, variant in variants]

    def _first_ready(self, runs: Sequence[PlannedRun]) -> PlannedRun | None:
        """The first run that need not wait for another run's accuracy before training; None if all must wait."""
        measuring = [each.run for each in self._running.values() if shared_start.is_measuring(each.run)]
        for run in runs:
            if not any(shared_start.same_start(run, other) for other in measuring) or self._before(run) is not None:
                return run
        return None

    def _start(self, run: PlannedRun) -> None:
        self._tries[run.folder] = self._tries.get(run.folder, 0) + 1
        self.failures.pop(str(run.folder), None)
        fresh = not (run.folder / "config.json").exists()
        self.processes.start(run.config, self.plan.log_of(run), self._before(run))
        self._running[run.folder] = ActiveRun(run, monotonic(), fresh)  # the time starts after the imports

    def _before(self, run: PlannedRun) -> Path | None:
        """A file with the run's accuracy before training, if another run has measured it."""
        return shared_start.newest_file(run, self.runs())

    def _end(self, run_exit: RunExit) -> None:
        active = self._running.pop(run_exit.folder)
        run, seconds = active.run, monotonic() - active.since
        self._results.pop(run.folder, None)
        result = self.result(run.folder)
        if result is not None:
            self._succeeded += 1
            self._remove_checkpoints(run.folder)
            if active.fresh and result.state == "finished":
                self._seconds.append(seconds)
            self.view.ended(run, result, "", self.status())
        elif run_exit.status == STOPPED or self.stopped:
            self._tries[run.folder] -= 1
        else:
            self._fail(run, run_exit.status)

    def _remove_checkpoints(self, folder: Path) -> None:
        """Remove the checkpoints of a run with a result if ``keep`` is "results"."""
        if self.plan.settings.keep == "results":
            for checkpoint in folder.glob("checkpoints/*"):
                remove(checkpoint)

    def _fail(self, run: PlannedRun, status: int) -> None:
        log = self.plan.log_of(run)
        lines = last_lines(log)
        why = lines[-1] if lines and status > 0 else ending(status)
        self.failures[str(run.folder)] = {
            "arm": run.arm.name,
            "seed": run.seed,
            "ended": ending(status),
            "log": str(log),
            "last_lines": lines,
        }
        with replacing(self.plan.folder / "failures.json") as file:
            file.write(dumps(self.failures, indent=1))
        self.view.ended(run, None, why, self.status())
        if not self._succeeded and len(self.failures) >= HOPELESS and not self.stopped:
            self.stopped = True
            self.view.note(
                f"the first {len(self.failures)} runs all failed: no more will start; fix the error and run again"
            )

    # Time

    def _too_late(self, runs: Sequence[PlannedRun]) -> bool:
        """Whether ``hours`` have passed, or would pass before these runs end, at the finished runs' mean time."""
        ahead = 0.0
        if runs and self._seconds:
            ahead = max((self._left_of_running() + len(runs) * self._mean()) / self.jobs, self._mean())
        hours = self.plan.settings.hours
        if not self.out_of_time and monotonic() - self._begin + ahead > hours * 3600:
            self.out_of_time = True
            self.view.note(f"hours={hours:g} leaves no time for another seed of all arms: no more runs will start")
        return self.out_of_time

    def _mean(self) -> float:
        return fmean(self._seconds)

    def _left_of_running(self) -> float:
        """Seconds of work left in the active runs."""
        whole, now = self._mean(), monotonic()
        return sum(max(whole - (now - each.since), 0.05 * whole) for each in self._running.values())

    def status(self) -> Status:
        """The progress of the comparison."""
        running = [each.run for each in self._running.values()]
        done = sum(self.result(run.folder) is not None for run in self.runs())
        waiting, left = self.plan.size - done - len(running) - len(self.failures), None
        if self._seconds:
            whole = 0 if self.out_of_time or self.stopped else waiting * self._mean()
            left = (self._left_of_running() + whole) / min(self.jobs, max(1, waiting + len(running)))
        return Status(done, waiting, running, left)

    def runs(self) -> list[PlannedRun]:
        """The runs of the plan whose learning rate is known."""
        return [run for runs in self._rounds() for run in runs]
