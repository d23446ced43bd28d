"""Reports a run's progress to the console and the trackers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self

from poise._lib.files import sealed
from poise.algorithms.base import FIRST, Trajectory
from poise.config.schema import Config
from poise.runs.console import Console, complain
from poise.runs.folder import RunFolder
from poise.runs.trackers import open_trackers
from poise.training import results
from poise.training.evaluate import Evaluation
from poise.training.records import shown
from poise.training.warnings import RunWarning, Watch


class Reporter:
    """Shows a run's steps and warnings on the console, and sends the steps to the trackers."""

    def __init__(self, config: Config, folder: RunFolder, start_step: int, *, quiet: bool = False) -> None:
        self._stack = ExitStack()
        self._watch: Watch | None = None
        self._config, self._folder, self._quiet = config, folder, quiet
        settings = config.model_dump(mode="json")
        self._trackers = open_trackers(config.tracking, folder.path, settings, start_step=start_step)
        for tracker in self._trackers:
            self._stack.callback(tracker.close)
        self._console = Console(config.steps, start_step, budget=config.budget, quiet=quiet)

    def __enter__(self) -> Self:
        self._stack.enter_context(self._console)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def note(self, text: str) -> None:
        """Show a message."""
        self._console.note(text)

    def begin(self, step: int, tokens: int) -> None:
        """Start the timing: training continues after this step, with so many tokens sampled until then."""
        self._watch = Watch(self._config, self._folder)
        self._warn(self._watch.new(step))
        self._console.begin(step, tokens)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Report a finished step."""
        self._console.step(step, metrics)
        for tracker in self._trackers:
            tracker.log(step, metrics)
        if self._watch is not None:
            self._watch.lines.append(metrics)
            self._warn(self._watch.new(step))

    def _warn(self, warnings: Sequence[RunWarning]) -> None:
        """Show warnings, on standard error if the console is quiet."""
        for warning in warnings:
            (complain if self._quiet else self.note)(str(warning))

    def samples(self, samples: Sequence[Trajectory]) -> None:
        """Show a few first attempts, chosen across the range of rewards."""
        self._console.samples_table([shown(sample) for sample in samples if sample.role == FIRST])

    def ended(self, setting: str | None, step: int, tokens: int) -> None:
        """Report which of ``budget`` and ``steps`` ended the run after this step; None: neither did."""
        budget = self._config.budget
        if budget is None or setting is None:
            return
        spent, over = f"budget={budget} is spent", f"steps={step} came before budget={budget}"
        self.note(f"{spent if setting == 'budget' else over}: {tokens} tokens were sampled in {step} steps")

    def stopped(self, resume: str) -> None:
        """Report that the run ends early; ``resume`` is the command that continues it."""
        self._console.close()
        self._console.note(f"stopped; go on with: {resume}")

    def finished(
        self, steps: int, tokens: int, before: dict[str, Any] | None, after: Evaluation | None
    ) -> dict[str, Any]:
        """Write and show the result of the run; the contents of ``summary.json``."""
        summary = {"steps": steps, "tokens": tokens, "before": results.shown_before(before), "after": None}
        if after is not None:
            by_problem = after.by_problem()
            summary |= {"after": after.summary(), "change": results.change(before, by_problem)}
            self._folder.write_json("problems.json", by_problem)
        summary = sealed(summary | {"run": str(self._folder.path)})
        self._folder.write_json("summary.json", summary)
        if not self._quiet:
            results.show(self._config, summary, self._console)
        return summary
