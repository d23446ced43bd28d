"""The training loop: each step samples trajectories for problems, builds a batch and its phases, and updates the model.

A step's random numbers depend only on the run's seed and the step's number. A checkpoint therefore needs only the
weights, the optimizer state and the run's ``State``, and a resumed run continues bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from poise._lib.errors import complain, short
from poise._lib.user_code import blamed
from poise.models.layers import FixedPassError, OutOfMemoryError
from poise.models.scoring import HiddenStates
from poise.runs.folder import RunFolder
from poise.runs.lock import free_folder
from poise.runs.subscribers.console import Console
from poise.runs.subscribers.evaluation_schedule import EvaluationSchedule
from poise.runs.subscribers.recorder import Recorder
from poise.runs.subscribers.summary import Summary, finished, show
from poise.runs.subscribers.warnings import Watch
from poise.runs.trackers import check_trackers, tracking
from poise.sampling.draws import derived_seed
from poise.sampling.trajectories import Trajectory, collect, metrics_of
from poise.tasks import training_problems
from poise.training.batches import drop_failed, phases_of
from poise.training.building import Components, build
from poise.training.config.schema import Config
from poise.training.interrupts import Stopper
from poise.training.memory import repeatable
from poise.training.preflight import preflight
from poise.training.resume import TrainError, check_same_code, keep_changes, run_folder
from poise.training.steps import Clock, State, StepResult, counted_metrics, response_metrics
from poise.training.update import NotFiniteError, set_learning_rate, update

__all__ = ["State", "StepResult", "TrainError", "Trainer", "train"]

EVENTS = ("on_start", "on_step", "on_end")  # the methods that a subscriber may have


def train(
    config: Config,
    *,
    resume: bool = False,
    quiet: bool = False,
    before: dict[str, Any] | None = None,
    renumber: bool = True,
    trust_changed: bool = False,
    callbacks: Sequence[Any] = (),
) -> dict[str, Any]:
    """Train with ``config`` in its run folder, show the result, and return the contents of ``summary.json``.

    ``before`` is the evaluation before training: pass it if another run has already measured the same model with the
    same settings. If the folder already contains a run, the new run uses the next free folder, such as
    ``runs/mine-2``; with ``renumber=False`` this is an error. ``trust_changed`` allows resuming a run even if the
    user's own code has been edited since the run began. ``callbacks`` are objects with any of the methods
    ``on_start(state)``, ``on_step(result)`` and ``on_end(state)``. The run ends if ``on_start`` or ``on_step``
    returns False (``runs/subscribers``). After training on a CPU, the C library keeps freed memory for the rest of the
    process (``_lib/device.py``).
    """
    check_callbacks(callbacks)
    if renumber and not resume:
        config = config.model_copy(update={"run": free_folder(config.run, Console(0, quiet=quiet).note)})
    with run_folder(config, resume=resume) as folder, repeatable(config):
        edits = check_same_code(config, folder, accept=trust_changed)
        if resume and (summary := finished(config, folder, quiet=quiet)):
            return summary
        check_trackers(config.tracking)
        components = build(config, folder)
        components.notes += [f"{', '.join(edits)}: edited since the run began (see code.json)"] if edits else []
        preflight(config, components)
        return Trainer(config, folder, components, quiet=quiet).run(before, callbacks)


class Trainer:
    """Runs the steps of one run. Without ``components``, it builds them from the config."""

    def __init__(
        self, config: Config, folder: RunFolder, components: Components | None = None, *, quiet: bool = False
    ) -> None:
        self.config, self.folder, self.quiet = config, folder, quiet
        built = components or build(config, folder)
        self.policy, self.sampler, self.frozen = built.policy, built.sampler, built.frozen
        self.algorithm, self.advantage, self.regulator = built.algorithm, built.advantage, built.regulator
        self.make_batch = built.make_batch
        self.optimizer, self.plan, self.checkpoints = built.optimizer, built.plan, built.checkpoints
        self.notes = built.notes

    def run(self, before: dict[str, Any] | None = None, callbacks: Sequence[Any] = ()) -> dict[str, Any]:
        """Train from the newest checkpoint, or from the start, to the last step, and return the summary.

        Subscribers are called before a step's checkpoint is saved, so every saved step has been logged.
        """
        config, folder, sampler, checkpoints = self.config, self.folder, self.sampler, self.checkpoints
        state, settings = checkpoints.restore(), config.model_dump(mode="json")
        with (
            tracking(config.tracking, folder.path, settings, start_step=state.step) as trackers,
            Console(config.steps, state.step, budget=config.budget, quiet=self.quiet, read=self.policy.read) as console,
            Stopper(console.note) as stopper,
        ):
            keep_changes(config, folder, state.step)
            recorder = Recorder(folder, sampler, config.rollouts_every, self.frozen.sizes(), console.note)
            evaluations = EvaluationSchedule(sampler, config, folder, console, trackers, stopper, before)
            summary = Summary(folder, evaluations)
            watch = Watch(config, folder, complain if self.quiet else console.note)
            schedule = [evaluations] if config.evaluation.problems else []
            subscribers = [recorder, *schedule, summary, console, *trackers, watch]
            for note in self.notes:
                console.note(note)
            try:
                going = tell(subscribers, "on_start", state)
                if not tell(callbacks, "on_start", state):
                    console.note(f"a callback ended the run at its start (step {state.step})")
                    going = False
                    if not folder.checkpoints():  # a run that has ended has a model
                        checkpoints.save(state)
            except KeyboardInterrupt:
                console.stopped(folder.resume_command)
                raise
            try:
                stopper.check()
                for result in self.steps(state) if going else ():
                    state = result.state
                    going = tell(subscribers, "on_step", result) and not stopper.requested
                    if not tell(callbacks, "on_step", result):
                        console.note(f"a callback ended the run after step {state.step}")
                        going = False
                    if not going or result.ending or checkpoints.due(state.step):
                        checkpoints.save(state)
                    if not going or stopper.requested:
                        break
                stopper.check()
                tell([*subscribers, *callbacks], "on_end", state)
            except (Exception, KeyboardInterrupt):
                checkpoints.save_finished(state)
                console.stopped(folder.resume_command)
                raise
        if not self.quiet:
            show(config, summary.contents, console)
        return summary.contents

    def steps(self, state: State) -> Iterator[StepResult]:
        """Run steps from ``state`` until ``steps`` or ``budget`` ends the run, and yield their results."""
        while state.ending(self.config.steps, self.config.budget) is None:
            with self._explained(state.step + 1):
                result = self.step(state)
            state = result.state
            yield result

    def step(self, state: State) -> StepResult:
        """Run one step: sample trajectories, then learn from them. Return its result with the metrics."""
        clock, seed = Clock(), derived_seed(self.config.seed, state.step + 1)
        state, trajectories, counted = self._sample(state, seed, clock)
        if trajectories:
            return self._learn(state, trajectories, counted, seed, clock)
        self.checkpoints.weights_of = state.step  # there is nothing to learn from, so the weights do not change
        ending = state.ending(self.config.steps, self.config.budget)
        return StepResult(state, counted | {"optim/steps": 0.0}, clock, ending)

    def _sample(self, before: State, seed: int, clock: Clock) -> tuple[State, list[Trajectory], dict[str, float]]:
        """Draw the step's problems, and sample trajectories for them.

        Return the state after the step, the trajectories with a score (none if no reward applied), and the counts.
        """
        config, task, number = self.config, self.sampler.task, before.step + 1
        sampler = self.sampler.at(before.progress(config, task))
        with clock("problems"):
            problems = training_problems(
                task, seed=config.seed, step=number, step_seed=seed, count=config.prompts, fits=sampler.fits
            )
        trajectories, memory = collect(
            self.algorithm, problems, sampler, seed, before.memory, name=config.algorithm, advantage=self.advantage
        )
        clock.spent |= sampler.counts.seconds
        trajectories, failures = drop_failed(trajectories, self.advantage)
        state = State(number, before.tokens + sampler.counts.tokens.total(), memory)
        return state, trajectories, {**counted_metrics(sampler.counts), **failures, "tokens/total": state.tokens}

    def _learn(
        self, state: State, trajectories: list[Trajectory], counted: dict[str, float], seed: int, clock: Clock
    ) -> StepResult:
        """Build the batch, run the regulator, and update the policy in the phases that it returns."""
        config = self.config
        with clock("regulate"):
            batch = self.make_batch(trajectories)
            regulated = phases_of(
                self.regulator, trajectories, batch, drop_equal_groups=config.drop_equal_groups, name=config.regulator
            )
            if isinstance(batch.hidden, HiddenStates):
                batch.hidden.forget()  # the update needs the memory
        metrics = response_metrics(trajectories, batch, config.objective) | counted
        metrics |= metrics_of(self.algorithm, trajectories)
        with (
            clock("update"),
            self.checkpoints.updating(state.step),
            blamed("objective.surrogate", str(config.objective.surrogate), raised_there=True),
        ):
            set_learning_rate(self.optimizer, config.optim, state.step)
            metrics |= update(self.policy, self.optimizer, regulated.batch, regulated.phases, self.plan, seed)
        metrics |= regulated.metrics
        ending = state.ending(config.steps, config.budget)
        return StepResult(state, metrics, clock, ending, trajectories, batch, regulated.phases, regulated.rows)

    @contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        """If the step runs out of memory or diverges, record the cause and raise a TrainError that says what to do."""
        try:
            yield
        except OutOfMemoryError as error:
            if isinstance(error, FixedPassError):
                self.folder.write_json("out_of_memory.json", {"step": step, "why": str(error)})
            raise TrainError(str(error)) from error
        except NotFiniteError as error:
            self.folder.write_json("diverged.json", {"step": step, "why": str(error)})
            remedy = "lower optim.lr, or set dtype=float32; the newest checkpoint is untouched"
            raise TrainError(f"{error}: {remedy}") from error


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Raise TypeError unless every callback handles an event."""
    for each in callbacks:
        if isinstance(each, type) or not any(callable(getattr(each, event, None)) for event in EVENTS):
            raise TypeError(
                f"callbacks: expected objects with on_start(state), on_step(result) or on_end(state), got {short(each)}"
            )


def tell(subscribers: Sequence[Any], event: str, what: Any) -> bool:
    """Call the method ``event`` of each subscriber that has it, in order. Return False if any of them returns False."""
    answers = [getattr(each, event)(what) for each in subscribers if hasattr(each, event)]
    return not any(answer is False for answer in answers)
