"""The evaluations of one run: before training, after every so many steps, and at the end.

A signal ends an evaluation at once. A resumed run does it again from the beginning, with the same result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import nan
from typing import Any

from poise.algorithms.sampler import Sampler
from poise.config.schema import Config
from poise.runs.folder import RunFolder
from poise.tasks import Problem, draw
from poise.training.accuracy import is_summary
from poise.training.evaluate import Evaluation, held_out, summary_metrics
from poise.training.interrupts import Stopper
from poise.training.reporter import Reporter
from poise.training.results import read_before
from poise.training.resume import model_errors


@dataclass(frozen=True)
class Evaluations:
    """Measures the policy on held-out problems, as the run's settings say."""

    sampler: Sampler
    config: Config
    folder: RunFolder
    report: Reporter
    stopper: Stopper

    @property
    def problems(self) -> list[Problem]:
        """The held-out problems, which are the same in every evaluation of a run.

        A task of poise's own draws them once. A user's task may write into its problems, and draws them anew.
        """
        own = type(self.sampler.task).__module__.startswith("poise.")
        return self._drawn if own else self._draw()

    @cached_property
    def _drawn(self) -> list[Problem]:
        return self._draw()

    def _draw(self) -> list[Problem]:
        settings = self.config.evaluation
        return draw(self.sampler.task, "test", settings.seed, settings.problems, self.sampler.fits)

    def measure(self) -> Evaluation:
        """Evaluate now. A stop request raises KeyboardInterrupt."""
        settings = self.config.evaluation
        greedily = " and greedily" if self.config.test_temperature else ", greedily"
        with self.stopper.at_once(), model_errors():
            problems = self.problems
            self.report.note(f"evaluating {len(problems)} held-out problems × {settings.samples}{greedily}")
            return held_out(self.sampler, self.config, self._progress, problems)

    def _progress(self, done: int, total: int) -> None:
        self.report.note(f"  {done}/{total}")
        self.stopper.check()  # Python drops what a signal raises in a destructor

    def before(self, done: int, known: dict[str, Any] | None) -> dict[str, Any] | None:
        """The accuracy before training: measured once; a resumed run reads it from ``before.json``. None: off."""
        if not self.config.evaluation.problems:
            return None
        before = read_before(self.folder, done)
        if before is None:
            before = known or self.measure().summary()
            self.folder.write_json("before.json", before)
        return before

    def due(self, step: int) -> bool:
        """Whether to evaluate after this step, unless it is the last."""
        settings = self.config.evaluation
        return settings.problems > 0 and settings.every > 0 and step % settings.every == 0

    def after(self) -> Evaluation | None:
        """The accuracy after training; None: off."""
        return self.measure() if self.config.evaluation.problems else None

    def catch_up(self, done: int) -> bool:
        """Do the evaluation after step ``done`` that was cut short, if it was; whether the goal is reached.

        The final evaluation of a run that ended there and now goes on is the evaluation after that step.
        """
        line = next((line for line in self.folder.metrics() if line["step"] == done), None)
        summary = self.folder.read_json("summary.json")
        final = summary.get("after") if isinstance(summary, dict) and summary.get("steps") == done else None
        if line is None or not (self.due(done) or is_summary(final)):
            return False
        if any(key.startswith("eval/") for key in line):  # only the final evaluation was cut short, if there was one
            return self.goal_reached(line)
        task = self.sampler.task.name
        measured = summary_metrics(task, final) if is_summary(final) else self.measure().metrics()
        self.folder.log_more(done, measured)
        logged = {key: nan if value is None else value for key, value in line.items() if key != "step"}
        self.report.step(done, logged | measured)
        return self.due(done) and self.goal_reached(measured)

    def goal_reached(self, metrics: dict[str, float]) -> bool:
        """Whether a step's evaluation, if it had one, reached ``stop_at``."""
        name = f"eval/{self.sampler.task.name}/avg@{self.config.evaluation.samples}"
        goal, accuracy = self.config.stop_at, metrics.get(name)
        if goal is None or accuracy is None or accuracy < goal:
            return False
        self.report.note(f"held-out accuracy {accuracy:.3f} has reached stop_at={goal}: stopping")
        return True
