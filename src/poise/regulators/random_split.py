"""Two random phases: a control for Lopti."""

from __future__ import annotations

from dataclasses import dataclass

from poise._lib.errors import check_range
from poise.batch import Phase, TokenBatch
from poise.regulators.base import Follower, random_order, scatter


@dataclass(frozen=True)
class RandomSplit(Follower):
    """Two phases like Lopti's, but the first has a random ``share`` of the tokens, regardless of their probability.

    **Ours:** a control for Lopti: does updating twice, each time on a random part of the tokens, already have Lopti's
    effect? Lopti's share drifts during training. ``like="lopti(threshold=0.4)"`` copies that method's share: in every
    batch the first phase has as many tokens as the method's first phase. The default is about the share of tokens with
    p < 0.4 in samples of SmolLM2-135M-Instruct at temperature 0.7 (experiments/dominance/probabilities.py). ``seed``
    seeds the random choice.
    """

    share: float = 0.25
    seed: int = 0
    like: str = ""

    def __post_init__(self) -> None:
        check_range("random-split", "share", self.share, 0.0, 1.0)
        self._follow("random-split", {"share": 0.25})
        if self.followed and self.followed.phase_count != 2:
            raise ValueError(f"random-split: like = {self.like!r} must have two phases, like lopti")

    @property
    def phase_count(self) -> int:
        """The number of phases: two."""
        return 2

    def phases(self, batch: TokenBatch) -> list[Phase]:
        """Two phases: exactly ``round(share · N)`` of the N tokens (or the number from ``like``), then the others."""
        count = int(batch.mask.sum())
        size = int((self.followed(batch)[0].policy > 0).sum()) if self.followed else round(self.share * count)
        first = scatter(batch, random_order(batch, count, self.seed, "random-split")[:size])
        return [
            Phase.of(batch, part, part, name=name) for name, part in (("first", first), ("second", batch.mask & ~first))
        ]
