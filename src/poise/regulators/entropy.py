"""Top-entropy masking: learn only from the tokens where the policy was uncertain."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from poise._lib.device import kth_value
from poise._lib.errors import check_range
from poise.batch import Phase, TokenBatch
from poise.regulators.base import Regulator


@dataclass(frozen=True)
class TopEntropy(Regulator):
    """Keep the policy term of the ``quantile`` share of the batch's tokens with the highest entropy; zero the others.

    Paper: "Beyond the 80/20 Rule", arXiv 2506.01939; like TRL's ``top_entropy_quantile``, up to the rounding of the
    count. KL is not masked, and the denominator stays the count of all response tokens. **Ours:** the entropy is the
    old policy's, over the whole rollout batch; ties at the cut are kept. ``quantile=1`` is GRPO exactly.
    """

    quantile: float = 0.2
    needs = frozenset({"entropy"})

    def __post_init__(self) -> None:
        check_range("entropy", "quantile", self.quantile, 0.0, 1.0)

    def phases(self, batch: TokenBatch) -> list[Phase]:
        """One phase of zeros and ones."""
        assert batch.entropy is not None
        entropies = batch.entropy[batch.mask]
        count = ceil(self.quantile * len(entropies))
        if count == 0:
            return [Phase.of(batch, 0.0)]
        cut = kth_value(entropies, len(entropies) - count + 1)
        return [Phase.of(batch, batch.entropy >= cut)]
