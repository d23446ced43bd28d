"""Evaluates a run before training, every ``evaluation.every`` steps, and at the end.

A signal ends an evaluation at once. A resumed run repeats the whole evaluation, with the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import nan
from typing import Any

from poise._lib.files import sealed, was_changed
from poise.runs.folder import RunFolder
from poise.runs.subscribers.console import Console
from poise.runs.subscribers.summary import read_before
from poise.runs.trackers import Tracker
from poise.sampling.sampler import Sampler
from poise.tasks import draw
from poise.training.accuracy import is_summary
from poise.training.config.schema import Config
from poise.training.evaluation import Evaluation, held_out, summary_metrics
from poise.training.interrupts import Stopper
from poise.training.steps import State, StepResult

STOP_SEED = 20_000  # added to the seed of evaluations during training if ``stop_at`` is set; tuning adds 10,000


class EvaluationSchedule:
    """Evaluates the policy on held-out problems, as the run's settings say.

    ``before`` is the content of ``before.json``; pass it if another run has already measured the accuracy before
    training. ``after`` is the evaluation at the end.
    """

    def __init__(
        self,
        sampler: Sampler,
        config: Config,
        folder: RunFolder,
        console: Console,
        trackers: Sequence[Tracker],
        stopper: Stopper,
        before: dict[str, Any] | None = None,
    ) -> None:
        self.sampler, self.config, self.folder = sampler, config, folder
        self.console, self.trackers, self.stopper = console, trackers, stopper
        self.before = before
        self.after: Evaluation | None = None
        self._state = State()  # the state after the newest step
        self._newest: tuple[int, int, Evaluation] | None = None  # the newest evaluation, with its step and seed

    def on_start(self, state: State) -> bool:
        """Evaluate before training, or repeat an interrupted evaluation. Return False if the goal is reached."""
        self._state = state
        self.before = self._before(state.step)
        at_the_end = state.ending(self.config.steps, self.config.budget) is not None
        return at_the_end or not self.catch_up(state.step)

    def on_step(self, result: StepResult) -> bool:
        """Evaluate if an evaluation is due and the step is not the last. Return False if the goal is reached."""
        self._state = result.state
        if self.due(result.state.step) and not result.ending:
            measured = self.during()
            result.metrics.update(measured)
            self.folder.log_more(result.state.step, measured)
        return not self.goal_reached(result.metrics)

    def on_end(self, state: State) -> None:
        """Evaluate after training, unless a callback ended the run just after an evaluation of the same weights."""
        match self._newest:
            case (state.step, self.config.evaluation.seed, evaluation):
                self.after = evaluation
            case _:
                self.after = self.measure()

    def measure(self, seed: int | None = None) -> Evaluation:
        """Evaluate now, with the given seed or the settings' seed. A stop request raises KeyboardInterrupt.

        The problems are drawn again each time, because a user's task may change them.
        """
        settings, task = self.config.evaluation, self.sampler.task
        seed = settings.seed if seed is None else seed
        greedily = " and greedily" if self.config.test_temperature else ", greedily"
        with self.stopper.at_once():
            problems = draw(task, "test", seed, settings.problems, self.sampler.fits)
            self.console.note(f"evaluating {len(problems)} held-out problems × {settings.samples}{greedily}")
            sampler = self.sampler.at(self._state.progress(self.config, task))
            evaluation = held_out(sampler, self.config, self._progress, problems, seed)
            self.console.note(f"  {evaluation.in_short()}")
            self._newest = self._state.step, seed, replace(evaluation, attempts=())
            return evaluation

    def during(self) -> dict[str, float]:
        """Evaluate during training and return the metrics.

        With ``stop_at``, use different problems and random numbers than the evaluations before and after training: the
        accuracy that ends a run is high partly by chance, so it must not be the reported accuracy.
        """
        return self.measure(self.config.evaluation.seed + (STOP_SEED if self.config.stop_at else 0)).metrics()

    def _progress(self, done: int, total: int) -> None:
        self.console.note(f"  {done}/{total}")
        self.stopper.check()  # Python ignores an error that a signal handler raises in a destructor

    def _before(self, step: int) -> dict[str, Any]:
        """Measure the accuracy before training, or read it from ``before.json`` in a resumed run."""
        before = read_before(self.folder, step)
        if before is None:
            before = self.before
            if before is None:
                evaluation = self.measure()
                before = evaluation.summary() | {"by_problem": evaluation.by_problem()}
            self.folder.write_json("before.json", sealed(before))
        return before

    def due(self, step: int) -> bool:
        """Whether an evaluation is due after this step, if the step is not the last."""
        every = self.config.evaluation.every
        return every > 0 and step % every == 0

    def catch_up(self, step: int) -> bool:
        """Run the evaluation after ``step`` if it was interrupted. Return True if the goal is reached.

        If the run had ended at this step and now continues, its final evaluation counts as the evaluation after this
        step. With ``stop_at`` it does not, because evaluations during training then use different problems.
        """
        line = next((line for line in self.folder.metrics() if line["step"] == step), None)
        summary = self.folder.read_json("summary.json")
        ended = isinstance(summary, dict) and summary.get("steps") == step and not self.config.stop_at
        final = summary.get("after") if ended and not was_changed(summary) else None
        if line is None or not (self.due(step) or is_summary(final)):
            return False
        if any(key.startswith("eval/") for key in line):  # if an evaluation was interrupted, it was the final one
            return self.goal_reached(line)
        task = self.sampler.task.name
        measured = summary_metrics(task, final) if is_summary(final) else self.during()
        self.folder.log_more(step, measured)
        logged = {key: nan if value is None else value for key, value in line.items() if key != "step"}
        self.console.step(step, logged | measured)
        for tracker in self.trackers:
            tracker.log(step, logged | measured)
        return self.due(step) and self.goal_reached(measured)

    def goal_reached(self, metrics: dict[str, float]) -> bool:
        """Whether the step has an evaluation that reached ``stop_at``."""
        name = f"eval/{self.sampler.task.name}/avg@{self.config.evaluation.samples}"
        goal, accuracy = self.config.stop_at, metrics.get(name)
        if goal is None or accuracy is None or accuracy < goal:
            return False
        self.console.note(
            f"accuracy {accuracy:.3f} on other held-out problems has reached stop_at={goal}: stopping to evaluate again"
        )
        return True
