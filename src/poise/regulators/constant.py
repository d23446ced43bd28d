"""The same weight for every token: a control."""

from __future__ import annotations

from dataclasses import dataclass

from poise._lib.errors import check_range
from poise.batch import Phase, TokenBatch
from poise.regulators.base import Regulator


@dataclass(frozen=True)
class Constant(Regulator):
    """``w = weight`` for the policy term of every token; KL and entropy terms unchanged.

    **Ours:** a control for methods whose weights average below 1, as AR's do: is their effect only a smaller step?
    """

    scope = "token"
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_range("constant", "weight", self.weight, 0.0, 1e6)

    def phases(self, batch: TokenBatch) -> list[Phase]:
        """One phase with a constant weight."""
        return [Phase.of(batch, self.weight)]
