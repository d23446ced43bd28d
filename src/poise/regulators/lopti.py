"""Low-probability token isolation: two updates instead of one."""

from __future__ import annotations

from dataclasses import dataclass

from poise._lib.errors import check_choice, check_range
from poise.batch import Phase, TokenBatch
from poise.regulators.base import Regulator


@dataclass(frozen=True)
class Lopti(Regulator):
    """Lopti: update first on the tokens with ``p < η`` (``threshold``), then on the others.

    Paper: arXiv 2505.12929. As in the authors' code, each phase is a complete pass of optimizer steps over the rollout
    batch; a phase masks all terms of the other phase's tokens, KL and entropy included; old log-probabilities are not
    recomputed; both phases divide the loss by the count of all response tokens, so that they add up to GRPO.
    ``threshold=0.4`` is their K&K setting (0.5 together with AR). ``order="high-first"`` is their ablation, which was
    worse than GRPO. A threshold of 0, or above 1, puts all tokens into one phase. This is GRPO exactly, since a phase
    without tokens takes no optimizer step. Lopti takes twice the optimizer steps of GRPO: compare with
    ``Identity(passes=2)`` and ``RandomSplit``. In eight of nine regimes its final accuracy was below that of
    ``Identity(passes=2)`` (experiments/comparison).
    """

    scope = "token"
    threshold: float = 0.4
    order: str = "low-first"

    def __post_init__(self) -> None:
        check_range("lopti", "threshold", self.threshold, 0.0)
        check_choice("lopti", "order", self.order, ("low-first", "high-first"))

    @property
    def phase_count(self) -> int:
        """The number of phases: two."""
        return 2

    def phases(self, batch: TokenBatch) -> list[Phase]:
        """Always two phases, "low" and "high", even if one of them has no token."""
        low = batch.mask & (batch.prob < self.threshold)
        high = batch.mask & ~low
        phases = [Phase.of(batch, low, low, name="low"), Phase.of(batch, high, high, name="high")]
        return phases if self.order == "low-first" else phases[::-1]
