"""TR-GRPO: weights that follow a sigmoid of the token's probability."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from poise._lib.errors import check_choice, check_range
from poise.batch import Phase, TokenBatch
from poise.regulators.base import Regulator


@dataclass(frozen=True)
class TokenRegulation(Regulator):
    """TR-GRPO: ``w = clip(α·(σ(p/τ) − μ), L, U)`` on the ratio, in both branches of the clipped minimum, and on the KL.

    ``alpha``, ``tau``, ``mu``, ``low`` and ``high`` are α, τ, μ, L and U. Paper: arXiv 2511.00066 (later called
    GRPO-SG). We do not know the values of the paper's constants: enter them with these settings. **Ours:** every
    default, chosen so that the weight rises with p, spans [L, U] over p in [0, 1] and averages near 1 on real rollouts
    (SmolLM2-135M-Instruct: 1.06 at temperature 0.7, 0.84 at temperature 1, experiments/dominance/probabilities.py). p
    is the old policy's, so the weight is constant during the update. The weight multiplies the finished minimum and the
    finished KL term; the paper seems to multiply inside both (docs/papers.md). ``direction="falling"`` is the paper's
    reverse ablation; we replace p with 1 − p. With ``kl_weighted=False`` the KL term is not weighted, for frameworks
    that cannot weight it.
    """

    scope = "token"
    alpha: float = 2.0
    tau: float = 0.5
    mu: float = 0.25
    low: float = 0.5
    high: float = 1.26
    direction: str = "rising"
    kl_weighted: bool = True

    def __post_init__(self) -> None:
        check_range("tr-grpo", "alpha", self.alpha, 0.0)
        check_range("tr-grpo", "tau", self.tau, 1e-6)
        check_range("tr-grpo", "mu", self.mu)
        check_range("tr-grpo", "low", self.low, 0.0)
        check_range("tr-grpo", "high", self.high, self.low)
        check_choice("tr-grpo", "direction", self.direction, ("rising", "falling"))

    def phases(self, batch: TokenBatch) -> list[Phase]:
        """One phase; the KL term has the same weight unless ``kl_weighted`` is False."""
        prob = batch.prob if self.direction == "rising" else 1 - batch.prob
        weight = (self.alpha * (torch.sigmoid(prob / self.tau) - self.mu)).clamp(self.low, self.high)
        return [Phase.of(batch, weight, weight if self.kl_weighted else 1.0)]
