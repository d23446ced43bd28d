"""GRPO as it is, and the controls that an honest comparison needs.

No paper. **Ours:** all three. Lopti takes twice as many optimizer steps as GRPO on the same rollouts, each on a part
of the tokens: ``Identity(passes=2)`` takes as many on all tokens, ``RandomSplit`` as many on parts chosen by lot. AR's
weights average below 1: ``Constant`` shrinks every token alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from poise._errors import check_range
from poise.batch import Phase, TokenBatch
from poise.regulators.base import Regulator, scatter, uniform


@dataclass(frozen=True)
class Identity(Regulator):
    """``w = 1``: every token pulls as GRPO lets it. ``passes`` repeats the whole update."""

    passes: int = 1

    def __post_init__(self) -> None:
        check_range("grpo", "passes", self.passes, 1)

    def phases(self, batch: TokenBatch) -> list[Phase]:
        """Ones, ``passes`` times."""
        names = ["all"] if self.passes == 1 else [f"pass{i + 1}" for i in range(self.passes)]
        return [Phase.of(batch, name=name) for name in names]


@dataclass(frozen=True)
class Constant(Regulator):
    """``w = weight`` for the policy term of every token; KL and entropy terms as they are."""

    weight: float = 1.0

    def __post_init__(self) -> None:
        check_range("constant", "weight", self.weight, 0.0, 1e6)

    def phases(self, batch: TokenBatch) -> list[Phase]:
        """One phase with a constant weight."""
        return [Phase.of(batch, self.weight)]


@dataclass(frozen=True)
class RandomSplit(Regulator):
    """Two phases as Lopti's, but the first holds a random ``share`` of the tokens, whatever their probability."""

    share: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("random-split", "share", self.share, 0.0, 1.0)

    def phases(self, batch: TokenBatch) -> list[Phase]:
        """Exactly ``round(share · N)`` of the N tokens first, then the others."""
        draws = uniform(batch, self.seed)
        first = scatter(batch, draws.argsort().argsort() < round(self.share * len(draws)))
        return [
            Phase.of(batch, part, part, name=name) for name, part in (("first", first), ("second", batch.mask & ~first))
        ]
