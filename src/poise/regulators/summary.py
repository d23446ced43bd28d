"""Metrics of a regulator's phases, for the log."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from poise.batch import Phase, TokenBatch

QUARTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


def summary(phases: Sequence[Phase], batch: TokenBatch, intervals: Sequence[float] = QUARTILES) -> dict[str, float]:
    """The ``reg/…`` metrics of any regulator's phases. Per phase, over all response tokens of the batch:

    - ``weight_mean``, ``kl_weight_mean``;
    - ``zero_share``: share of the tokens whose policy weight is 0;
    - ``effective_tokens``: ``(Σw)² / Σw²``, the effective sample size;
    - ``weight_p0.25-0.50`` and so on: the mean weight by interval of token probability; the last interval is
      closed, and an interval without tokens is left out;
    - the regulator's own metrics, such as NTHR's ``flagged_share``.

    Over all phases, ``reg/pull_p0.25-0.50`` and so on: the interval's share of ``Σ w·|A|·(1 − p)``, the size of
    the gradient at the sampled tokens' logits.
    """
    prob = batch.prob[batch.mask]
    pull = torch.stack([phase.policy[batch.mask] for phase in phases]).sum(0)
    pull = pull * batch.token_advantages[batch.mask].abs() * (1 - prob)
    names: list[str] = []
    values: list[torch.Tensor] = []
    members = []
    for low, high in pairwise(intervals):
        top = prob <= high if high == intervals[-1] else prob < high
        members.append((f"weight_p{low:.2f}-{high:.2f}", (prob >= low) & top))
    names += [f"reg/pull_{name.removeprefix('weight_')}" for name, _ in members]
    values += [((pull * inside).sum() / pull.sum()).double() for _, inside in members]
    for phase in phases:
        weight, kl = phase.policy[batch.mask], phase.kl[batch.mask]
        total = max(len(weight), 1)
        statistics = {
            "weight_mean": weight.sum() / total,
            "kl_weight_mean": kl.sum() / total,
            "zero_share": (weight == 0).sum() / total,
            "effective_tokens": weight.sum().square() / weight.square().sum().clamp(min=torch.finfo(weight.dtype).tiny),
        }
        statistics |= {name: (weight * inside).sum() / inside.sum() for name, inside in members}
        names += [f"reg/{phase.name}/{name}" for name in statistics]
        values += [value.double() for value in statistics.values()]
    numbers = dict(zip(names, torch.stack(values).tolist(), strict=True))
    reported = {f"reg/{phase.name}/{name}": value for phase in phases for name, value in phase.metrics.items()}
    return {name: value for name, value in numbers.items() if value == value} | reported
