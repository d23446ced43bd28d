"""Reports a run's progress to the console and the trackers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Self

from poise.algorithms.base import FIRST, Trajectory
from poise.config.schema import Config
from poise.runs.console import Console, barred, complain
from poise.runs.folder import RunFolder
from poise.runs.subscribers.warnings import RunWarning, Watch
from poise.runs.trackers import open_trackers
from poise.training.steps import State, StepResult


class Reporter:
    """Shows a run's steps and warnings on the console, and sends the steps to the trackers. Open inside ``with``."""

    def __init__(self, config: Config, folder: RunFolder, start_step: int, *, quiet: bool = False) -> None:
        self._stack = ExitStack()
        self._watch: Watch | None = None
        self._config, self._folder, self._quiet = config, folder, quiet
        settings = config.model_dump(mode="json")
        self._trackers = open_trackers(config.tracking, folder.path, settings, start_step=start_step)
        for tracker in self._trackers:
            self._stack.callback(tracker.close)
        self.console = Console(config.steps, start_step, budget=config.budget, quiet=quiet)

    def __enter__(self) -> Self:
        self._stack.enter_context(self.console)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def note(self, text: str) -> None:
        """Show a message."""
        self.console.note(text)

    def on_start(self, state: State) -> None:
        """Start the timing, after the first evaluation."""
        if ending := state.ending(self._config):
            self.note(f"already at step {state.step}: nothing to train; to go on, raise {ending}=")
        self._watch = Watch(self._config, self._folder)
        self._warn(self._watch.new(state.step))
        self.console.begin(state.step, state.tokens)

    def on_step(self, result: StepResult) -> None:
        """Report a step; of the first and the last one also a few first attempts, across the range of rewards."""
        step, tokens = result.state.step, result.state.tokens
        ending = result.state.ending(self._config)
        if not result.trajectories:
            self.note(f"step {step}: no reward applies to its attempts, or to one alone of a group; nothing is learned")
        elif step == 1 or ending:
            self.console.samples_table([shown(each) for each in result.trajectories if each.role == FIRST])
        self.show(step, result.metrics)
        if (budget := self._config.budget) is not None and ending:
            why = f"budget={budget} is spent" if ending == "budget" else f"steps={step} came before budget={budget}"
            self.note(f"{why}: {tokens} tokens were sampled in {step} steps")

    def show(self, step: int, metrics: dict[str, float]) -> None:
        """Show a step's metrics, send them to the trackers, and warn if they say so."""
        self.console.step(step, metrics)
        for tracker in self._trackers:
            tracker.log(step, metrics)
        if self._watch is not None:
            self._watch.lines.append(metrics)
            self._warn(self._watch.new(step))

    def _warn(self, warnings: Sequence[RunWarning]) -> None:
        """Show warnings, on standard error if the console is quiet."""
        for warning in warnings:
            (complain if self._quiet else self.note)(str(warning))

    def stopped(self) -> None:
        """Report that the run ends early, and the command that continues it."""
        self.console.close()
        self.console.note(f"stopped; go on with: {self._folder.resume_command}")


def dialogue(sample: Trajectory) -> str:
    """The replies, with what the environment said between them, behind bars."""
    own = (message["role"] == "assistant" for message in sample.messages)
    texts = (message["content"] for message in sample.messages)
    return "".join(text if mine else barred(text) for mine, text in zip(own, texts, strict=True)) or sample.text


def shown(sample: Trajectory) -> tuple[str, str, float, bool]:
    """A sample as the console shows it."""
    return sample.problem.prompt, dialogue(sample), sample.score.reward, sample.score.correct
