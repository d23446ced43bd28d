"""Builds the components of a run from its config and folder: policy, frozen models, sampler, optimizer, checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from poise._lib.device import keep_freed_memory
from poise._lib.errors import how_to_install
from poise.advantages import Estimate
from poise.batch import TokenBatch
from poise.models.loading import has_adapter, load_policy, resolve_device
from poise.models.location import ModelError, locate
from poise.models.master_weights import MasterWeights
from poise.models.policy import Policy
from poise.models.prompts import fix_date, opened, starts_no_turn
from poise.regulators import Regulator
from poise.runs.folder import RunFolder, step_of
from poise.sampling.algorithms import Algorithm, Trajectory
from poise.sampling.choose import choose
from poise.sampling.draws import Sampling, derived_seed
from poise.sampling.native.engine import NativeEngine
from poise.sampling.sampler import Sampler
from poise.tasks import Problem, Task, TaskError, several_turns
from poise.tasks.data import Data
from poise.training.batches import make_batch
from poise.training.checkpoints import Checkpoints
from poise.training.config.documents import ConfigError
from poise.training.config.groups import OptimConfig
from poise.training.config.schema import Config
from poise.training.frozen_models import FrozenModels, starting_weights
from poise.training.memory import bound_passes, footprint, smaller_footprints
from poise.training.resume import check_same_data
from poise.training.update import UpdatePlan

ROUNDING = 0.01  # how far rounding in half precision may move a response's ratio from 1


@dataclass(eq=False)
class Components:
    """All objects that the trainer of a run needs."""

    policy: Policy
    algorithm: Algorithm
    advantage: Estimate
    regulator: Regulator
    frozen: FrozenModels
    sampler: Sampler
    make_batch: Callable[[Sequence[Trajectory]], TokenBatch]  # ``batches.make_batch`` with the run's settings
    optimizer: torch.optim.Optimizer
    plan: UpdatePlan
    checkpoints: Checkpoints
    notes: list[str] = field(default_factory=list)  # messages to show once there is a console


def build(config: Config, folder: RunFolder, *, task: Task | None = None) -> Components:
    """Load and build all components that the config names; refuse combinations that cannot work.

    ``task`` replaces the config's task.
    """
    fix_date(folder.began())  # before any prompt is encoded
    notes: list[str] = []
    algorithm, advantage, regulator = config.build_algorithm(), config.build_advantage(), config.build_regulator()
    start = starting_weights(config, folder)
    on_gpu = resolve_device(config.device).type == "cuda"
    if (memory := footprint(config, start, passes=on_gpu)) is not None:
        memory.check(config.model, config.device, lambda: smaller_footprints(config, start))
    policy = load_trained(config, folder)
    if config.lora is None and getattr(policy.model, "is_quantized", False):
        raise ModelError(
            f"model={config.model}: its weights are quantised, so they cannot be trained: train an adapter, "
            "lora.rank=16"
        )
    if memory is not None and policy.device.type == "cuda":
        bound_passes(policy, memory, config.optim.micro_tokens, notes.append)
    policy.check_settings(config.rollout.max_prompt, config.rollout.max_tokens)
    if config.lora is None and has_adapter(config.model):
        notes.append("model: its adapter is merged, and all weights are trained; lora.rank=16 trains a new adapter")
    recompute = recomputed(config, policy, notes.append)
    kl = bool(config.objective.kl_coef)
    frozen = FrozenModels(config, policy, algorithm, notes.append, folder, reference=kl)  # before memory is measured
    sampler = frozen.add_to(build_sampler(config, policy, notes.append, task=task))
    check_same_data(sampler.task, folder)
    master_weights = policy.master_weights = MasterWeights(policy.model)
    optimizer = build_optimizer(policy.parameters(), config.optim)
    master_weights.serve(optimizer)
    if policy.device.type == "cpu":
        keep_freed_memory()

    batch = partial(
        make_batch,
        policy=policy,
        advantage=advantage,
        temperature=config.rollout.temperature,
        recompute=recompute,
        reference=frozen.reference if kl else None,
        hidden="hidden" in regulator.needs,
        min_p=config.objective.min_p,
        micro_tokens=config.optim.micro_tokens,
    )
    plan = UpdatePlan.of(config)
    checkpoints = Checkpoints(folder, policy, master_weights, optimizer, config.checkpoint_every)
    return Components(
        policy, algorithm, advantage, regulator, frozen, sampler, batch, optimizer, plan, checkpoints, notes
    )


def build_optimizer(parameters: Sequence[Tensor], settings: OptimConfig) -> torch.optim.Optimizer:
    """torch's AdamW; with ``eight_bit``, bitsandbytes' AdamW."""
    common: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "weight_decay": settings.weight_decay}
    if not settings.eight_bit:
        return torch.optim.AdamW(parameters, **common, fused=True)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # its warnings on a CPU do not concern AdamW
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            f"optim.eight_bit=true needs bitsandbytes ({error}); {how_to_install('bitsandbytes')}"
        ) from error
    optimizer: torch.optim.Optimizer = AdamW8bit(parameters, **common)
    return optimizer


def load_trained(config: Config, folder: RunFolder) -> Policy:
    """The policy to train: the config's model, with the adapter of its LoRA settings."""
    return load_policy(
        starting_weights(config, folder),
        lora=config.lora,
        seed=derived_seed(config.seed, 0),
        # Kernels are compiled for the first sizes that occur, and a resumed run starts with different sizes.
        compiled=bool(config.compile) if config.deterministic else config.compile,
        tokens=config.tokens_left(*folder.progress()),
        **config.loading,
    )


