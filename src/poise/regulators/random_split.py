"""Two phases chosen by lot: a control."""

from __future__ import annotations

from dataclasses import dataclass

from poise._errors import check_range
from poise.batch import Phase, TokenBatch
from poise.regulators.base import Regulator, scatter, uniform


@dataclass(frozen=True)
class RandomSplit(Regulator):
    """Two phases as Lopti's, but the first holds a random ``share`` of the tokens, whatever their probability.

    **Ours:** a control for Lopti. Is it more than two steps on parts of the batch? Set ``share`` to that of Lopti's low
    phase in the run it is compared with (``reg/low/weight_mean``).
    """

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
