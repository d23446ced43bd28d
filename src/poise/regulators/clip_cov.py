"""Clip-Cov: drop a few of the tokens whose advantage and log-probability covary most."""

from __future__ import annotations

from dataclasses import dataclass

from poise._lib.errors import check_range
from poise.batch import Phase, TokenBatch
from poise.regulators.base import Regulator, random_order, scatter


@dataclass(frozen=True)
class ClipCov(Regulator):
    """Zero the policy term of a random ``share`` of the tokens, drawn among those with ``low < cov < high``.

    ``cov = (A − mean A)·(log p − mean log p)``, means over the response tokens. Paper: "The Entropy Mechanism of
    Reinforcement Learning for Reasoning Language Models", arXiv 2505.22617; defaults as in verl's ``clip_cov``.
    **Ours:** ``cov`` is computed once, over the rollout batch, with the old policy's log-probabilities. verl uses each
    micro-batch's current log-probabilities and skips tokens that the ratio clip already holds back; at rollout time the
    clip holds back none. Ours is closest to verl's with few optimizer steps per batch. ``share`` is a share of all
    response tokens; at least one token is drawn if there is a candidate. ``seed`` seeds the random choice.
    """

    share: float = 0.0002
    low: float = 1.0
    high: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("clip-cov", "share", self.share, 0.0, 1.0)
        check_range("clip-cov", "low", self.low)
        check_range("clip-cov", "high", self.high, self.low)

    def phases(self, batch: TokenBatch) -> list[Phase]:
        """One phase: ones, with zeros for the dropped tokens."""
        if self.share == 0 or not batch.mask.any():
            return [Phase.of(batch)]
        logp = batch.old_logp[batch.mask].to(batch.dtype)
        advantages = batch.token_advantages[batch.mask]
        cov = (advantages - advantages.mean()) * (logp - logp.mean())
        candidates = ((cov > self.low) & (cov < self.high)).nonzero()[:, 0]
        order = random_order(batch, len(candidates), self.seed, "clip-cov")
        dropped = candidates[order[: max(int(self.share * len(cov)), 1)]]
        return [Phase.of(batch, ~scatter(batch, dropped), metrics={"clipped_share": len(dropped) / len(cov)})]
