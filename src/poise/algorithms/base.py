"""What an algorithm is: problems in, rows to train on out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor

from poise._lib.user_code import mark
from poise.tasks import Message, Problem, Score

if TYPE_CHECKING:
    from poise.algorithms.sampler import Sampler

F = TypeVar("F", bound=Callable[..., Any])
Memory = dict[str, Any]  # JSON; saved with every checkpoint


@dataclass(frozen=True, eq=False)
class Sample:
    """One row to train on: a prompt, and everything that follows it up to the last token that the model wrote.

    ``own`` marks the tokens that the model wrote. The others are the environment's: the model reads them, but they have
    no weight, no log-probability and no place in the denominator. All tensors are (n,), on the host.
    """

    problem: Problem
    prompt: list[int]
    tokens: Tensor  # (n,) int64
    own: Tensor  # (n,) bool
    score: Score
    text: str  # what the model wrote; for several turns, its replies one after another
    finished: bool  # every reply ended by itself, none by the limit
    group: Hashable = None  # rows with the same one are normalised together; None: the row is in no group
    logp: Tensor | None = None  # (n,) float32, as sampled; None: the policy scores the row
    entropy: Tensor | None = None  # (n,) float32
    sampler_logp: Tensor | None = None  # (n,) float32, from an engine whose arithmetic is not the policy's
    advantage: float | None = None  # given, instead of normalised in the group
    messages: list[Message] = field(default_factory=list)  # the replies, and what the environment said in between


def algorithm(thing: F) -> F:
    """Mark a class of algorithms, or a function that makes one, so that settings may name it by its dotted path.

    >>> @poise.algorithm
    ... class Mine:
    ...     def collect(self, problems, sampler, seed, memory=None): ...

    Then ``algorithm="mymodule.Mine"`` finds it.
    """
    return mark("algorithm", thing)


class Algorithm(Protocol):
    """Decides what is sampled for the problems of a step."""

    def collect(
        self, problems: Sequence[Problem], sampler: Sampler, seed: int, memory: Memory | None = None
    ) -> tuple[list[Sample], Memory | None]:
        """The rows to train on, and what to remember for the next step.

        A function of the problems, the weights, the seed and the memory alone, so that a resumed run goes on bit for
        bit.
        """
        ...
