"""The ``Algorithm`` protocol, problems in and trajectories out, and ``Trajectory``: one row to train on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor

from poise._lib.user_code import mark
from poise.batch import Prompt
from poise.tasks import Episode, Message, Problem, Score

if TYPE_CHECKING:
    from poise.algorithms.sampler import Sampler

F = TypeVar("F", bound=Callable[..., Any])
Memory = dict[str, Any]  # an algorithm's state between steps: JSON, saved with every checkpoint
FIRST = "first"  # the role of an attempt at the problem as it is: what evaluation would see
CONSOLIDATED = "consolidated"  # the role of a row that was sampled after another prompt: it forms no group


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One row to train on: a prompt, and everything after it up to the model's last token.

    ``own`` marks the tokens that the model wrote. The others are the environment's: the model reads them, but they
    have no weight, no log-probability and do not count in the denominator. All tensors are (n,), on the host.
    """

    problem: Problem
    prompt: Prompt  # or its tokens
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
    role: str = FIRST  # what the row is to its algorithm; summaries of rewards and lengths are over first attempts
    notes: Mapping[str, float] = field(default_factory=dict)  # what the algorithm found out about it; recorded
    episode: Episode | None = None  # the episode itself, ended: for its feedback
    version: int = 0  # the step after which the weights were as they sampled it; 0: before the first

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", Prompt.of(self.prompt))


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
    a dict of sources by name, finds a sampler of each frozen model in ``sampler.others`` (``training/frozen.py``).
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
