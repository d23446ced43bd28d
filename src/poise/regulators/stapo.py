"""STAPO: ignore rare tokens of rewarded responses that probably did not contribute to the reward."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from poise._lib.device import kth_value
from poise._lib.errors import check_range
from poise.batch import Phase, TokenBatch
from poise.regulators.base import Regulator


@dataclass(frozen=True)
class Stapo(Regulator):
    """Zero the policy term of tokens with ``A > 0``, ``p < τ_p`` and low entropy; renormalise over those that remain.

    Paper: "STAPO: Stabilizing Reinforcement Learning for LLMs by Silencing Rare Spurious Tokens", arXiv 2602.15620,
    known to us from summaries; τ_p (``max_prob``) = 0.002. **Ours:** "low entropy" means below the batch's
    ``entropy_quantile``, 0.8 by default (the tokens that "Beyond the 80/20 Rule" drops). The renormalisation is a
    factor N_all / N_kept in the weights; it is exact for token-mean if one optimizer step uses the whole batch.
    ``max_prob=0`` is GRPO exactly.
    """

    max_prob: float = 0.002
    entropy_quantile: float = 0.8
    needs = frozenset({"entropy"})

    def __post_init__(self) -> None:
        check_range("stapo", "max_prob", self.max_prob, 0.0, 1.0)
        check_range("stapo", "entropy_quantile", self.entropy_quantile, 0.0, 1.0)

    def phases(self, batch: TokenBatch) -> list[Phase]:
        """One phase; the KL weights are 1."""
        assert batch.entropy is not None
        entropies = batch.entropy[batch.mask]
        below = int(self.entropy_quantile * len(entropies))  # number of low-entropy tokens; at quantile 1, all
        cut = kth_value(entropies, below + 1) if below < len(entropies) else torch.inf
        spurious = batch.mask & (batch.token_advantages > 0) & (batch.prob < self.max_prob) & (batch.entropy < cut)
        kept = batch.mask & ~spurious
        total = batch.mask.sum().clamp(min=1)
        factor = total.to(batch.dtype) / kept.sum().clamp(min=1)
        share = float(spurious.sum() / total)
        return [Phase.of(batch, kept * factor, metrics={"silenced_share": share})]
