"""The evaluations of one run: before training, every ``evaluation.every`` steps, and at the end.

A signal ends an evaluation at once. A resumed run does it again from the beginning, with the same result.
"""

from __future__ import annotations

from math import nan
from typing import Any

from poise._lib.files import sealed
from poise.algorithms.sampler import Sampler
from poise.config.schema import Config
from poise.runs.folder import RunFolder
from poise.runs.subscribers.reporter import Reporter
from poise.runs.subscribers.results import change, read_before, shown_before
from poise.tasks import Problem, draw
from poise.training.accuracy import is_summary
from poise.training.evaluate import Evaluation, held_out, summary_metrics
from poise.training.interrupts import Stopper
from poise.training.resume import model_errors
from poise.training.steps import State, StepResult

WATCH = 20_000  # added to the seed of the evaluations that ``stop_at`` watches; tuning adds 10,000


class Evaluations:
    """Measures the policy on held-out problems, as the run's settings say.

    ``before`` is the accuracy before training, if it is known already; ``summary`` are the contents of
    ``summary.json``, at the end.
    """

    def __init__(
        self, sampler: Sampler, config: Config, folder: RunFolder, report: Reporter, stopper: Stopper,
        before: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.sampler, self.config, self.folder, self.report, self.stopper = sampler, config, folder, report, stopper
        self.before, self.summary = before, dict[str, Any]()
        self.state = State()  # the newest that it was told of
        self._drawn: dict[int, list[Problem]] = {}

    def on_start(self, state: State) -> bool:
        """Measure before training, or do an evaluation that was cut short; False if the goal is reached already."""
        self.state = state
        self.before = self._first(state.step)
        return state.ending(self.config) is not None or not self.catch_up(state.step)

    def on_step(self, result: StepResult) -> bool:
        """Evaluate, if it is time and not the last step; False if the goal is reached."""
        self.state = state = result.state
        if self.due(state.step) and not state.ending(self.config):
            measured = self.during()
            result.metrics.update(measured)
            self.folder.log_more(state.step, measured)
        return not self.goal_reached(result.metrics)

    def on_end(self, state: State) -> None:
        """Measure after training, and write ``problems.json`` and ``summary.json``."""
        summary = {"steps": state.step, "tokens": state.tokens, "before": shown_before(self.before), "after": None}
        if self.config.evaluation.problems:
            after = self.measure()
            by_problem = after.by_problem()
            summary |= {"after": after.summary(), "change": change(self.before, by_problem)}
            self.folder.write_json("problems.json", by_problem)
        self.summary = sealed(summary | {"run": str(self.folder.path)})
        self.folder.write_json("summary.json", self.summary)

    def problems(self, seed: int) -> list[Problem]:
        """The held-out problems of a seed.

        A task of poise's own draws them once. A user's task may write into its problems, and draws them anew.
        """
        own = type(self.sampler.task).__module__.startswith("poise.")
        if not own or seed not in self._drawn:
            self._drawn[seed] = draw(
                self.sampler.task, "test", seed, self.config.evaluation.problems, self.sampler.fits
            )
        return self._drawn[seed]

    def measure(self, seed: int | None = None) -> Evaluation:
        """Evaluate now, with the seed of the settings or another. A stop request raises KeyboardInterrupt."""
        settings = self.config.evaluation
        seed = settings.seed if seed is None else seed
        greedily = " and greedily" if self.config.test_temperature else ", greedily"
        with self.stopper.at_once(), model_errors():
            problems = self.problems(seed)
            self.report.note(f"evaluating {len(problems)} held-out problems × {settings.samples}{greedily}")
            sampler = self.sampler.at(self.state.progress(self.config, self.sampler.task))
            return held_out(sampler, self.config, self._progress, problems, seed)

    def during(self) -> dict[str, float]:
        """The metrics of an evaluation in the course of training.

        With ``stop_at`` it has other problems and random numbers than those before and after training: the accuracy
        that ends a run is among its highest by chance, and so must not be the one that is reported.
        """
        return self.measure(self.config.evaluation.seed + (WATCH if self.config.stop_at else 0)).metrics()

    def _progress(self, done: int, total: int) -> None:
        self.report.note(f"  {done}/{total}")
        self.stopper.check()  # Python drops what a signal raises in a destructor

    def _first(self, done: int) -> dict[str, Any] | None:
        """The accuracy before training: measured once; a resumed run reads it from ``before.json``. None: off."""
        if not self.config.evaluation.problems:
            return None
        before = read_before(self.folder, done)
        if before is None:
            before = self.before
            if before is None:
                found = self.measure()
                before = found.summary() | {"by_problem": found.by_problem()}
            self.folder.write_json("before.json", sealed(before))
        return before

    def due(self, step: int) -> bool:
        """Whether to evaluate after this step, unless it is the last."""
        settings = self.config.evaluation
        return settings.problems > 0 and settings.every > 0 and step % settings.every == 0

    def catch_up(self, done: int) -> bool:
        """Do the evaluation after step ``done`` that was cut short, if it was; whether the goal is reached.

        The final evaluation of a run that ended there and now goes on is the evaluation after that step, unless
        ``stop_at`` has problems of its own.
        """
        line = next((line for line in self.folder.metrics() if line["step"] == done), None)
        summary = self.folder.read_json("summary.json")
        ended = isinstance(summary, dict) and summary.get("steps") == done and not self.config.stop_at
        final = summary.get("after") if ended else None
        if line is None or not (self.due(done) or is_summary(final)):
            return False
        if any(key.startswith("eval/") for key in line):  # only the final evaluation was cut short, if there was one
            return self.goal_reached(line)
        task = self.sampler.task.name
        measured = summary_metrics(task, final) if is_summary(final) else self.during()
        self.folder.log_more(done, measured)
        logged = {key: nan if value is None else value for key, value in line.items() if key != "step"}
        self.report.show(done, logged | measured)
        return self.due(done) and self.goal_reached(measured)

    def goal_reached(self, metrics: dict[str, float]) -> bool:
        """Whether a step's evaluation, if it had one, reached ``stop_at``."""
        name = f"eval/{self.sampler.task.name}/avg@{self.config.evaluation.samples}"
        goal, accuracy = self.config.stop_at, metrics.get(name)
        if goal is None or accuracy is None or accuracy < goal:
            return False
        self.report.note(
            f"accuracy {accuracy:.3f} on other held-out problems has reached stop_at={goal}: stopping, to measure anew"
        )
        return True
