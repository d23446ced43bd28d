"""GRPO (arXiv 2402.03300): several attempts per problem, each compared with the other attempts of its group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from poise.sampling import GROUP
from poise.sampling.trajectories import Memory, Trajectory
from poise.tasks import Problem

if TYPE_CHECKING:
    from poise.sampling.sampler import Sampler


@dataclass(frozen=True)
class Grpo:
    """``group`` independent attempts at each problem. No memory between steps."""

    group: int = GROUP

    def collect(
        self, problems: Sequence[Problem], sampler: Sampler, seed: int, memory: Memory | None = None
    ) -> tuple[list[Trajectory], Memory | None]:
        """Return all attempts, group after group."""
        attempts = sampler.play([problem for problem in problems for _ in range(self.group)], seed)
        return [replace(sample, group=row // self.group) for row, sample in enumerate(attempts)], memory
