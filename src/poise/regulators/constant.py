"""The same weight for every token: a control."""

from __future__ import annotations

from dataclasses import dataclass

from poise._lib.errors import check_range
from poise.batch import Phase, TokenBatch
from poise.regulators.base import Follower


@dataclass(frozen=True)
class Constant(Follower):
    """``w = weight`` for the policy term of every token; KL and entropy terms unchanged.

    **Ours:** a control for methods with a mean weight below 1, such as AR: do they only make the step smaller?
    ``like="ar(alpha=0.2)"`` copies that method's mean: in every batch, all tokens of a phase get the mean of the
    method's weights, separately for policy and KL.
    """

    scope = "token"
    weight: float = 1.0
    like: str = ""

    def __post_init__(self) -> None:
        check_range("constant", "weight", self.weight, 0.0, 1e6)
        self._follow("constant", {"weight": 1.0})

    @property
    def phase_count(self) -> int:
        """The number of phases of the method in ``like``; 1 without ``like``."""
        return self.followed.phase_count if self.followed else 1

    def phases(self, batch: TokenBatch) -> list[Phase]:
        """One phase with a constant weight; with ``like``, one for each phase of that method."""
        if not self.followed:
            return [Phase.of(batch, self.weight)]
        tokens = batch.mask.sum().clamp(min=1)
        return [
            Phase.of(batch, phase.policy.sum() / tokens, phase.kl.sum() / tokens, name=phase.name)
            for phase in self.followed(batch)
        ]
