"""Build the sampler of a config, for the trainer, the evaluation and diagnose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from poise.algorithms.sampler import Sampler
from poise.config.schema import Config
from poise.engines.choose import choose
from poise.engines.forecast import announce
from poise.models.policy import Policy
from poise.rollout.sampling import Sampling
from poise.tasks import Task


def build_sampler(
    config: Config,
    policy: Policy,
    note: Callable[[str], None],
    *,
    responses: int,
    task: Task | None = None,
    **more: Any,
) -> Sampler:
    """A sampler for the config's task, or for ``task``. ``note`` receives messages for the user.

    ``responses`` is the largest number of responses that one call will sample.
    """
    rollout = config.rollout
    engine = choose(policy, rollout.engine, rollout.batch, note, memory=rollout.vllm_memory)
    announce(engine, note, responses=responses, max_prompt=rollout.max_prompt, max_tokens=rollout.max_tokens)
    sampling = Sampling(rollout.temperature, rollout.top_p, rollout.top_k)
    return Sampler(
        policy, engine, task or config.task.build(), sampling, rollout.max_tokens, rollout.max_prompt,
        rollout.max_episode_tokens, **more,
    )  # fmt: skip
