"""The opposite of Advantage Reweighting: more weight for low-probability tokens."""

from __future__ import annotations

from dataclasses import dataclass

from poise._lib.errors import check_range
from poise.batch import Phase, TokenBatch
from poise.regulators.base import Regulator


@dataclass(frozen=True)
class Amplify(Regulator):
    """``A' = (1 + α·(1 − p))·A``.

    Paper: "direction of RLVR updates", arXiv 2603.22117 (we know only a summary); its α is about 0.1 to 0.2.
    **Ours:** the default 0.2, the same as AR's. ``alpha=0`` is GRPO exactly.
    """

    scope = "token"
    alpha: float = 0.2

    def __post_init__(self) -> None:
        check_range("amplify", "alpha", self.alpha, 0.0, 1e6)

    def phases(self, batch: TokenBatch) -> list[Phase]:
        """One phase; the KL weights are 1."""
        return [Phase.of(batch, 1 + self.alpha * (1 - batch.prob))]
