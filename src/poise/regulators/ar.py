"""Advantage Reweighting: weights that rise linearly with the token's probability."""

from __future__ import annotations

from dataclasses import dataclass

from poise._lib.errors import check_range
from poise.batch import Phase, TokenBatch
from poise.regulators.base import Regulator


@dataclass(frozen=True)
class AdvantageReweighting(Regulator):
    """Advantage Reweighting (AR): ``A' = (α·p + 1 − α)·A``.

    Paper: "Do Not Let Low-Probability Tokens Over-Dominate in RL for LLMs", arXiv 2505.12929. As in the authors' code,
    p is the old policy's temperature-scaled probability (so the weight is constant during the update), tokens with
    A > 0 and A < 0 are weighted alike, and the weight is not renormalised: its mean is below 1. ``alpha=0.2`` is their
    K&K setting (0.3 together with Lopti; 0.1 for mathematics). ``alpha=0`` is GRPO exactly.
    """

    scope = "token"
    alpha: float = 0.2

    def __post_init__(self) -> None:
        check_range("ar", "alpha", self.alpha, 0.0, 1.0)

    def phases(self, batch: TokenBatch) -> list[Phase]:
        """One phase; the KL weights are 1."""
        return [Phase.of(batch, self.alpha * batch.prob + (1 - self.alpha))]
