"""What an algorithm collects and reports, checked: it may be the user's own, and a mistake in it gets a sentence."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from poise._lib.errors import short
from poise._lib.user_code import UserCodeError, blamed, path_to
from poise.advantages import WITHOUT_GROUPS
from poise.algorithms.base import Algorithm, Memory, Trajectory
from poise.models.policy import ModelError
from poise.tasks import Problem, RewardError, TaskError

if TYPE_CHECKING:
    from poise.algorithms.sampler import Sampler


def collect(
    algorithm: Algorithm,
    problems: Sequence[Problem],
    sampler: Sampler,
    seed: int,
    memory: Memory | None = None,
    *,
    name: str,
    advantage: str,
) -> tuple[list[Trajectory], Memory | None]:
    """``algorithm.collect``. ``name`` is the setting that names it, ``advantage`` that of the estimate."""
    with blamed("algorithm", name, passing=(ModelError, TaskError, RewardError)):
        return _checked(algorithm.collect(problems, sampler, seed, memory), advantage)


def metrics_of(algorithm: Algorithm, samples: Sequence[Trajectory]) -> dict[str, float]:
    """What the algorithm itself says of the samples it collected."""
    metrics = getattr(algorithm, "metrics", None)
    with blamed("algorithm", path_to(type(algorithm))):
        found: Any = metrics(samples) if metrics else {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise UserCodeError(f"{_owner(metrics)} must return a dict of numbers by name, got {short(found)}")
    for key, value in found.items():
        try:
            found[key] = value if isinstance(value, int) else float(value)
        except (TypeError, ValueError, RuntimeError):
            raise UserCodeError(f"{_owner(metrics)}: {key} must be a number, got {short(value)}") from None
    return found


def _owner(function: Any) -> str:
    return str(getattr(function, "__qualname__", function))


def _checked(result: Any, advantage: str) -> tuple[list[Trajectory], Memory | None]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"collect must return a list of samples and the memory for the next step, got {short(result)}")
    samples, memory = result
    if not isinstance(samples, list) or not all(isinstance(sample, Trajectory) for sample in samples):
        raise TypeError(f"collect must return a list of poise.algorithms.Trajectory first, got {short(samples)}")
    if not samples:
        raise ValueError("collect returned no sample, so there is nothing to train on")
    if memory is not None and not isinstance(memory, dict):
        raise TypeError(f"collect must return its memory as a dict, or None, got {short(memory)}")
    try:
        json.dumps(memory)
    except (TypeError, ValueError) as error:
        raise TypeError(f"collect's memory goes into checkpoints as JSON: {error}") from None
    sizes = Counter(sample.group for sample in samples if sample.advantage is None)  # those that are compared
    for row, sample in enumerate(samples):
        if isinstance(sample.advantage, Tensor) and sample.advantage.shape not in ((), sample.tokens.shape):
            shape, tokens = tuple(sample.advantage.shape), len(sample.tokens)
            raise ValueError(f"sample {row}: its advantage must be a number or ({tokens},), one per token, got {shape}")
        alone = sample.group is None or sizes[sample.group] == 1
        if alone and sample.advantage is None and sample.score.failed is None and advantage not in WITHOUT_GROUPS:
            raise ValueError(
                f"sample {row} has nothing to be compared with: give it the group of other samples, or an advantage of "
                "its own, or set advantage=reinforce-pp"
            )
    return samples, memory
