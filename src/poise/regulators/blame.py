"""Blame: in a wrong response, punish only surprising tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from poise._lib.errors import check_range
from poise.batch import Phase, TokenBatch
from poise.regulators.base import Regulator


@dataclass(frozen=True)
class Blame(Regulator):
    """``A' = (1 − α·min(1, p·e^H))·A`` where A < 0; tokens with A ≥ 0 keep their advantage.

    No paper: **ours**. H is the entropy of the distribution that the token was drawn from, so p·e^H compares the
    token's probability with e^(−H), the probability of a typical token. If mistakes are rarer than correct choices,
    the typical tokens of a wrong response also occur in right ones, so punishing them is mostly noise. The price: a
    mistake that the policy usually makes is not punished. Unlike p, p·e^H does not change if every token is split into
    n equally likely wordings: p becomes p/n, and H becomes H + ln n. ``alpha=0`` is GRPO exactly; at 1,
    the default, a token at least as likely as a typical one is not punished at all. We found no gain over GRPO
    (experiments/comparison).
    """

    scope = "token"
    needs = frozenset({"entropy"})
    alpha: float = 1.0

    def __post_init__(self) -> None:
        check_range("blame", "alpha", self.alpha, 0.0, 1.0)

    def phases(self, batch: TokenBatch) -> list[Phase]:
        """One phase; the KL weights are 1."""
        assert batch.entropy is not None
        typical = (batch.old_logp.to(batch.dtype) + batch.entropy).exp().clamp(max=1.0)
        weight = torch.where(batch.token_advantages < 0, 1 - self.alpha * typical, 1.0)
        return [Phase.of(batch, weight)]
