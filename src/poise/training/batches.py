"""Turns trajectories into a ``TokenBatch`` (``make_batch``), and a batch into the update's phases (``phases_of``).

Shapes: B trajectories, T tokens (padded).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from poise import advantages, regulators
from poise._lib.device import send
from poise._lib.user_code import blamed
from poise.advantages import Estimate
from poise.batch import Phase, Rows, TokenBatch, padded_batch
from poise.models.policy import Policy
from poise.models.scoring import HiddenStates, score_batch, score_min_p
from poise.objective_settings import ADVANTAGE
from poise.regulators import Regulator
from poise.sampling.trajectories import CONSOLIDATED, Trajectory
from poise.tasks import TaskError
from poise.tasks.base import NO_REWARD
from poise.training.frozen_models import Frozen
from poise.training.update import NotFiniteError

MOST_FAILED = 0.05  # the share of a step's attempts that may fail to get a score
LARGE = 1e3  # larger rewards are float64: in float32 their differences may be rounded away
COARSE = 1e-3  # float32 is too coarse if its rounding error is more than this share of a group's spread
NO_SPREAD = 1e-6  # smaller differences, such as 0.1 + 0.2 − 0.3, vanish in the normalisation's eps


def drop_failed(
    samples: Sequence[Trajectory], advantage: str | Estimate = ADVANTAGE
) -> tuple[list[Trajectory], dict[str, float]]:
    """Return the samples with a score, and the number of failures as a metric. The list is empty if no reward applies.

    If ``advantage`` compares within groups, also drop a sample that failures have left alone in its group. Rare
    failures, such as a reward function that hangs, must not end a run; frequent failures would bias training, so they
    raise TaskError.
    """
    failures = [sample for sample in samples if sample.score.failed not in (None, NO_REWARD)]
    if len(failures) > max(1, MOST_FAILED * len(samples)):
        first = failures[0]
        raise TaskError(
            f"{len(failures)} of {len(samples)} attempts got no verdict, more than {MOST_FAILED:.0%}; the first one: "
            f"{first.score.failed} (problem {first.problem.id})"
        )
    judged = [sample for sample in samples if sample.score.failed is None]
    if advantages.get(advantage).needs_groups:
        judged = _in_groups(samples, judged)
    return judged, {"reward/failed": float(len(failures))} if failures else {}


def _in_groups(before: Sequence[Trajectory], after: list[Trajectory]) -> list[Trajectory]:
    """Drop samples from ``after`` that are now alone in their group: there is no other sample to compare them with.

    A sample with a preset advantage stays, because it needs no comparison.
    """
    compared = ([sample for sample in samples if sample.advantage is None] for samples in (before, after))
    sizes_before, sizes = (Counter(sample.group for sample in samples) for samples in compared)
    return [
        sample
        for sample in after
        if sample.group is None
        or sample.advantage is not None
        or sizes[sample.group] > 1
        or sizes_before[sample.group] == 1
    ]


def make_batch(
    trajectories: Sequence[Trajectory],
    policy: Policy,
    *,
    advantage: str | Estimate = ADVANTAGE,
    temperature: float = 1.0,
    recompute: bool = False,
    reference: Frozen | None = None,
    hidden: bool = False,
    min_p: float | None = None,
    micro_tokens: int | None = None,
) -> TokenBatch:
    """Build the ``TokenBatch`` of these trajectories on the policy's device.

    With ``recompute``, a forward pass of the policy computes the old log-probabilities, and the sampler's
    log-probabilities move to ``sampler_logp``. Use it if the sampler had other weights or computes differently.
    ``reference`` is the model of the KL term. ``min_p`` adds log-probabilities under the min-p-filtered policy, for the
    surrogate lp-reg; this takes one more pass.

    ``hidden`` adds the head and a function that returns the hidden states (n, T, d) of given rows, for regulators that
    read hidden states. The pass of ``recompute`` stores the states of groups with both correct and incorrect responses,
    if memory allows; for other rows the function runs a forward pass.
    """
    if not recompute:
        trajectories = _scored(trajectories, policy, temperature, micro_tokens)
    sampled = _sampled(trajectories, policy.device)
    states = HiddenStates(policy, sampled, _compared(trajectories) if recompute else ()) if hidden else None
    if recompute:
        old_logp, entropy = score_batch(policy, sampled, temperature, micro_tokens, states)
        _check_finite(old_logp[sampled.mask])
        before = sampled.old_logp if sampled.sampler_logp is None else sampled.sampler_logp
        unscored = torch.tensor([each.logp is None and each.sampler_logp is None for each in trajectories])
        before = torch.where(send(unscored, before.device)[:, None], old_logp, before)
        sampled = replace(sampled, old_logp=old_logp, entropy=entropy, sampler_logp=before)
    return replace(
        sampled,
        advantages=_advantages(trajectories, sampled, advantages.get(advantage)).float(),
        ref_logp=reference.logp(sampled, temperature, micro_tokens) if reference else None,
        hidden=states,
        head=policy.head(temperature) if hidden else None,
        min_p_logp=None if min_p is None else score_min_p(policy, sampled, temperature, min_p, micro_tokens),
    )


def _scored(
    trajectories: Sequence[Trajectory], policy: Policy, temperature: float, micro_tokens: int | None
) -> list[Trajectory]:
    """Add the policy's log-probabilities and entropies to the trajectories that have no log-probabilities."""
    unscored = [each for each in trajectories if each.logp is None]
    if not unscored:
        return list(trajectories)
    prompts, tokens, own = zip(*((each.prompt, each.tokens, each.own) for each in unscored), strict=True)
    batch = padded_batch(prompts, tokens, policy.device, own)
    values = zip(unscored, *(x.cpu() for x in score_batch(policy, batch, temperature, micro_tokens)), strict=True)
    scored = iter([replace(each, logp=p[: len(each.tokens)], entropy=h[: len(each.tokens)]) for each, p, h in values])
    return [next(scored) if each.logp is None else each for each in trajectories]


