"""Intervals of token probability, over which all diagnostics are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from poise.batch import TokenBatch


@dataclass(frozen=True)
class Intervals:
    """Intervals of [0, 1], by default its quarters. Each includes its lower end, the last one also its upper end."""

    edges: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)

    def __post_init__(self) -> None:
        rising = all(low < high for low, high in pairwise(self.edges))
        if len(self.edges) < 3 or not rising or self.edges[0] != 0 or self.edges[-1] != 1:
            raise ValueError(
                f"intervals: edges must rise from 0 to 1 and form at least two intervals, such as 0, 0.5, 1; "
                f"got {', '.join(f'{edge:g}' for edge in self.edges)}"
            )

    @classmethod
    def cut(cls, inner: Sequence[float]) -> Intervals:
        """From the inner edges, without 0 and 1."""
        return cls((0.0, *inner, 1.0))

    def __len__(self) -> int:
        return len(self.edges) - 1

    @property
    def names(self) -> list[str]:
        """``0–0.25`` and so on."""
        return [f"{low:g}–{high:g}" for low, high in pairwise(self.edges)]

    def masks(self, batch: TokenBatch) -> Tensor:
        """(K, B, T) bool: the response tokens of each interval; each token is in exactly one."""
        inner = torch.tensor(self.edges[1:-1], dtype=batch.dtype, device=batch.mask.device)
        number = torch.bucketize(batch.prob, inner, right=True)
        return (number == torch.arange(len(self), device=number.device)[:, None, None]) & batch.mask
