"""Which tokens drive an update: gradients, real steps and their effects, by interval of the tokens' probability.

The analysis of arXiv 2505.12929 (its first figures) and 2505.18830, for any loop and any regulators. Everything is
measured: gradients are backward passes over all parameters in which only one interval's tokens take part, effects are
those of optimizer steps that are really taken, and undone.

For each regulator, with K intervals:

- ``norm`` (K,): ‖g_i‖, the gradient that interval i produces on its own. The loss divides by the count of all tokens,
  so the g_i add up to the gradient g of all; ``full`` is ‖g‖, ``residual`` is ‖Σ g_i − g‖ / ‖g‖, rounding only.
- ``per_token`` (K,): ‖g_i‖ by the interval's own count of tokens instead, so that rare and frequent ones compare.
- ``share`` (K,): ⟨g_i, g⟩ / ‖g‖², interval i's part in the whole gradient. Shares add up to 1; one can be negative.
- ``norm_share`` (K,): ‖g_i‖ / Σ_j ‖g_j‖.
- ``cosine`` (K, K), and ``split_cosine`` (K − 1,): between all tokens below an edge and all above it.
- ``influence``: K + 1 rows, what a step with interval i alone, and last the regulator's own update with all its
  phases, did to the tokens of each interval: the mean of |Δp| (``moved``), of |Δ log p| (``moved_log``), and the mean
  of Δp where the advantage is positive (``rewarded``) or negative (``punished``).
- ``displacement``: what the update did to the log-likelihood of correct responses (``displacement.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from poise.batch import Phase, TokenBatch
from poise.diagnostics.displacement import likelihood_displacement
from poise.diagnostics.intervals import Intervals
from poise.diagnostics.loop import Loop, gradient_of, inner, step, unchanged
from poise.diagnostics.sizes import token_gradient_sizes
from poise.regulators.base import Regulator

Gradient = list[Tensor | None]
BINS = 40  # of the density


def dominance(
    loop: Loop,
    regulators: Mapping[str, Regulator],
    optimizer: torch.optim.Optimizer,
    *,
    intervals: Intervals | None = None,
    clip: float = 1.0,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Measure one batch. Weights and the optimizer's state are afterwards what they were before, bit for bit.

    Returns numbers and lists of them, ready for JSON, and (B, T) tensors about each token: ``size`` (‖e_y − π‖, where
    the batch has hidden states), ``change`` (Δ log p by the update of the first regulator), and what regulators found
    out, such as NTHR's score.
    """
    intervals = intervals or Intervals()
    batch, masks = loop.batch, intervals.masks(loop.batch)
    sizes = token_gradient_sizes(batch)
    found = _tokens(batch, masks, sizes)
    tokens = {} if sizes is None else {"size": sizes}
    seen: list[tuple[Phase, dict[str, Any]]] = []  # Lopti's phases make up GRPO: measured once
    with torch.no_grad():
        before = loop.logp()
    with unchanged(loop, optimizer):
        for name, regulator in regulators.items():
            phases = regulator(batch)
            whole = _together(phases)
            known = [old for phase, old in seen if _same(phase, whole)]
            if known:
                pulls = {**known[0], "influence": known[0]["influence"][:-1]}
            else:
                pulls = _pulls(loop, whole, masks, optimizer, before, clip)
            after = _updated(loop, phases, optimizer, clip)
            pulls["influence"] = [*pulls["influence"], _effect(before, after, masks, batch)]
            pulls["weight"] = _means(whole.policy, masks)
            pulls["metrics"] = {key: value for phase in phases for key, value in phase.metrics.items()}
            pulls["displacement"] = _displaced(batch, before, after)
            seen.append((whole, pulls))
            found["regulators"][name] = pulls
            tokens |= {key: value for phase in phases for key, value in phase.tokens.items()}
            tokens.setdefault("change", torch.where(batch.mask, after - before, 0.0))
    return found, tokens


def _tokens(batch: TokenBatch, masks: Tensor, sizes: Tensor | None) -> dict[str, Any]:
    """What is there before any gradient: how many tokens of each interval, and which advantages they have."""
    prob, advantages = batch.prob, batch.token_advantages
    count = masks.sum((1, 2))
    density = torch.histc(prob[batch.mask].float(), BINS, 0.0, 1.0)
    correct, groups = batch.correct, batch.groups
    return {
        "count": int(batch.mask.sum()),
        "tokens": count.tolist(),
        "token_share": (count / batch.mask.sum()).tolist(),
        "density": (density / density.sum() * BINS).tolist(),
        "advantage": {
            "mean": _means(advantages, masks),
            "size": _means(advantages.abs(), masks),
            "positive": _means((advantages > 0).double(), masks),
            "negative": _means((advantages < 0).double(), masks),
        },
        "size": None if sizes is None else _means(sizes, masks),
        "accuracy": None if correct is None else float(correct.double().mean()),
        "with_gradient": float((advantages != 0)[batch.mask].double().mean()),
        "groups": None if groups is None else len(groups.unique()),
        "regulators": {},
    }


