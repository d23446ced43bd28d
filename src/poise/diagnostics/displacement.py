"""Lazy likelihood displacement (LLD): correct responses that an update makes hardly more likely, or even less likely.

Paper: arXiv 2505.18830. A correct response y⁺ is displaced lazily when
``ln π_after(y⁺|x) < ln π_before(y⁺|x) + ε``, log-likelihoods summed over its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from poise.batch import TokenBatch


@dataclass(frozen=True, eq=False)
class Displacement:
    """Log-likelihoods of the n⁺ correct responses before and after an update."""

    rows: Tensor  # (n⁺,) their rows in the batch
    before: Tensor  # (n⁺,)
    after: Tensor  # (n⁺,)
    lazy: Tensor  # (n⁺,) bool
    epsilon: float

    @property
    def change(self) -> Tensor:
        """(n⁺,) the increase of each log-likelihood."""
        return self.after - self.before

    def by_group(self, groups: Tensor) -> dict[int, float]:
        """The mean change over the correct responses of each group that has any."""
        ids = groups[self.rows]
        return {int(g): float(self.change[ids == g].mean()) for g in ids.unique()}

    def metrics(self) -> dict[str, float]:
        """``lld/…``: mean change, share of lazy responses, share that fell. Empty without correct responses."""
        if not len(self.rows):
            return {}
        return {
            "lld/change": float(self.change.mean()),
            "lld/lazy_share": float(self.lazy.double().mean()),
            "lld/fallen_share": float((self.change < 0).double().mean()),
        }


@torch.no_grad()
def likelihood_displacement(
    batch: TokenBatch, after: Tensor, *, before: Tensor | None = None, epsilon: float = 0.0
) -> Displacement:
    """Compare the log-likelihoods of the batch's correct responses before and after an update.

    ``after`` (B, T) are the log-probabilities of the sampled tokens under the updated policy, ``before`` those under
    the policy before it, by default ``old_logp``.
    """
    if batch.correct is None:
        raise ValueError("likelihood_displacement needs TokenBatch.correct, the verifier's verdict")
    before = batch.old_logp if before is None else before
    for name, value in (("after", after), ("before", before)):
        if value.shape != batch.mask.shape:
            expected = tuple(batch.mask.shape)
            raise ValueError(f"likelihood_displacement: {name} must be {expected}, got {tuple(value.shape)}")
    rows = (batch.correct & batch.mask.any(1)).nonzero()[:, 0]
    mask = batch.mask[rows]
    sums = [torch.where(mask, logp[rows].double(), 0.0).sum(1) for logp in (before, after)]
    return Displacement(rows, sums[0], sums[1], sums[1] < sums[0] + epsilon, epsilon)
