"""Two random phases: a control for Lopti."""

from __future__ import annotations

from dataclasses import dataclass

from poise._lib.errors import check_range
from poise.batch import Phase, TokenBatch
from poise.regulators.base import Regulator, random_order, scatter


@dataclass(frozen=True)
class RandomSplit(Regulator):
    """Two phases like Lopti's, but the first has a random ``share`` of the tokens, whatever their probability.

    **Ours:** a control for Lopti: is its effect only that of two steps on parts of the batch? Set ``share`` to that of
    Lopti's low phase in the run that you compare with (``reg/low/weight_mean``).
    """

    share: float = 0.25
    seed: int = 0  # of the random choice

    def __post_init__(self) -> None:
        check_range("random-split", "share", self.share, 0.0, 1.0)

    @property
    def phase_count(self) -> int:
        """Two."""
        return 2

    def phases(self, batch: TokenBatch) -> list[Phase]:
        """First exactly ``round(share · N)`` of the N tokens, then the others."""
        count = int(batch.mask.sum())
        first = scatter(batch, random_order(batch, count, self.seed, "random-split")[: round(self.share * count)])
        return [
            Phase.of(batch, part, part, name=name) for name, part in (("first", first), ("second", batch.mask & ~first))
        ]