def _pulls(
    loop: Loop, whole: Phase, masks: Tensor, optimizer: torch.optim.Optimizer, before: Tensor, clip: float
) -> dict[str, Any]:
    """Each interval alone: its gradient, and the effect of a step along it."""
    parts = [gradient_of(loop, Phase(whole.name, whole.policy * mask, whole.kl * mask)) for mask in masks]
    full = gradient_of(loop, whole)
    gram = torch.tensor([[inner(a, b) for b in parts] for a in parts], dtype=torch.float64)
    squared = inner(full, full)
    norm = gram.diagonal().clamp(min=0).sqrt()
    gap = _sum([*parts, [None if part is None else -part for part in full]])
    count, total = masks.sum((1, 2)).cpu(), int(loop.batch.mask.sum())
    influence = []
    for part in parts:
        with unchanged(loop, optimizer):
            step(loop, optimizer, part, clip)
            influence.append(_effect(before, loop.logp(), masks, loop.batch))
    cosine = gram / (norm[:, None] * norm)
    splits = [_cosine(gram, cut) for cut in range(1, len(parts))]
    return {
        "norm": norm.tolist(),
        "full": squared**0.5,
        "per_token": _numbers(norm * total / count),
        "share": _numbers(torch.tensor([inner(part, full) for part in parts], dtype=torch.float64) / squared),
        "norm_share": _numbers(norm / norm.sum()),
        "residual": (inner(gap, gap) / squared) ** 0.5 if squared else 0.0,
        "cosine": [_numbers(row) for row in cosine],
        "split_cosine": splits,
        "influence": influence,
    }


def _updated(loop: Loop, phases: Sequence[Phase], optimizer: torch.optim.Optimizer, clip: float) -> Tensor:
    """(B, T) log-probabilities after the regulator's own update: a step for each phase, one after the other."""
    with unchanged(loop, optimizer):
        for phase in phases:
            step(loop, optimizer, gradient_of(loop, phase), clip)
        return loop.logp()


def _effect(before: Tensor, after: Tensor, masks: Tensor, batch: TokenBatch) -> dict[str, list[float | None]]:
    change, advantages = after.double().exp() - before.double().exp(), batch.token_advantages
    return {
        "moved": _means(change.abs(), masks),
        "moved_log": _means((after - before).abs(), masks),
        "rewarded": _means(change, masks & (advantages > 0)),
        "punished": _means(change, masks & (advantages < 0)),
    }


def _displaced(batch: TokenBatch, before: Tensor, after: Tensor) -> dict[str, Any] | None:
    if batch.correct is None or not batch.correct.any():
        return None
    found = likelihood_displacement(batch, after, before=before)
    questions = found.by_group(batch.groups) if batch.groups is not None else {}
    return {**found.metrics(), "questions": list(questions.values())}


def _together(phases: Sequence[Phase]) -> Phase:
    """All phases as one: what they ask for, at the weights before any of them."""
    policy, kl = (torch.stack(weights).sum(0) for weights in zip(*((p.policy, p.kl) for p in phases), strict=True))
    return Phase("all", policy, kl)


def _same(a: Phase, b: Phase) -> bool:
    return torch.equal(a.policy, b.policy) and torch.equal(a.kl, b.kl)


def _sum(gradients: Sequence[Gradient]) -> Gradient:
    columns = [[part for part in column if part is not None] for column in zip(*gradients, strict=True)]
    return [torch.stack(column).sum(0) if column else None for column in columns]


def _cosine(gram: Tensor, cut: int) -> float | None:
    """Between the sum of the first ``cut`` gradients and that of the others, from their inner products."""
    low, high, between = gram[:cut, :cut].sum(), gram[cut:, cut:].sum(), gram[:cut, cut:].sum()
    return float(between / (low * high).sqrt()) if low > 0 and high > 0 else None


def _means(values: Tensor, masks: Tensor) -> list[float | None]:
    return _numbers(torch.where(masks, values.double(), 0.0).sum((1, 2)) / masks.sum((1, 2)))


def _numbers(values: Tensor) -> list[float | None]:
    """None stands for what cannot be: a mean over no tokens, say."""
    return [value if value - value == 0 else None for value in values.tolist()]
