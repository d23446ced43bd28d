"""The loop, top to bottom: problems, rollouts, rewards, advantages, regulator, update, and what is kept of them.

Every step draws its random numbers from the run's seed and its own number, and nothing else. So a checkpoint is the
weights and the optimizer's state, and a resumed run goes on bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from poise import advantages, regulators
from poise._files import expand
from poise._lock import owned
from poise._recipes import merge
from poise._user_code import blamed
from poise.batch import Phase, TokenBatch
from poise.config import Config
from poise.console import Console
from poise.evaluate import Evaluation, at_once, held_out, is_summary
from poise.masters import Masters
from poise.memory import OutOfMemoryError
from poise.optimizer_state import optimizer_tensors, restore_optimizer
from poise.policy import ModelError, Policy, load_policy
from poise.records import Clock, environment, response_records, reward_metrics, rollout_metrics, token_arrays
from poise.rollout.base import Engine, Rollouts
from poise.rollout.choose import choose
from poise.rollout.forecast import announce
from poise.rollout.limits import check_settings, encode_problem
from poise.run import RunFolder
from poise.scoring import Scoring
from poise.stopping import Stopper
from poise.tasks import Problem, Score, Task, draw
from poise.tracking import open_trackers
from poise.update import NotFiniteError, score_all, update

ADVANTAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "group-zscore": advantages.group_zscore,
    "group-centered": advantages.group_centered,
    "leave-one-out": advantages.leave_one_out,
    "reinforce-pp": lambda rewards, _: advantages.reinforce_pp(rewards),
}


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
        self.task: Task = config.task.build()
        self.regulator = regulators.parse(config.regulator)
        self.policy = load_policy(
            config.model, device=config.device, dtype=config.dtype, lora=config.lora, seed=_seed(config.seed, 0),
            remote_code=config.remote_code, compiled=config.compile, longest=config.rollout.longest,
        )  # fmt: skip
        self.notes: list[str] = []  # for whoever watches, once there is a console
        rollout = config.rollout
        check_settings(self.policy, rollout.max_prompt, rollout.max_tokens)
        self.engine: Engine = choose(
            self.policy, rollout.engine, rollout.batch, self.notes.append, memory=rollout.vllm_memory
        )
        test = config.evaluation
        announce(
            self.engine, self.notes.append, max_prompt=rollout.max_prompt, max_tokens=rollout.max_tokens,
            responses=max(config.prompts * config.group, at_once(test.problems, test.samples)),
        )  # fmt: skip
        self.masters = self.policy.masters = Masters(self.policy.model)
        self.parameters = self.masters.parameters
        optim = config.optim
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
        )
        self.masters.serve(self.optimizer)
        self.reference = self._load_reference() if config.objective.kl_coef else None
        self.settings = config.objective.settings()
        self.saved = 0  # the step of the newest checkpoint
        self.logged = 0  # the newest step whose line is in metrics.jsonl
        self.weights_of: int | None = 0  # the step that the weights are of; None in the middle of an update

    # The loop

    def run(self) -> dict[str, Any]:
        """All steps that are left, from the newest checkpoint on."""
        config = self.config
        done = self._restore()
        self.folder.write_json("environment.json", environment(self.policy.device))
        trackers = open_trackers(config.tracking, self.folder.path, config.model_dump(mode="json"), start_step=done)
        with Console(config.steps, done, quiet=self.quiet) as console, Stopper(console.note) as stopper:
            for note in self.notes:
                console.note(note)
            before = self._before(console, done)
            if done >= config.steps:
                console.note(f"already at step {done}: nothing to train; to go on, raise steps=")
            console.begin(done)
            try:
                for step in range(done + 1, config.steps + 1):
                    if stopper.asked:  # during the evaluation before the first step
                        raise KeyboardInterrupt
                    metrics = self.step(step, console)
                    try:
                        if config.evaluation.every and step % config.evaluation.every == 0 and step < config.steps:
                            metrics |= self._held_out(console).metrics()
                    finally:
                        self.folder.log(step, metrics)
                        self.logged = step
                    done = step
                    console.step(step, metrics)
                    for tracker in trackers:
                        tracker.log(step, metrics)
                    enough = self._reached(metrics, console)
                    if self._due(step) or stopper.asked or enough:
                        self._save(step)
                    if enough:
                        break
                    if stopper.asked:
                        raise KeyboardInterrupt
                after = self._held_out(console)
            except (Exception, KeyboardInterrupt):
                self._save_what_is_whole()
                console.close()
                console.note(f"stopped; go on with: {self.folder.resume_command}")
                raise
            finally:
                for tracker in trackers:
                    tracker.close()
        summary = {"steps": done, "before": before, "after": after.summary(), "run": str(self.folder.path)}
        self.folder.write_json("summary.json", summary)
        return summary

    def step(self, step: int, console: Console) -> dict[str, float]:
        """One step of reinforcement learning: sample, score, regulate, update."""
        config, clock = self.config, Clock()
        seed = _seed(config.seed, step)
        with clock("problems"):
            problems = draw(self.task, "train", seed, config.prompts)
            prompts = [self._encode(problem) for problem in problems]
            asked = [problem for problem in problems for _ in range(config.group)]
        with Scoring(self.policy, self.task, asked) as scoring:
            with clock("rollout"):
                rollouts = self.engine.generate(
                    prompts,
                    config.group,
                    max_tokens=config.rollout.max_tokens,
                    temperature=config.rollout.temperature,
                    seed=seed,
                    top_p=config.rollout.top_p,
                    top_k=config.rollout.top_k,
                    done=scoring.take,
                )
            with clock("score"):
                texts, scores = scoring.finish(rollouts)
        with clock("regulate"):
            batch = self._batch(rollouts, scores)
            with blamed(config.regulator):
                phases = self.regulator(batch)
        with clock("record"):
            if config.rollouts_every and (step == 1 or step % config.rollouts_every == 0):
                self.folder.save_rollouts(step, response_records(step, asked, texts, scores, rollouts))
                arrays = token_arrays(rollouts, batch, phases)
                self.folder.save_tokens(step, arrays, self.policy.texts(arrays["id"]))
            if step in (1, config.steps):
                shown = zip(asked, texts, scores, strict=True)
                console.samples_table([(p.prompt, text, s.reward, s.correct) for p, text, s in shown])
        with clock("update"):
            optimized = self._update(step, rollouts, batch, phases, seed)
        sampled = rollout_metrics(rollouts, batch, self.settings.importance_cap)
        metrics = {**reward_metrics(asked, scores, batch), **sampled, **optimized}
        return metrics | regulators.summary(phases, batch) | clock.metrics(int(rollouts.mask.sum()))

    # Its parts

    def _encode(self, problem: Problem) -> list[int]:
        rollout = self.config.rollout
        with _refusals():
            return encode_problem(self.policy, problem, rollout.max_tokens, rollout.max_prompt)

    def _batch(self, rollouts: Rollouts, scores: Sequence[Score]) -> TokenBatch:
        """The rollouts as regulators and the objective see them."""
        config, device = self.config, rollouts.mask.device
        rewards = torch.tensor([score.reward for score in scores], device=device)
        groups = torch.arange(config.prompts, device=device).repeat_interleave(config.group)
        sampler = rollouts.sampler_logp  # where there is one, rollouts.logp is the policy's own already
        recomputed = sampler is None and config.rollout.old_logp == "recomputed"
        hidden = "hidden" in self.regulator.needs
        return TokenBatch(
            old_logp=self._logp(self.policy, rollouts) if recomputed else rollouts.logp,
            mask=rollouts.mask,
            advantages=ADVANTAGES[config.advantage](rewards, groups),
            groups=groups,
            rewards=rewards,
            correct=torch.tensor([score.correct for score in scores], device=device),
            ref_logp=self._reference_logp(rollouts),
            sampler_logp=rollouts.logp if recomputed else sampler,
            entropy=rollouts.entropy,
            hidden=(lambda rows: self.policy.padded_hidden(rollouts.rows(rows))) if hidden else None,
            head=self.policy.head(config.rollout.temperature) if hidden else None,
            targets=rollouts.tokens,
        )

    def _logp(self, policy: Policy, rollouts: Rollouts) -> Tensor:
        return score_all(policy, rollouts, self.config.rollout.temperature, self.config.optim.micro_tokens)[0]

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

    def _reference_logp(self, rollouts: Rollouts) -> Tensor | None:
        if not self.config.objective.kl_coef:
            return None
        without_adapter = self.policy.model.disable_adapter() if self.reference is None else nullcontext()
        with without_adapter:
            return self._logp(self.reference or self.policy, rollouts)

    def _update(
        self, step: int, rollouts: Rollouts, batch: TokenBatch, phases: list[Phase], seed: int
    ) -> dict[str, float]:
        optim = self.config.optim
        self._set_rate(step)
        self.weights_of = None
        try:
            metrics = update(
                self.policy, self.optimizer, rollouts, batch, phases, self.settings,
                temperature=self.config.rollout.temperature, mini_batch=optim.mini_batch,
                micro_tokens=optim.micro_tokens, grad_clip=optim.grad_clip, seed=seed,
            )  # fmt: skip
        except NotFiniteError as error:
            remedy = "lower optim.lr, or set dtype=float32; the newest checkpoint is untouched"
            raise TrainError(f"{error}: {remedy}") from error
        except OutOfMemoryError as error:
            raise TrainError(str(error)) from error
        self.weights_of = step
        return metrics

    def _set_rate(self, step: int) -> None:
        warm = self.config.optim.warmup_steps
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.optim.lr * (min(step / warm, 1.0) if warm else 1.0)

    # Held-out problems

    def _held_out(self, console: Console) -> Evaluation:
        asked = self.config.evaluation
        console.note(f"evaluating {asked.problems} held-out problems × {asked.samples} and greedily")
        with _refusals():
            return held_out(
                self.policy, self.engine, self.task, self.config, lambda done, total: console.note(f"  {done}/{total}")
            )

    def _before(self, console: Console, done: int) -> dict[str, Any]:
        """Held-out accuracy before training: measured once, and kept for a run that is resumed."""
        kept: dict[str, Any] | None = self.folder.read_json("before.json")
        if kept is None:
            if done:
                raise TrainError(
                    f"{self.folder.path}/before.json is missing: it holds the accuracy before training, which the "
                    f"weights of step {done} cannot tell any more; put it back, or begin again in another run=DIR"
                )
            kept = self._held_out(console).summary()
            self.folder.write_json("before.json", kept)
        if not is_summary(kept):
            raise TrainError(
                f"{self.folder.path}/before.json does not hold the accuracy before training as poise writes it: put "
                "the file back from a copy, or begin again in another run=DIR"
            )
        return kept

    def _reached(self, metrics: dict[str, float], console: Console) -> bool:
        """Whether held-out accuracy, where it was just measured, is what ``stop_at`` asks for."""
        name = f"eval/{self.task.name}/avg@{self.config.evaluation.samples}"
        goal, found = self.config.stop_at, metrics.get(name)
        if goal is None or found is None or found < goal:
            return False
        console.note(f"held-out accuracy {found:.3f} has reached stop_at={goal}: stopping")
        return True

    # Checkpoints

    def _due(self, step: int) -> bool:
        every = self.config.checkpoint_every  # 0: only at the end
        return step == self.config.steps or (every > 0 and step % every == 0)

    def _save(self, step: int) -> None:
        def write(path: Path) -> None:
            self.policy.save(path / "model")
            save_file({n: p.detach().contiguous() for n, p in self.parameters.items()}, path / "parameters.safetensors")
            save_file(optimizer_tensors(self.optimizer, self.parameters.items()), path / "optimizer.safetensors")

        self.folder.save_checkpoint(step, write)
        self.saved = step

    def _restore(self) -> int:
        """The step of the newest readable checkpoint, loaded; 0 where there is none."""

        def read(path: Path) -> None:
            parameters = load_file(path / "parameters.safetensors", device=str(self.policy.device))
            if parameters.keys() != self.parameters.keys():
                raise ValueError("the checkpoint is of another model")
            state = load_file(path / "optimizer.safetensors", device=str(self.policy.device))
            restore_optimizer(self.optimizer, self.parameters.items(), state)
            with torch.no_grad():
                for name, value in parameters.items():
                    self.parameters[name].copy_(value)
            self.masters.publish()

        found = self.folder.load_checkpoint(read)
        lines, every = self.folder.metrics(), self.config.checkpoint_every
        if found is None and lines and 0 < every < lines[-1]["step"]:
            raise TrainError(
                f"{self.folder.path} has metrics up to step {lines[-1]['step']}, but no checkpoint: put its "
                "checkpoints back, or begin again in another run=DIR"
            )
        self.saved = self.weights_of = self.logged = found[0] if found else 0
        self.folder.rewind(self.saved)
        return self.saved

    def _save_what_is_whole(self) -> None:
        """Keep the last finished step. Never save weights in the middle of an update, or a step without its line."""
        if self.weights_of == self.logged > self.saved:
            self._save(self.logged)


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