def _sampled(trajectories: Sequence[Trajectory], device: torch.device) -> TokenBatch:
    """Build the batch of the trajectories as sampled, with advantages of 0."""

    def or_else(values: Sequence[Tensor | None], others: Sequence[Tensor]) -> list[Tensor]:
        return [other if value is None else value for value, other in zip(values, others, strict=True)]

    zeros = [torch.zeros(len(each.tokens)) for each in trajectories]
    logp, own = or_else([each.logp for each in trajectories], zeros), [each.own for each in trajectories]
    _check_finite(torch.cat(logp)[torch.cat(own)])
    sampler_logp = [each.sampler_logp for each in trajectories]
    rewards, groups = [each.score.reward for each in trajectories], group_numbers([each.group for each in trajectories])
    return padded_batch(
        [each.prompt for each in trajectories],
        [each.tokens for each in trajectories],
        device,
        own,
        old_logp=logp,
        entropy=or_else([each.entropy for each in trajectories], zeros),
        sampler_logp=None if all(x is None for x in sampler_logp) else or_else(sampler_logp, logp),
        groups=torch.tensor(groups, device=device),
        rewards=torch.tensor(rewards, dtype=_reward_dtype(rewards, groups), device=device),
        correct=torch.tensor([each.score.correct for each in trajectories], device=device),
    )


def _check_finite(logp: Tensor) -> None:
    if not logp.isfinite().all():
        raise NotFiniteError("the model's probabilities are not finite")


def _compared(trajectories: Sequence[Trajectory]) -> list[int]:
    """The rows of groups with both correct and incorrect responses, ordered by group."""
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(group_numbers([each.group for each in trajectories])):
        groups.setdefault(group, []).append(row)
    both = (rows for rows in groups.values() if len({trajectories[row].score.correct for row in rows}) == 2)
    return [row for rows in both for row in rows]


def _reward_dtype(rewards: Sequence[float], groups: Sequence[int]) -> torch.dtype:
    """float64 if float32 would round away differences between rewards that are large, or close within a group."""
    by_group: dict[int, list[float]] = {-1: [*rewards]}  # −1: all rewards together
    for group, reward in zip(groups, rewards, strict=True):
        by_group.setdefault(group, []).append(reward)
    spreads = (max(each) - min(each) for each in by_group.values())
    size, spread = max(map(abs, rewards)), min((each for each in spreads if each > NO_SPREAD), default=inf)
    coarse = size * torch.finfo(torch.float32).eps > COARSE * spread
    return torch.float64 if size > LARGE or coarse else torch.float32


def group_numbers(groups: Sequence[Hashable]) -> list[int]:
    """Return one integer per row: equal for rows of the same group, unique for a row without a group."""
    numbers: dict[Hashable, int] = {}
    return [
        numbers.setdefault(("alone", row) if group is None else ("group", group), len(numbers))
        for row, group in enumerate(groups)
    ]


