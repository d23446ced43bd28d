"""Which rows of a step are updated, and with which phases."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from poise.algorithms.base import Sample
from poise.batch import Phase, Rows, TokenBatch
from poise.regulators import Regulator

ALL = slice(None)


def phases_of(
    regulator: Regulator, samples: Sequence[Sample], batch: TokenBatch, *, drop_equal_groups: bool = False
) -> tuple[Rows, list[Phase], dict[str, float]]:
    """The rows to update on, their phases, and the number of dropped groups as a metric.

    If no group is left, all rows with weight 0: the update takes no optimizer step.
    """
    if not drop_equal_groups:
        return ALL, regulator(batch), {}
    rows, count = groups_with_spread(samples)
    metrics = {"reward/dropped_groups": float(count)}
    if not rows:
        return ALL, [Phase.of(batch, 0.0, 0.0)], metrics
    return (rows, regulator(batch.rows(rows)), metrics) if count else (ALL, regulator(batch), metrics)


def groups_with_spread(samples: Sequence[Sample]) -> tuple[list[int], int]:
    """The rows without the groups whose rewards are all equal, and the number of these groups.

    A row with an advantage of its own stays, and so does one that has nothing to compare with.
    """
    rewards: dict[Hashable, list[float]] = {}
    for sample in samples:
        if sample.group is not None and sample.advantage is None:
            rewards.setdefault(sample.group, []).append(sample.score.reward)
    equal = {group for group, members in rewards.items() if len(members) > 1 and min(members) == max(members)}
    rows = [row for row, sample in enumerate(samples) if sample.group not in equal or sample.advantage is not None]
    return rows, len(equal)


def on_all_rows(phase: Phase, rows: Rows, batch: TokenBatch) -> Phase:
    """A phase of some rows as one of the whole batch: weight 0, and no per-token values, in the other rows.

    A slice stands for all rows.
    """
    if isinstance(rows, slice):
        return phase

    def spread(values: Tensor, fill: float) -> Tensor:
        whole = torch.full(batch.mask.shape, fill, dtype=values.dtype, device=values.device)
        whole[rows] = values
        return whole

    tokens = {name: spread(values, torch.nan) for name, values in phase.tokens.items()}
    return Phase(phase.name, spread(phase.policy, 0.0), spread(phase.kl, 0.0), phase.metrics, tokens)
