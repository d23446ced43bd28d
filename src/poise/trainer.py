"""The training loop, top to bottom: problems, rollouts, rewards, advantages, regulator, update, records.

A step's random numbers depend on the run's seed and the step's number alone. So a checkpoint holds weights, optimizer
state and the algorithm's memory, and a resumed run continues bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from poise import regulators
from poise._lib.device import keep_freed_memory
from poise._lib.files import expand
from poise._lib.user_code import blamed
from poise.algorithms import Memory, Trajectory
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
from poise.runs.trackers import check_trackers
from poise.tasks import training_problems
from poise.training.batches import make_batch, on_all_rows, phases_of, with_verdict, without_consolidated
from poise.training.checkpoints import Checkpoints
from poise.training.evaluations import Evaluations
from poise.training.frozen import Frozen, FrozenModels, starting_weights
from poise.training.interrupts import Stopper
from poise.training.preflight import preflight
from poise.training.records import (
    Clock,
    begun,
    environment,
    response_records,
    step_metrics,
    task_metrics,
    token_arrays,
    token_metrics,
    turn_metrics,
    write_start,
)
from poise.training.reporter import Reporter
from poise.training.results import finished
from poise.training.resume import TrainError, in_free_folder, keep_changes, model_errors, run_folder
from poise.training.setup import arrive, build_sampler, check_same_code, check_same_data, recomputed
from poise.training.update import NotFiniteError, UpdatePlan, update

__all__ = ["TrainError", "Trainer", "train"]


def train(
    config: Config, *, resume: bool = False, quiet: bool = False, before: dict[str, Any] | None = None,
    renumber: bool = True, trust_changed: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Train with this config into its run folder, show the result, and return the contents of ``summary.json``.

    ``before`` is the accuracy before training, if another run of the same model has measured it in the same way. If
    the folder has a run already, this one goes to the next free folder, such as ``runs/mine-2``; with
    ``renumber=False`` that is an error. ``trust_changed`` goes on with a run although code of the user's own was edited
    since it began. On a CPU the C library is told to keep freed memory, from then on
    (``_lib/device.py``).
    """
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
        return trainer.run(before)


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
        self.clock = Clock()
        check_settings(self.policy, config.rollout.max_prompt, config.rollout.max_tokens)
        self.recompute = recomputed(config, self.policy, self.notes.append)
        self.frozen = FrozenModels(  # before the memory for sampling is measured
            config, self.policy, self.algorithm, self.notes.append, folder,
            reference=bool(config.objective.kl_coef),
        )  # fmt: skip
        self.sampler = build_sampler(config, self.policy, self.notes.append, clock=self.clock)
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
        self.memory: Memory | None = None
        self.tokens = 0  # sampled since the run began, by all models, evaluations apart

    # The loop

    def run(self, before: dict[str, Any] | None = None) -> dict[str, Any]:
        """Continue from the newest checkpoint, or begin; train to the last step; evaluate before and after."""
        done, self.memory, self.tokens = self.checkpoints.restore()
        sizes = {"parameters": Frozen(self.policy).parameters, "parameters_of": self.frozen.parameters()}
        arrive(self.sampler, self.config, done)
        with Reporter(self.config, self.folder, done, quiet=self.quiet) as report, Stopper(report.note) as stopper:
            keep_changes(self.config, self.folder, done)
            self.notes += write_start(self.folder, environment(self.policy.device) | sizes, done)
            for note in self.notes:
                report.note(note)
            evaluations = Evaluations(self.sampler, self.config, self.folder, report, stopper)
            ending = self._ending(done, self.tokens)
            try:
                before = evaluations.before(done, before)
                reached = not ending and evaluations.catch_up(done)
            except KeyboardInterrupt:
                report.stopped(self.folder.resume_command)
                raise
            if ending:
                report.note(f"already at step {done}: nothing to train; to go on, raise {ending}=")
            report.begin(done, self.tokens)
            try:
                done = done if ending or reached else self._take_steps(done, report, stopper, evaluations)
                after = evaluations.after()
            except (Exception, KeyboardInterrupt):
                self.checkpoints.save_finished_step(self.memory, self.tokens)
                report.stopped(self.folder.resume_command)
                raise
        return report.finished(done, self.tokens, before, after)

    def _take_steps(self, done: int, report: Reporter, stopper: Stopper, evaluations: Evaluations) -> int:
        """Take the remaining steps, and return the number of the last one. A stop request raises KeyboardInterrupt."""
        config, checkpoints = self.config, self.checkpoints
        for step in range(done + 1, config.steps + 1):
            stopper.check()
            metrics = self.step(step, report)
            arrive(self.sampler, config, step)
            ending = self._ending(step, self.tokens)
            try:
                if evaluations.due(step) and not ending:
                    metrics |= evaluations.during()
            finally:
                self.folder.log(step, metrics)
                checkpoints.logged = step
            report.step(step, metrics)
            last = ending is not None or stopper.requested or evaluations.goal_reached(metrics)
            if last or checkpoints.due(step):
                checkpoints.save(step, self.memory, self.tokens)
            stopper.check()
            if last:
                report.ended(ending, step, self.tokens)
                return step
        return done

    def _ending(self, step: int, tokens: int) -> str | None:
        """The setting that ends a run after this step and so many tokens, ``budget`` or ``steps``; None: it goes on."""
        if self.config.budget is not None and tokens >= self.config.budget:
            return "budget"
        return "steps" if step >= self.config.steps else None

    def step(self, step: int, report: Reporter) -> dict[str, float]:
        """One step: problems, samples, a batch, phases, an update, and the metrics of all of them."""
        config, clock, task, seed = self.config, self.clock, self.sampler.task, derived_seed(self.config.seed, step)
        clock.restart()
        self.sampler.tokens.clear()  # those of an evaluation
        self.sampler.turns.clear()
        with clock("problems"):
            problems = training_problems(
                task, seed=config.seed, step=step, step_seed=seed, count=config.prompts, fits=self.sampler.fits
            )
        with model_errors():
            samples, memory = collect(
                self.algorithm, problems, self.sampler, seed, self.memory,
                name=config.algorithm, advantage=config.advantage,
            )  # fmt: skip
            samples, failed = with_verdict(samples, config.advantage)
        tokens = token_metrics(self.sampler.tokens, self.tokens)
        if not samples:
            report.note(
                f"step {step}: no reward applies to its attempts, or to one alone of a group; nothing is learned"
            )
            self.memory, self.tokens = memory, tokens["tokens/total"]
            self.checkpoints.weights_of = step
            others = {**failed, **task_metrics(task), **turn_metrics(self.sampler), "optim/steps": 0.0}
            return {**others, **tokens, **clock.metrics(tokens["tokens/sampled"])}
        with clock("regulate"), model_errors(), self._divergence(step):
            batch = self._batch(samples)
            with blamed("regulator", config.regulator):
                rows, phases, dropped = phases_of(
                    self.regulator, samples, batch, drop_equal_groups=config.drop_equal_groups
                )
        with clock("record"):
            if config.rollouts_every and (step == 1 or step % config.rollouts_every == 0):
                self.folder.save_rollouts(step, response_records(step, samples, task))
                arrays = token_arrays(batch, [on_all_rows(phase, rows, batch) for phase in phases])
                self.folder.save_tokens(step, arrays, self.policy.texts(arrays["id"]))
            if step == 1 or self._ending(step, tokens["tokens/total"]):
                report.samples(samples)
        with clock("update"):
            update_metrics = self._update(step, batch.rows(rows), phases, seed)
        self.memory, self.tokens = memory, tokens["tokens/total"]
        return {
            **step_metrics(self.algorithm, task, samples, batch, self.settings),
            **failed,
            **dropped,
            **turn_metrics(self.sampler),
            **update_metrics,
            **regulators.summary(*without_consolidated(samples, phases, batch, rows)),
            **tokens,
            **clock.metrics(tokens["tokens/sampled"]),
        }

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
