"""The sampler of a config, for the trainer, the evaluation and diagnose; where a run is, and its random numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

from poise._lib.user_code import edited
from poise.algorithms.sampler import Sampler
from poise.config.schema import Config
from poise.engines.choose import choose
from poise.engines.native.engine import NativeEngine
from poise.models.places import locate
from poise.models.policy import Policy
from poise.models.prompts import opened, starts_no_turn
from poise.rollout.sampling import Sampling
from poise.runs.folder import RunFolder, step_of
from poise.tasks import Problem, Task, TaskError, data_fingerprint, several_turns
from poise.tasks.data import Data
from poise.training.resume import TrainError

ROUNDING = 0.01  # how far half precision may move the ratio of a response with unchanged weights


def build_sampler(
    config: Config,
    policy: Policy,
    note: Callable[[str], None],
    *,
    task: Task | None = None,
    **more: Any,
) -> Sampler:
    """A sampler for the config's task, or for ``task``. ``note`` receives messages for the user."""
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
    return Sampler(
        policy, engine, task, sampling, rollout.max_tokens, rollout.max_prompt,
        rollout.max_episode_tokens, prefill=prefill, **more,
    )  # fmt: skip


def check_beginning(task: Task, policy: Policy, prefill: str, note: Callable[[str], None]) -> None:
    """Refuse a ``<think>`` that would be opened twice; note a chat template that does not begin the model's turn."""
    tag = opened(policy.tokenizer)
    if tag and "<think>" in prefill:
        raise TaskError(f"task.prefill={prefill!r}: the model's chat template opens <think> already: leave the tag out")
    rewards = task.rewards.specs if isinstance(task, Data) else []
    if "<think>" in tag + prefill and any(getattr(spec.reward, "opened", False) for spec in rewards):
        raise TaskError("format(opened=True): the replies that rewards read begin with <think> here: leave opened out")
    if tag:
        note("the chat template opens <think>: rewards and tasks read replies with that tag in front")
    if starts_no_turn(policy.tokenizer):
        note(
            "the chat template has no generation prompt: the model is not told that its turn begins; correct "
            "chat_template.jinja in the model's folder, or begin the replies with task.prefill=TEXT"
        )


def recomputed(config: Config, policy: Policy, note: Callable[[str], None]) -> bool:
    """Whether old log-probabilities come from a forward pass: as the settings say, or as the surrogate needs it."""
    if config.rollout.old_logp == "recomputed":
        return True
    bound = config.objective.rule.bound if policy.model.dtype.itemsize < 4 else inf
    if bound < ROUNDING:
        name = str(policy.model.dtype).removeprefix("torch.")
        note(
            f"objective.surrogate={config.objective.surrogate} holds responses back from a ratio of {bound:g} beside 1 "
            f"on, and sampling and training in {name} differ by more: old log-probabilities are recomputed, which "
            "takes a pass a step (rollout.old_logp=recomputed); dtype=float32 needs none"
        )
    return bound < ROUNDING


def steps_taken(model: str) -> int:
    """The training steps behind a model: those of its checkpoint; 0 for a model that is in none."""
    place = Path(locate(model)).resolve().parent
    return step_of(place) if place.parent.name == "checkpoints" else 0


def check_data(task: Task, policy: Policy, max_prompt: int, note: Callable[[str], None]) -> None:
    """Drop a dataset's problems whose prompts are too long, and note its size and what its reader reported."""
    if not isinstance(task, Data):
        return

    @cache
    def frame(*roles: str) -> int:
        """The tokens that the template adds to messages of these roles."""
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


def check_same_code(config: Config, folder: RunFolder, *, accept: bool = False) -> list[str]:
    """Refuse to resume a run with edited code, unless the user accepts it: then the names of the edited files."""
    versions = folder.code_versions()
    files = edited(versions[-1], config.code) if versions and config.code else []
    if files and not accept:
        raise TrainError(
            f"{', '.join(files)}: this code was edited since the run in {folder.path} began; put it back, begin "
            "another run=DIR, or go on knowingly with --trust-changed (in Python: trust_changed=True)"
        )
    return files


def check_same_data(task: Task, folder: RunFolder) -> None:
    """Refuse to resume a run whose dataset has changed since it began."""
    fingerprint = data_fingerprint(task)
    if fingerprint is None:
        return
    saved = folder.read_json("data.json")
    if saved is None:
        folder.write_json("data.json", {"fingerprint": fingerprint})
    elif not isinstance(saved, dict) or saved.get("fingerprint") != fingerprint:
        raise TaskError(
            f"the data in {getattr(task, 'file', task.name)} are not those that the run in {folder.path} began with: "
            "put them back, or begin another run=DIR"
        )