def without_consolidated(
    samples: Sequence[Trajectory], phases: Sequence[Phase], batch: TokenBatch, rows: Rows = slice(None)
) -> tuple[list[Phase], TokenBatch]:
    """Drop consolidated rows from the phases and the batch for summaries: they were not sampled in this form.

    ``rows`` are the rows of the batch that the phases cover.
    """
    numbers = torch.arange(len(samples))[rows].tolist()
    sampled = [index for index, row in enumerate(numbers) if samples[row].role != CONSOLIDATED]
    if not sampled or len(sampled) == len(numbers):
        return list(phases), batch.rows(rows)
    return [phase.rows(sampled) for phase in phases], batch.rows([numbers[index] for index in sampled])


def _advantages(trajectories: Sequence[Trajectory], batch: TokenBatch, estimate: Estimate) -> Tensor:
    """Advantages (B,), or (B, T) if any advantage is per token: set by the trajectory, or estimated from rewards.

    An estimate that looks beyond groups is computed separately for each role, because reflections and attempts have
    different rewards.
    """
    rewards, groups = batch.rewards, batch.groups
    assert rewards is not None
    assert groups is not None
    rest: dict[str, list[int]] = {}  # rows without a preset advantage; each list is normalised together
    for row, each in enumerate(trajectories):
        if each.advantage is None:
            rest.setdefault("" if estimate.within_groups else each.role, []).append(row)
    if [len(rows) for rows in rest.values()] == [len(trajectories)]:
        with blamed("advantage", estimate.text):
            return estimate(rewards, groups, batch.mask)
    own = [0.0 if each.advantage is None else each.advantage for each in trajectories]
    preset = [torch.as_tensor(value, dtype=torch.float32) for value in own]
    with blamed("advantage", estimate.text):
        estimated = [estimate(rewards[rows], groups[rows], batch.mask[rows]) for rows in rest.values()]
    if any(value.dim() for value in preset) or any(value.dim() == 2 for value in estimated):
        preset = [value.expand(len(each.tokens)) for value, each in zip(preset, trajectories, strict=True)]
    values = send(pad_sequence(preset, batch_first=True) if preset[0].dim() else torch.stack(preset), rewards.device)
    for rows, of_rows in zip(rest.values(), estimated, strict=True):
        values[rows] = (of_rows if of_rows.dim() == values.dim() else of_rows[:, None]).to(values.dtype)
    return values


class Regulated(NamedTuple):
    """The input of the update: the selected ``rows`` of the batch, and their phases."""

    rows: Rows
    batch: TokenBatch  # only these rows
    phases: list[Phase]
    metrics: dict[str, float]  # ``reg/…``, and the number of dropped groups


def phases_of(
    regulator: Regulator,
    samples: Sequence[Trajectory],
    batch: TokenBatch,
    *,
    drop_equal_groups: bool = False,
    name: str = "",
) -> Regulated:
    """Run the regulator on the batch. ``drop_equal_groups`` first drops groups whose rewards are all equal.

    If no rows remain, the result has all rows with weight 0, so the update takes no optimizer step. ``name`` is the
    text of the setting ``regulator``; errors in the user's own code quote it.
    """
    spread, equal = groups_with_spread(samples) if drop_equal_groups else ([], 0)
    rows: Rows = spread if spread and equal else slice(None)
    part = batch if isinstance(rows, slice) else batch.rows(rows)
    if drop_equal_groups and not spread:
        phases = [Phase.of(batch, 0.0, 0.0)]
    else:
        with blamed("regulator", name):
            phases = regulator(part)
    dropped = {"reward/dropped_groups": float(equal)} if drop_equal_groups else {}
    summary = regulators.summary(*without_consolidated(samples, phases, batch, rows))
    return Regulated(rows, part, phases, {**dropped, **summary})


def groups_with_spread(samples: Sequence[Trajectory]) -> tuple[list[int], int]:
    """Return the rows outside groups with equal rewards, and the number of groups with equal rewards.

    Rows with a preset advantage stay, and so do rows that are alone in their group.
    """
    rewards: dict[Hashable, list[float]] = {}
    for sample in samples:
        if sample.group is not None and sample.advantage is None:
            rewards.setdefault(sample.group, []).append(sample.score.reward)
    equal = {group for group, members in rewards.items() if len(members) > 1 and min(members) == max(members)}
    rows = [row for row, sample in enumerate(samples) if sample.group not in equal or sample.advantage is not None]
    return rows, len(equal)
