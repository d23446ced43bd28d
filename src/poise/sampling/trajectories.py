"""``Trajectory``: one row to train on. ``Algorithm``: problems in, trajectories out. ``collect`` runs one.

An algorithm may be the user's own, so ``collect`` and ``metrics_of`` check what it returns.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor

from poise._lib.errors import short
from poise._lib.user_code import UserCodeError, blamed, mark, path_to
from poise.advantages import Estimate
from poise.batch import Prompt
from poise.models.location import ModelError
from poise.tasks import Episode, Message, Problem, RewardError, Score, TaskError

if TYPE_CHECKING:
    from poise.sampling.sampler import Sampler

F = TypeVar("F", bound=Callable[..., Any])
Memory = dict[str, Any]  # an algorithm's state between steps: JSON, saved with every checkpoint
FIRST = "first"  # the role of an attempt at the problem as it is: what evaluation would see
CONSOLIDATED = "consolidated"  # the role of a row whose tokens were sampled after another prompt: it forms no group


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One row to train on: a prompt, and everything after it up to the model's last token.

    ``own`` marks the tokens that the model wrote. The others are the environment's: the model reads them, but they
    have no weight, no log-probability and do not count in the denominator. All tensors are (n,), on the host.
    """

    problem: Problem
    prompt: Prompt
    tokens: Tensor  # (n,) int64
    own: Tensor  # (n,) bool
    score: Score
    text: str  # the model's text; for several turns, its replies one after another
    finished: bool  # every reply ended by itself, none at the token limit
    group: Hashable = None  # rows of the same group are normalised together; None: no group
    logp: Tensor | None = None  # (n,) float32 from the sampler; None: the policy computes it
    entropy: Tensor | None = None  # (n,) float32
    sampler_logp: Tensor | None = None  # (n,) float32 of an engine whose arithmetic differs from the policy's
    advantage: float | Tensor | None = None  # a number, or (n,) one per token: used instead of normalising the reward
    messages: list[Message] = field(default_factory=list)  # the replies, and what the environment said in between
    role: str = FIRST  # what the row is to its algorithm; metrics of rewards and lengths are over first attempts
    notes: Mapping[str, float] = field(default_factory=dict)  # the algorithm's numbers about this row; recorded
    episode: Episode | None = None  # the episode itself, ended: for its feedback
    version: int = 0  # the training step whose weights sampled it; 0: the starting weights


def algorithm(thing: F) -> F:
    """Allow settings to name an algorithm class, or a function that returns one, by its dotted path.

    >>> @poise.algorithm
    ... class Mine:
    ...     def collect(self, problems, sampler, seed, memory=None): ...

    Then ``algorithm="mymodule.Mine"`` loads it.
    """
    return mark("algorithm", thing)


class Algorithm(Protocol):
    """Decides what to sample for the problems of a step.

    An algorithm with ``metrics(trajectories) -> dict[str, float]`` adds to the metrics of a step. One with ``models``,
    a dict of sources by name, finds a sampler of each frozen model in ``sampler.others`` (``frozen_models.py``).
    ``check(sampler, note)`` may refuse a task or a model before the run starts.
    """

    def collect(
        self, problems: Sequence[Problem], sampler: Sampler, seed: int, memory: Memory | None = None
    ) -> tuple[list[Trajectory], Memory | None]:
        """The trajectories to train on, and the memory for the next step.

        The result depends on the problems, the weights, the seed and the memory alone, so that a resumed run continues
        bit for bit.
        """
        ...


def collect(
    algorithm: Algorithm,
    problems: Sequence[Problem],
    sampler: Sampler,
    seed: int,
    memory: Memory | None = None,
    *,
    name: str,
    advantage: Estimate,
) -> tuple[list[Trajectory], Memory | None]:
    """Run ``algorithm.collect`` and check its result. ``name`` and ``advantage`` are the settings of the run."""
    with blamed("algorithm", name, passing=(ModelError, TaskError, RewardError)):
        return _checked(algorithm.collect(problems, sampler, seed, memory), advantage)


def metrics_of(algorithm: Algorithm, samples: Sequence[Trajectory]) -> dict[str, float]:
    """The metrics that the algorithm itself reports of the samples it collected."""
    metrics = getattr(algorithm, "metrics", None)
    with blamed("algorithm", path_to(type(algorithm))):
        reported: Any = metrics(samples) if metrics else {}
    if not isinstance(reported, dict) or not all(isinstance(key, str) for key in reported):
        raise UserCodeError(f"{_owner(metrics)} must return a dict of numbers by name, got {short(reported)}")
    for key, value in reported.items():
        try:
            reported[key] = value if isinstance(value, int) else float(value)
        except (TypeError, ValueError, RuntimeError):
            raise UserCodeError(f"{_owner(metrics)}: {key} must be a number, got {short(value)}") from None
    return reported


def _owner(function: Any) -> str:
    return str(getattr(function, "__qualname__", function))


def _checked(result: Any, advantage: Estimate) -> tuple[list[Trajectory], Memory | None]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"collect must return a list of samples and the memory for the next step, got {short(result)}")
    samples, memory = result
    if not isinstance(samples, list) or not all(isinstance(sample, Trajectory) for sample in samples):
        raise TypeError(
            f"collect must return a list of poise.sampling.algorithms.Trajectory first, got {short(samples)}"
        )
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
        if not isinstance(sample.prompt, Prompt):
            raise TypeError(f"sample {row}: its prompt must be a poise.batch.Prompt, got {short(sample.prompt)}")
        if isinstance(sample.advantage, Tensor) and sample.advantage.shape not in ((), sample.tokens.shape):
            shape, tokens = tuple(sample.advantage.shape), len(sample.tokens)
            raise ValueError(f"sample {row}: its advantage must be a number or ({tokens},), one per token, got {shape}")
        alone = sample.group is None or sizes[sample.group] == 1
        if alone and sample.advantage is None and sample.score.failed is None and advantage.needs_groups:
            raise ValueError(
                f"sample {row} has nothing to be compared with: give it the group of other samples, or an advantage of "
                "its own, or set advantage=reinforce-pp"
            )
    return samples, memory
