"""The loop, top to bottom: problems, rollouts, rewards, advantages, regulator, update, and what is kept of them.

Every step draws its random numbers from the run's seed and its own number, and nothing else. So a checkpoint is the
weights and the optimizer's state, and a resumed run goes on bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from poise import regulators
from poise._lib.files import expand
from poise._lib.user_code import blamed
from poise.algorithms import Memory, Sample
from poise.batch import Phase, TokenBatch
from poise.config.documents import merge
from poise.config.schema import Config
from poise.engines.limits import check_settings
from poise.models.master_weights import MasterWeights
from poise.models.memory import OutOfMemoryError
from poise.models.policy import ModelError, Policy, load_policy
from poise.models.scoring import score_all
from poise.rollout.types import Rollouts
from poise.runs.folder import RunFolder
from poise.runs.lock import owned
from poise.tasks import training_problems
from poise.training.batches import stack, token_batch, with_verdict
from poise.training.checkpoints import Checkpoints
from poise.training.evaluate import Evaluation, at_once, held_out, is_summary
from poise.training.interrupts import Stopper
from poise.training.records import Clock, environment, response_records, reward_metrics, rollout_metrics, token_arrays
from poise.training.reporter import Reporter
from poise.training.setup import build_sampler
from poise.training.update import NotFiniteError, update


class TrainError(RuntimeError):
    """Training cannot go on; the message says why, and how to."""


def train(config: Config, *, resume: bool = False, quiet: bool = False) -> dict[str, Any]:
    """Train as the config says, into its run folder, and return what ``summary.json`` holds."""
    with owned(expand(config.run), make=not resume):
        if resume:
            return Trainer(config, _resumed(config), quiet=quiet).run()
        folder = RunFolder.create(config.run, config.model_dump(mode="json"), keep=config.keep_checkpoints)
        try:
            held = Trainer(config, folder, quiet=quiet)
        except Exception:
            folder.discard()
            raise
        return held.run()


def _resumed(config: Config) -> RunFolder:
    """The folder of a run to go on with, once it is clear that this can be done with the config."""
    folder = RunFolder.open(config.run, keep=config.keep_checkpoints)
    kept, done = folder.config, max(folder.checkpoints(), default=0)
    changed = {**kept, "run": config.run, "steps": config.steps}
    asked = config.model_dump(mode="json")
    own = merge(asked, changed)  # config.json may be of a version that had fewer settings
    if others := [key for key in own if own[key] != asked.get(key)]:
        raise TrainError(f"a resumed run keeps its settings; {others[0]} is another in {folder.path}/config.json")
    if config.steps < done:
        raise TrainError(
            f"steps={config.steps}: the run in {folder.path} is at step {done} already, and nothing was changed; "
            "raise steps to go on, or begin a shorter run in another run=DIR"
        )
    if changed != kept:
        folder.write_config(changed)
    return folder


class Trainer:
    """A run: what it is made of, and the loop."""

    def __init__(self, config: Config, folder: RunFolder, *, quiet: bool = False) -> None:
        self.config, self.folder, self.quiet = config, folder, quiet
        self.settings = config.objective.settings()
        self.regulator = config.build_regulator()
        self.algorithm = config.build_algorithm()
        self.policy = load_policy(
            config.model, device=config.device, dtype=config.dtype, lora=config.lora, seed=_seed(config.seed, 0),
            remote_code=config.remote_code, compiled=config.compile, longest=config.rollout.longest,
        )  # fmt: skip
        self.notes: list[str] = []  # for whoever watches, once there is a console
        self.clock = Clock()
        check_settings(self.policy, config.rollout.max_prompt, config.rollout.max_tokens)
        test = config.evaluation
        responses = max(config.prompts * config.group, at_once(test.problems, test.samples))
        self.sampler = build_sampler(config, self.policy, self.notes.append, responses=responses, clock=self.clock)
        self.master_weights = self.policy.master_weights = MasterWeights(self.policy.model)
        optim = config.optim
        self.optimizer = torch.optim.AdamW(
            self.master_weights.parameters.values(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay,
            fused=True,
        )  # fmt: skip
        self.master_weights.serve(self.optimizer)
        self.reference = self._load_reference() if config.objective.kl_coef else None
        self.checkpoints = Checkpoints(
            folder, self.policy, self.master_weights, self.optimizer, config.checkpoint_every
        )
        self.memory: Memory | None = None

    # The loop

    def run(self) -> dict[str, Any]:
        """All steps that are left, from the newest checkpoint on."""
        config, checkpoints = self.config, self.checkpoints
        done, self.memory = checkpoints.restore()
        self.folder.write_json("environment.json", environment(self.policy.device))
        with Reporter(config, self.folder, done, quiet=self.quiet) as report, Stopper(report.note) as stopper:
            for note in self.notes:
                report.note(note)
            before = self._before(report, done)
            if done >= config.steps:
                report.note(f"already at step {done}: nothing to train; to go on, raise steps=")
            report.begin(done)
            try:
                for step in range(done + 1, config.steps + 1):
                    if stopper.asked:  # during the evaluation before the first step
                        raise KeyboardInterrupt
                    metrics = self.step(step, report)
                    try:
                        if config.evaluation.every and step % config.evaluation.every == 0 and step < config.steps:
                            metrics |= self._held_out(report).metrics()
                    finally:
                        self.folder.log(step, metrics)
                        checkpoints.logged = step
                    done = step
                    report.step(step, metrics)
                    last = step == config.steps or stopper.asked or self._reached(metrics, report)
                    if last or checkpoints.due(step):
                        checkpoints.save(step, self.memory)
                    if stopper.asked:
                        raise KeyboardInterrupt
                    if last:
                        break
                after = self._held_out(report)
            except (Exception, KeyboardInterrupt):
                checkpoints.save_finished_step(self.memory)
                report.stopped(self.folder.resume_command)
                raise
        summary = {"steps": done, "before": before, "after": after.summary(), "run": str(self.folder.path)}
        self.folder.write_json("summary.json", summary)
        return summary

    def step(self, step: int, report: Reporter) -> dict[str, float]:
        """One step: problems, rows to train on, a batch, phases, an update."""
        config, clock, seed = self.config, self.clock, _seed(self.config.seed, step)
        clock.restart()
        with clock("problems"):
            problems = training_problems(
                self.sampler.task, seed=config.seed, step=step, step_seed=seed, count=config.prompts
            )
        with _refusals():
            samples, memory = self.algorithm.collect(problems, self.sampler, seed, self.memory)
            samples, failed = with_verdict(samples)
        with clock("regulate"):
            rollouts, batch = self._batch(samples)
            with blamed(config.regulator):
                phases = self.regulator(batch)
        with clock("record"):
            if config.rollouts_every and (step == 1 or step % config.rollouts_every == 0):
                self.folder.save_rollouts(step, response_records(step, samples))
                arrays = token_arrays(rollouts, batch, phases)
                self.folder.save_tokens(step, arrays, self.policy.texts(arrays["id"]))
            if step in (1, config.steps):
                report.samples(samples)
        with clock("update"):
            optimized = self._update(step, rollouts, batch, phases, seed)
        self.memory = memory
        sampled = rollout_metrics(rollouts, batch, self.settings.importance_cap)
        metrics = {**reward_metrics(samples, batch), **failed, **sampled, **optimized}
        return metrics | regulators.summary(phases, batch) | clock.metrics(int(rollouts.mask.sum()))

    # Its parts

    def _batch(self, samples: Sequence[Sample]) -> tuple[Rollouts, TokenBatch]:
        config = self.config
        temperature, micro_tokens = config.rollout.temperature, config.optim.micro_tokens
        rollouts = stack(samples, self.policy, temperature, micro_tokens)
        return rollouts, token_batch(
            samples, rollouts, self.policy, advantage=config.advantage, temperature=temperature,
            recompute=config.rollout.old_logp == "recomputed", hidden="hidden" in self.regulator.needs,
            reference=self._reference_logp if config.objective.kl_coef else None, micro_tokens=micro_tokens,
        )  # fmt: skip

    def _load_reference(self) -> Policy | None:
        """The policy before training, for the KL term. With LoRA it is the model without its adapter."""
        config = self.config
        if config.lora is not None:
            return None
        reference = load_policy(
            config.model, device=config.device, dtype=config.dtype, remote_code=config.remote_code,
            longest=config.rollout.longest,
        )  # fmt: skip
        reference.model.requires_grad_(False)
        return reference

    def _reference_logp(self, rollouts: Rollouts) -> Tensor:
        config = self.config
        without_adapter = self.policy.model.disable_adapter() if self.reference is None else nullcontext()
        with without_adapter:
            policy = self.reference or self.policy
            return score_all(policy, rollouts, config.rollout.temperature, config.optim.micro_tokens)[0]

    def _update(
        self, step: int, rollouts: Rollouts, batch: TokenBatch, phases: list[Phase], seed: int
    ) -> dict[str, float]:
        optim = self.config.optim
        self._set_rate(step)
        try:
            with self.checkpoints.updating(step):
                return update(
                    self.policy, self.optimizer, rollouts, batch, phases, self.settings,
                    temperature=self.config.rollout.temperature, mini_batch=optim.mini_batch,
                    micro_tokens=optim.micro_tokens, grad_clip=optim.grad_clip, seed=seed,
                )  # fmt: skip
        except NotFiniteError as error:
            remedy = "lower optim.lr, or set dtype=float32; the newest checkpoint is untouched"
            raise TrainError(f"{error}: {remedy}") from error
        except OutOfMemoryError as error:
            raise TrainError(str(error)) from error

    def _set_rate(self, step: int) -> None:
        warm = self.config.optim.warmup_steps
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.optim.lr * (min(step / warm, 1.0) if warm else 1.0)

    # Held-out problems

    def _held_out(self, report: Reporter) -> Evaluation:
        asked = self.config.evaluation
        report.note(f"evaluating {asked.problems} held-out problems × {asked.samples} and greedily")
        with _refusals():
            return held_out(self.sampler, self.config, lambda done, total: report.note(f"  {done}/{total}"))

    def _before(self, report: Reporter, done: int) -> dict[str, Any]:
        """Held-out accuracy before training: measured once, and kept for a run that is resumed."""
        kept: dict[str, Any] | None = self.folder.read_json("before.json")
        if kept is None:
            if done:
                raise TrainError(
                    f"{self.folder.path}/before.json is missing: it holds the accuracy before training, which the "
                    f"weights of step {done} cannot tell any more; put it back, or begin again in another run=DIR"
                )
            kept = self._held_out(report).summary()
            self.folder.write_json("before.json", kept)
        if not is_summary(kept):
            raise TrainError(
                f"{self.folder.path}/before.json does not hold the accuracy before training as poise writes it: put "
                "the file back from a copy, or begin again in another run=DIR"
            )
        return kept

    def _reached(self, metrics: dict[str, float], report: Reporter) -> bool:
        """Whether held-out accuracy, where it was just measured, is what ``stop_at`` asks for."""
        name = f"eval/{self.sampler.task.name}/avg@{self.config.evaluation.samples}"
        goal, found = self.config.stop_at, metrics.get(name)
        if goal is None or found is None or found < goal:
            return False
        report.note(f"held-out accuracy {found:.3f} has reached stop_at={goal}: stopping")
        return True


def _seed(seed: int, step: int) -> int:
    """The seed of a step: any two steps, and any two runs, draw unrelated numbers."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{step}".encode(), digest_size=8).digest(), "big") >> 1


@contextmanager
def _refusals() -> Iterator[None]:
    """A problem that is refused stops the run as any other cause does."""
    try:
        yield
    except ModelError as error:
        raise TrainError(str(error)) from error
