"""``Trajectory``: one row to train on. ``Algorithm``: turns problems into trajectories.

``collect`` and ``metrics_of`` call an algorithm and check its result, because an algorithm may be user code.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
FIRST = "first"  # the role of an attempt at the plain problem, as in evaluation
CONSOLIDATED = "consolidated"  # the role of a row whose prompt is not the one it was sampled with; not in a group


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One training row: a prompt, and all tokens after the prompt up to the model's last one.

    ``own`` marks the tokens that the model wrote. The loss covers only these; the other tokens are context and have no
    log-probability. All tensors are (n,), on the host.
    """

    problem: Problem
    prompt: Prompt
    tokens: Tensor  # (n,) int64
    own: Tensor  # (n,) bool
    score: Score
    text: str  # the model's text: its replies, joined by newlines
    finished: bool  # False if a reply or the episode was cut off
    group: Hashable = None  # rows of the same group are normalised together; None: no group
    logp: Tensor | None = None  # (n,) float32, from the engine; None: the trainer computes it
    entropy: Tensor | None = None  # (n,) float32
    sampler_logp: Tensor | None = None  # (n,) float32, from an engine that rounds differently from the policy
    advantage: float | Tensor | None = None  # a number, or (n,): used instead of the normalised reward
    messages: list[Message] = field(default_factory=list)  # the replies and the environment's messages between them
    role: str = FIRST  # the row's role in its algorithm; metrics of rewards and lengths cover FIRST only
    notes: Mapping[str, float] = field(default_factory=dict)  # numbers that the algorithm records about this row
    episode: Episode | None = None  # the ended episode, which may give feedback
    version: int = 0  # the training step whose weights sampled the row; 0: the starting weights

    def unscored(self) -> Trajectory:
        """A copy without log-probabilities and entropies, which the trainer then computes."""
        return replace(self, logp=None, entropy=None, sampler_logp=None)


def algorithm(thing: F) -> F:
    """Mark an algorithm class, or a function that returns an algorithm, so that settings can name its dotted path.

    >>> @poise.algorithm
    ... class Mine:
    ...     def collect(self, problems, sampler, seed, memory=None): ...

    Then ``algorithm="mymodule.Mine"`` loads it.
    """
    return mark("algorithm", thing)


class Algorithm(Protocol):
    """Decides what to sample for the problems of a step.

    An algorithm may also have:

    - ``metrics(trajectories) -> dict[str, float]``, which adds to the metrics of a step;
    - ``models``, a dict of sources by name: ``sampler.others`` then has a sampler for each of these frozen models
      (``frozen_models.py``);
    - ``check(sampler, note)``, which may reject a task or a model before the run starts.
    """

    def collect(
        self, problems: Sequence[Problem], sampler: Sampler, seed: int, memory: Memory | None = None
    ) -> tuple[list[Trajectory], Memory | None]:
        """Return the trajectories to train on, and the memory for the next step.

        The result must depend only on the problems, the weights, the seed and the memory, so that a resumed run
        continues bit for bit.
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
    """Run ``algorithm.collect`` and check its result. ``name`` and ``advantage`` are settings of the run."""
    with blamed("algorithm", name, passing=(ModelError, TaskError, RewardError)):
        return _checked(algorithm.collect(problems, sampler, seed, memory), advantage)


def metrics_of(algorithm: Algorithm, samples: Sequence[Trajectory]) -> dict[str, float]:
    """Return the metrics that the algorithm computes from its samples, after checking their types."""
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
    sizes = Counter(sample.group for sample in samples if sample.advantage is None)  # samples compared in groups
    for row, sample in enumerate(samples):
        if not isinstance(sample.prompt, Prompt):
            raise TypeError(f"sample {row}: its prompt must be a poise.batch.Prompt, got {short(sample.prompt)}")
        if isinstance(sample.advantage, Tensor) and sample.advantage.shape not in ((), sample.tokens.shape):
            shape, tokens = tuple(sample.advantage.shape), len(sample.tokens)
            raise ValueError(f"sample {row}: its advantage must be a number or ({tokens},), one per token, got {shape}")
        alone = sample.group is None or sizes[sample.group] == 1
        if alone and sample.advantage is None and sample.score.failed is None and advantage.needs_groups:
            raise ValueError(
                f"sample {row} has no other sample to be compared with: put it in a group with other samples, set its "
                "advantage, or set advantage=reinforce-pp"
            )
    return samples, memory