def build_sampler(config: Config, policy: Policy, note: Callable[[str], None], *, task: Task | None = None) -> Sampler:
    """A sampler for the config's task, or for ``task``. ``note`` shows messages to the user."""
    rollout = config.rollout
    engine = choose(
        policy, rollout.engine, rollout.batch, note, memory=rollout.vllm_memory, micro_tokens=config.optim.micro_tokens
    )
    task = task or config.task.build()
    if isinstance(engine, NativeEngine):
        episode = rollout.max_episode_tokens if several_turns(task) else None
        engine.check_memory(rollout.max_prompt, episode or rollout.max_tokens)
    prefill = config.task.prefill
    check_beginning(task, policy, prefill, note)
    check_data(task, policy, rollout.max_prompt - len(policy.encode_prefill(prefill)), note)
    sampling = Sampling(rollout.temperature, rollout.top_p, rollout.top_k)
    limits = rollout.max_tokens, rollout.max_prompt, rollout.max_episode_tokens
    return Sampler(policy, engine, task, sampling, *limits, prefill=prefill)


def check_beginning(task: Task, policy: Policy, prefill: str, note: Callable[[str], None]) -> None:
    """Refuse a prefill or reward that opens ``<think>`` again; note a chat template without a generation prompt."""
    tag = opened(policy.tokenizer)
    if tag and "<think>" in prefill:
        raise TaskError(f"task.prefill={prefill!r}: the model's chat template opens <think> already: remove the tag")
    rewards = task.rewards.specs if isinstance(task, Data) else []
    if "<think>" in tag + prefill and any(getattr(spec.reward, "opened", False) for spec in rewards):
        raise TaskError("format(opened=True): the replies that rewards read already begin with <think>: remove opened")
    if tag:
        note("the chat template opens <think>: rewards and tasks read replies with that tag in front")
    if starts_no_turn(policy.tokenizer):
        note(
            "the chat template has no generation prompt: the model is not told that its turn begins; correct "
            "chat_template.jinja in the model's folder, or begin the replies with task.prefill=TEXT"
        )


def check_data(task: Task, policy: Policy, max_prompt: int, note: Callable[[str], None]) -> None:
    """Drop a dataset's problems with prompts that are too long. Note the dataset's size and its reader's messages."""
    if not isinstance(task, Data):
        return

    @cache
    def frame(*roles: str) -> int:
        """The number of tokens that the template adds to messages with these roles."""
        return len(policy.encode([{"role": role, "content": "."} for role in roles]))

    def too_long(problem: Problem) -> bool:
        # A token has at least one byte, so a prompt with few bytes fits without being encoded.
        messages = problem.data["messages"]
        size = sum(len(message["content"].encode()) for message in messages)
        if size + frame(*(message["role"] for message in messages)) <= max_prompt:
            return False
        return len(policy.encode(messages)) > max_prompt

    why = f"since their prompts are longer than rollout.max_prompt={max_prompt} tokens"
    task.leave_out(too_long, why, "raise rollout.max_prompt")
    for line in task.notes:
        note(line)
    note(task.sizes())


def recomputed(config: Config, policy: Policy, note: Callable[[str], None]) -> bool:
    """Whether make_batch must compute old log-probabilities, because the settings ask for it or the surrogate needs it.

    With vLLM this is False: ``VllmEngine`` has already scored each response with the policy.
    """
    if config.rollout.engine == "vllm":
        return False
    if config.rollout.old_logp == "recomputed":
        return True
    bound = config.objective.rule.bound if policy.model.dtype.itemsize < 4 else inf
    if bound < ROUNDING:
        name = str(policy.model.dtype).removeprefix("torch.")
        note(
            f"objective.surrogate={config.objective.surrogate} holds responses back once their ratio is {bound:g} away "
            f"from 1, and sampling and training in {name} differ by more: old log-probabilities are recomputed, which "
            "takes one pass per step (rollout.old_logp=recomputed); dtype=float32 needs none"
        )
    return bound < ROUNDING


def steps_taken(model: str) -> int:
    """The training step of the checkpoint that contains the model; 0 for any other model."""
    checkpoint = Path(locate(model)).resolve().parent
    return step_of(checkpoint) if checkpoint.parent.name == "checkpoints" else 0
