"""Plain GRPO."""

from __future__ import annotations

from dataclasses import dataclass

from poise._lib.errors import check_range
from poise.batch import Phase, TokenBatch
from poise.regulators.base import MOST_PHASES, Regulator


@dataclass(frozen=True)
class Identity(Regulator):
    """``w = 1``: plain GRPO.

    **Ours:** ``passes`` repeats the whole update. Lopti takes twice as many optimizer steps as GRPO on the same
    rollouts; ``passes=2`` takes as many steps as Lopti, on all tokens.
    """

    scope = "token"
    passes: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.passes, int):
            raise TypeError(f"grpo: passes must be a whole number, got {self.passes!r}")
        check_range("grpo", "passes", self.passes, 1, MOST_PHASES)

    @property
    def phase_count(self) -> int:
        """The number of phases: ``passes``."""
        return self.passes

    def phases(self, batch: TokenBatch) -> list[Phase]:
        """``passes`` phases of ones."""
        names = ["all"] if self.passes == 1 else [f"pass{i + 1}" for i in range(self.passes)]
        return [Phase.of(batch, name=name) for name in names]
