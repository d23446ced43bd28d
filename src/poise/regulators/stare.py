"""STARE: while the policy is certain, learn a little more from surprising tokens of rewarded responses."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch

from poise._lib.device import kth_value
from poise._lib.errors import check_choice, check_range
from poise.batch import Phase, TokenBatch
from poise.regulators.base import Regulator

SIDES = ("positive", "negative")


@dataclass(frozen=True)
class Stare(Regulator):
    """``w = weight`` for the ``share`` of the tokens with A > 0 that have the lowest p, while entropy is low; else 1.

    Paper: STARE, arXiv 2606.19236, known to us from summaries: weight 1.1 on the 10 % most surprising tokens with A > 0
    while the entropy is below 0.3; the variant for A < 0 is ``stare(side="negative", weight=0.9)``. **Ours:** the
    entropy is the old policy's mean entropy over the rollout batch; tokens are also chosen over the rollout batch, and
    ties at the cut are included. With ``max_entropy=None`` the weight applies at any entropy. ``weight=1`` or
    ``share=0`` is GRPO exactly. The KL weights are 1.
    """

    weight: float = 1.1
    share: float = 0.1
    side: str = "positive"
    max_entropy: float | None = 0.3
    needs = frozenset({"entropy"})

    def __post_init__(self) -> None:
        check_range("stare", "weight", self.weight, 0.0)
        check_range("stare", "share", self.share, 0.0, 1.0)
        check_choice("stare", "side", self.side, SIDES)
        if self.max_entropy is not None:
            check_range("stare", "max_entropy", self.max_entropy, 0.0)

    def phases(self, batch: TokenBatch) -> list[Phase]:
        """One phase: ones, with ``weight`` for the chosen tokens."""
        assert batch.entropy is not None
        entropy = float(batch.entropy[batch.mask].double().mean()) if batch.mask.any() else 0.0
        sign = 1 if self.side == "positive" else -1
        candidates = batch.mask & (sign * batch.token_advantages > 0)
        logp = batch.old_logp[candidates]
        count = ceil(self.share * len(logp))
        idle = self.max_entropy is not None and entropy >= self.max_entropy
        if idle or count == 0:
            return [Phase.of(batch, metrics={"entropy": entropy, "chosen_share": 0.0})]
        chosen = candidates & (batch.old_logp <= kth_value(logp, count))
        share = float(chosen.sum() / batch.mask.sum())
        weights = torch.ones_like(batch.old_logp, dtype=batch.dtype).masked_fill_(chosen, self.weight)
        return [Phase.of(batch, weights, metrics={"entropy": entropy, "chosen_share": share})]
