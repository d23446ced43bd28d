"""Regulators that read hidden states into one number per token, and weight tokens by these numbers alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from poise.batch import Phase, TokenBatch
from poise.regulators.base import Compose, Regulator, parts_of

STATES = frozenset({"hidden", "head", "targets"})  # the fields that only ``scores`` reads


class Scorer(Regulator):
    """A regulator in two steps: ``scores`` runs where the hidden states are, ``weigh`` where the whole batch is.

    A framework whose workers share a batch calls ``scores`` on each of them, with whole groups, and sends one number
    per token to the process that has the batch (verl). Elsewhere the two follow each other. Of the fields in
    ``needs``, ``weigh`` may not read hidden, head and targets.
    """

    @abstractmethod
    def scores(self, batch: TokenBatch) -> Tensor:
        """(B, T) a number for each token, which depends on its group alone; NaN where there is none."""

    @abstractmethod
    def weigh(self, batch: TokenBatch, scores: Tensor) -> list[Phase]:
        """The phases for these scores. A group without scores, although it could have some, is left alone."""

    def phases(self, batch: TokenBatch) -> list[Phase]:
        """Both steps."""
        return self.weigh(batch, self.scores(batch))


@dataclass(frozen=True, eq=False)
class Scored(Regulator):
    """A ``Scorer`` with its scores of this batch."""

    scorer: Scorer
    scores: Tensor | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", self.scorer.needs - STATES)
        object.__setattr__(self, "scope", self.scorer.scope)

    def phases(self, batch: TokenBatch) -> list[Phase]:
        """The scorer's phases."""
        assert self.scores is not None
        return self.scorer.weigh(batch, self.scores)


def scorers(regulator: Regulator) -> list[Scorer]:
    """The parts of a regulator that score tokens, in order."""
    return [part for part in parts_of(regulator) if isinstance(part, Scorer)]


def with_scores(regulator: Regulator, scores: Sequence[Tensor | None]) -> Regulator:
    """The regulator with the scores of its scorers: it needs no hidden states any more."""
    given = iter(scores)
    parts = [Scored(part, next(given)) if isinstance(part, Scorer) else part for part in parts_of(regulator)]
    return parts[0] if len(parts) == 1 else Compose(tuple(parts))
