"""The training loop, top to bottom: problems, trajectories, a batch, regulator, update; then those that follow the run.

A step's random numbers depend on the run's seed and the step's number alone. So a checkpoint holds weights, optimizer
state and the ``State`` of the run, and a resumed run continues bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from poise import regulators
from poise._lib.device import keep_freed_memory
from poise._lib.errors import short
from poise._lib.files import expand
from poise._lib.user_code import blamed
from poise.algorithms import Trajectory
from poise.algorithms.collected import collect
from poise.batch import Phase, TokenBatch
from poise.config.schema import Config
from poise.engines.limits import check_settings
from poise.models.layers import OutOfMemoryError
from poise.models.master_weights import MasterWeights
from poise.models.policy import load_policy
from poise.models.tool_prompts import fix_date
from poise.rollout.sampling import derived_seed
from poise.runs.folder import RunFolder
from poise.runs.lock import owned
from poise.runs.subscribers.evaluations import Evaluations
from poise.runs.subscribers.records import Recorder, begun
from poise.runs.subscribers.reporter import Reporter
from poise.runs.subscribers.results import finished, show
from poise.runs.trackers import check_trackers
from poise.tasks import training_problems
from poise.training.batches import make_batch, phases_of, with_verdict, without_consolidated
from poise.training.checkpoints import Checkpoints
from poise.training.frozen import FrozenModels, starting_weights
from poise.training.interrupts import Stopper
from poise.training.preflight import preflight
from poise.training.resume import TrainError, in_free_folder, keep_changes, model_errors, run_folder
from poise.training.setup import build_sampler, check_same_code, check_same_data, recomputed
from poise.training.steps import (
    Clock,
    State,
    StepResult,
    reported_metrics,
    step_metrics,
    token_metrics,
    turn_metrics,
)
from poise.training.update import NotFiniteError, UpdatePlan, update

__all__ = ["State", "StepResult", "TrainError", "Trainer", "train"]

EVENTS = ("on_start", "on_step", "on_end")  # what a subscriber may be told of


def train(
    config: Config, *, resume: bool = False, quiet: bool = False, before: dict[str, Any] | None = None,
    renumber: bool = True, trust_changed: bool = False, callbacks: Sequence[Any] = (),
) -> dict[str, Any]:  # fmt: skip
    """Train with this config into its run folder, show the result, and return the contents of ``summary.json``.

    ``before`` is the accuracy before training, if another run of the same model has measured it in the same way. If
    the folder has a run already, this one goes to the next free folder, such as ``runs/mine-2``; with
    ``renumber=False`` that is an error. ``trust_changed`` goes on with a run although code of the user's own was edited
    since it began. ``callbacks`` follow the run: objects with any of ``on_start(state)``, ``on_step(result)`` and
    ``on_end(state)``; ``on_step`` ends the run after a step by returning False (``runs/subscribers``). On a CPU the C
    library is told to keep freed memory, from then on (``_lib/device.py``).
    """
    check_callbacks(callbacks)
    if renumber and not resume:
        config = in_free_folder(config, quiet=quiet)
    with owned(expand(config.run), make=not resume), run_folder(config, resume=resume) as folder:
        if resume and (ended := finished(config, folder, quiet=quiet)):
            return ended
        check_trackers(config.tracking)
        changed = check_same_code(config, folder, accept=trust_changed)
        trainer = Trainer(config, folder, quiet=quiet)
        trainer.notes += [f"{', '.join(changed)}: edited since the run began, as code.json says"] if changed else []
        if trainer.policy.device.type == "cpu":
            keep_freed_memory()
        preflight(config, trainer.sampler, trainer.checkpoints, trainer._batch)
        return trainer.run(before, callbacks)


class Trainer:
    """One run: its model, sampler, optimizer and folder, and the loop over its steps."""

    def __init__(self, config: Config, folder: RunFolder, *, quiet: bool = False) -> None:
        self.config, self.folder, self.quiet = config, folder, quiet
        fix_date(begun(folder))  # before anything is encoded
        self.settings = config.objective
        self.regulator = config.build_regulator()
        self.algorithm = config.build_algorithm()
        self.policy = load_policy(
            starting_weights(config, folder), device=config.device, dtype=config.dtype, lora=config.lora,
            seed=derived_seed(config.seed, 0), remote_code=config.remote_code, compiled=config.compile,
            tokens=config.tokens_left(*folder.progress()), longest=config.rollout.longest,
        )  # fmt: skip
        self.notes: list[str] = []  # shown as soon as there is a console
        check_settings(self.policy, config.rollout.max_prompt, config.rollout.max_tokens)
        self.recompute = recomputed(config, self.policy, self.notes.append)
        self.frozen = FrozenModels(  # before the memory for sampling is measured
            config, self.policy, self.algorithm, self.notes.append, folder,
            reference=bool(config.objective.kl_coef),
        )  # fmt: skip
        self.sampler = build_sampler(config, self.policy, self.notes.append)
        self.sampler = self.frozen.beside(self.sampler)
        check_same_data(self.sampler.task, folder)
        self.master_weights = self.policy.master_weights = MasterWeights(self.policy.model)
        optim = config.optim
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay,
            fused=True,
        )  # fmt: skip
        self.master_weights.serve(self.optimizer)
        self.checkpoints = Checkpoints(
            folder, self.policy, self.master_weights, self.optimizer, config.checkpoint_every
        )

    # The loop

    def run(self, before: dict[str, Any] | None = None, callbacks: Sequence[Any] = ()) -> dict[str, Any]:
        """Continue from the newest checkpoint, or begin; train to the last step; evaluate before and after.

        Subscribers are told of a step before its checkpoint is saved, so a step that is saved has been logged.
        """
        config, folder, checkpoints, state = self.config, self.folder, self.checkpoints, self.checkpoints.restore()
        with Reporter(config, folder, state.step, quiet=self.quiet) as report, Stopper(report.note) as stopper:
            keep_changes(config, folder, state.step)
            recorder = Recorder(
                folder, self.policy, self.sampler.task, config.rollouts_every, self.frozen.sizes(), report.note
            )
            evaluations = Evaluations(self.sampler, config, folder, report, stopper, before)
            subscribers = [recorder, evaluations, report, *callbacks]
            for note in self.notes:
                report.note(note)
            try:
                going = tell(subscribers, "on_start", state)
            except KeyboardInterrupt:
                report.stopped()
                raise
            try:
                stopper.check()
                for result in self.steps(state) if going else ():
                    state = result.state
                    going = tell(subscribers, "on_step", result) and not stopper.requested
                    if not going or state.ending(config) or checkpoints.due(state.step):
                        checkpoints.save(state)
                    if not going or stopper.requested:
                        break
                stopper.check()
                tell(subscribers, "on_end", state)
            except (Exception, KeyboardInterrupt):
                checkpoints.save_finished(state)
                report.stopped()
                raise
        if not self.quiet:
            show(config, evaluations.summary, report.console)
        return evaluations.summary

    def steps(self, state: State) -> Iterator[StepResult]:
        """Take step after step from this state on, until ``steps`` or ``budget`` ends the run."""
        while state.ending(self.config) is None:
            result = self.step(state)
            state = result.state
            yield result

    def step(self, state: State) -> StepResult:
        """One step: problems, trajectories, a batch, phases, an update, and the metrics of all of them."""
        config, clock, number = self.config, Clock(), state.step + 1
        seed, task = derived_seed(config.seed, number), self.sampler.task
        sampler = self.sampler.at(state.progress(config, task), clock)
        with clock("problems"):
            problems = training_problems(
                task, seed=config.seed, step=number, step_seed=seed, count=config.prompts, fits=sampler.fits
            )
        with model_errors():
            trajectories, memory = collect(
                self.algorithm, problems, sampler, seed, state.memory, name=config.algorithm, advantage=config.advantage
            )
            trajectories, failed = with_verdict(trajectories, config.advantage)
        tokens = token_metrics(sampler.counts, state.tokens)
        state = State(number, tokens["tokens/total"], memory)
        turns = turn_metrics(sampler.counts, task)
        if not trajectories:
            self.checkpoints.weights_of = number
            metrics = {**failed, **reported_metrics(sampler.counts), **turns, "optim/steps": 0.0, **tokens}
            return StepResult(state, metrics | clock.metrics(tokens["tokens/sampled"]), clock)
        with clock("regulate"), model_errors(), self._divergence(number):
            batch = self._batch(trajectories)
            with blamed("regulator", config.regulator):
                rows, phases, dropped = phases_of(
                    self.regulator, trajectories, batch, drop_equal_groups=config.drop_equal_groups
                )
        with clock("update"):
            update_metrics = self._update(number, batch.rows(rows), phases, seed)
        metrics = {
            **step_metrics(self.algorithm, sampler.counts, trajectories, batch, self.settings),
            **failed,
            **dropped,
            **turns,
            **update_metrics,
            **regulators.summary(*without_consolidated(trajectories, phases, batch, rows)),
            **tokens,
            **clock.metrics(tokens["tokens/sampled"]),
        }
        return StepResult(state, metrics, clock, trajectories, batch, phases, rows)

    # The parts of a step

    def _batch(self, samples: Sequence[Trajectory]) -> TokenBatch:
        config = self.config
        return make_batch(
            samples, self.policy, advantage=config.advantage, temperature=config.rollout.temperature,
            recompute=self.recompute, hidden="hidden" in self.regulator.needs,
            reference=self.frozen.reference if config.objective.kl_coef else None, min_p=self.settings.min_p,
            micro_tokens=config.optim.micro_tokens,
        )  # fmt: skip

    def _update(self, step: int, batch: TokenBatch, phases: list[Phase], seed: int) -> dict[str, float]:
        self._set_learning_rate(step)
        try:
            with self._divergence(step, "; the newest checkpoint is untouched"), self.checkpoints.updating(step):
                return update(self.policy, self.optimizer, batch, phases, UpdatePlan.of(self.config), seed)
        except OutOfMemoryError as error:
            raise TrainError(str(error)) from error

    @contextmanager
    def _divergence(self, step: int, more: str = "") -> Iterator[None]:
        """Write down that a run has diverged, and say what to do."""
        try:
            yield
        except NotFiniteError as error:
            self.folder.write_json("diverged.json", {"step": step, "why": str(error)})
            raise TrainError(f"{error}: lower optim.lr, or set dtype=float32{more}") from error

    def _set_learning_rate(self, step: int) -> None:
        warmup = self.config.optim.warmup_steps
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.optim.lr * (min(step / warmup, 1.0) if warmup else 1.0)


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Raise TypeError unless each of the user's callbacks can be told of something."""
    for each in callbacks:
        if isinstance(each, type) or not any(callable(getattr(each, event, None)) for event in EVENTS):
            raise TypeError(
                f"callbacks: expected objects with on_start(state), on_step(result) or on_end(state), got {short(each)}"
            )


def tell(subscribers: Sequence[Any], event: str, what: Any) -> bool:
    """Tell all subscribers of an event, in their order; whether the run goes on, as far as they are concerned."""
    answers = [getattr(each, event)(what) for each in subscribers if hasattr(each, event)]
    return not any(answer is False for answer in answers)
