"""From samples to tensors: ``stack`` builds the ``Rollouts`` that the model runs, ``token_batch`` the ``TokenBatch``.

``phases_of`` says which rows are updated, and with which phases.

The only place that builds a batch, for the trainer and for ``poise diagnose``. Shapes: B samples, T tokens (padded).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from poise import advantages
from poise._lib.device import send
from poise.algorithms.base import CONSOLIDATED, Sample
from poise.batch import Phase, Rows, TokenBatch
from poise.models.policy import Policy
from poise.models.scoring import score_all, score_min_p
from poise.regulators import Regulator
from poise.rollout.types import Rollouts
from poise.tasks import TaskError
from poise.tasks.base import NO_REWARD

MOST_FAILED = 0.05  # share of a step's attempts that may end without a verdict
LARGE = 1e3  # size of a reward from which float32 may round the differences of rewards away
ALL = slice(None)


def with_verdict(samples: Sequence[Sample], advantage: str = "group-zscore") -> tuple[list[Sample], dict[str, float]]:
    """The samples that have a verdict, and the number of the others as a metric. None are left if no reward applies.

    Where ``advantage`` compares within groups, a sample that has lost its whole group is left out too. A reward
    function that sometimes hangs must not end a run; one that often hangs would bias what the run learns.
    """
    failures = [sample for sample in samples if sample.score.failed not in (None, NO_REWARD)]
    if len(failures) > max(1, MOST_FAILED * len(samples)):
        first = failures[0]
        raise TaskError(
            f"{len(failures)} of {len(samples)} attempts got no verdict, more than {MOST_FAILED:.0%}; the first one: "
            f"{first.score.failed} (problem {first.problem.id})"
        )
    judged = [sample for sample in samples if sample.score.failed is None]
    if advantage not in advantages.WITHOUT_GROUPS:
        judged = _in_groups(samples, judged)
    return judged, {"reward/failed": float(len(failures))} if failures else {}


def _in_groups(before: Sequence[Sample], after: list[Sample]) -> list[Sample]:
    """What is left, without a sample whose whole group has gone: there is nothing to compare it with.

    A sample with an advantage of its own is compared with none.
    """
    compared = ([sample for sample in samples if sample.advantage is None] for samples in (before, after))
    had, has = (Counter(sample.group for sample in samples) for samples in compared)
    return [
        sample
        for sample in after
        if sample.group is None or sample.advantage is not None or has[sample.group] > 1 or had[sample.group] == 1
    ]


def stack(samples: Sequence[Sample], policy: Policy, temperature: float, micro_tokens: int | None = None) -> Rollouts:
    """Stack samples into padded (B, T) tensors on the policy's device; score those without log-probabilities."""
    device = policy.device

    def padded(rows: list[Tensor]) -> Tensor:
        return send(pad_sequence(rows, batch_first=True), device)

    def or_zeros(values: Tensor | None, sample: Sample) -> Tensor:
        return torch.zeros(len(sample.tokens)) if values is None else values

    sampler_logp = [s.sampler_logp if s.sampler_logp is not None else or_zeros(s.logp, s) for s in samples]
    rollouts = Rollouts(
        prompts=[sample.prompt for sample in samples],
        tokens=padded([sample.tokens for sample in samples]),
        mask=padded([sample.own for sample in samples]),
        logp=padded([or_zeros(sample.logp, sample) for sample in samples]),
        entropy=padded([or_zeros(sample.entropy, sample) for sample in samples]),
        finished=send(torch.tensor([sample.finished for sample in samples]), device),
        sampler_logp=padded(sampler_logp) if any(s.sampler_logp is not None for s in samples) else None,
        extents=[(len(sample.tokens), int(sample.own.sum())) for sample in samples],
    )
    unscored = [row for row, sample in enumerate(samples) if sample.logp is None]
    if unscored:
        rows = send(unscored, device)
        logp, entropy = score_all(policy, rollouts.rows(unscored), temperature, micro_tokens)
        rollouts.logp[rows], rollouts.entropy[rows] = logp, entropy
        if rollouts.sampler_logp is not None:  # what the sampler reported stays
            given = send(torch.tensor([samples[row].sampler_logp is not None for row in unscored]), device)
            rollouts.sampler_logp[rows] = torch.where(given[:, None], rollouts.sampler_logp[rows], logp)
    return rollouts


def token_batch(
    samples: Sequence[Sample],
    rollouts: Rollouts,
    policy: Policy,
    *,
    advantage: str = "group-zscore",
    temperature: float = 1.0,
    recompute: bool = False,
    reference: Callable[[Rollouts], Tensor] | None = None,
    hidden: bool = False,
    min_p: float | None = None,
    micro_tokens: int | None = None,
) -> TokenBatch:
    """The ``TokenBatch`` of these samples, which ``stack`` turned into ``rollouts``.

    ``recompute`` takes old log-probabilities from a forward pass of the policy instead of the sampler. ``reference``
    computes the log-probabilities of the KL term. ``hidden`` adds the head, and a
    function that computes the hidden states (n, T, d) of some rows by a forward pass, for regulators that need them.
    ``min_p`` adds the log-probabilities under the policy filtered by it (one more pass), for the surrogate lp-reg.
    """
    device = rollouts.mask.device
    values = [sample.score.reward for sample in samples]
    exact = torch.float64 if max(map(abs, values)) > LARGE else torch.float32
    rewards = torch.tensor(values, dtype=exact, device=device)
    groups = torch.tensor(group_numbers([sample.group for sample in samples]), device=device)
    sampler_logp = rollouts.sampler_logp  # if present, rollouts.logp already comes from the policy
    recompute = recompute and sampler_logp is None
    return TokenBatch(
        old_logp=score_all(policy, rollouts, temperature, micro_tokens)[0] if recompute else rollouts.logp,
        mask=rollouts.mask,
        advantages=_advantages(samples, rewards, groups, rollouts.mask, advantage).float(),
        groups=groups,
        rewards=rewards,
        correct=torch.tensor([sample.score.correct for sample in samples], device=device),
        ref_logp=reference(rollouts) if reference else None,
        sampler_logp=rollouts.logp if recompute else sampler_logp,
        entropy=rollouts.entropy,
        hidden=(lambda rows: policy.padded_hidden(rollouts.rows(rows))) if hidden else None,
        head=policy.head(temperature) if hidden else None,
        targets=rollouts.tokens,
        min_p_logp=None if min_p is None else score_min_p(policy, rollouts, temperature, min_p, micro_tokens),
    )


def group_numbers(groups: Sequence[Hashable]) -> list[int]:
    """An integer per row, equal for rows of the same group; a row without a group gets a number of its own."""
    numbers: dict[Hashable, int] = {}
    return [
        numbers.setdefault(("alone", row) if group is None else ("group", group), len(numbers))
        for row, group in enumerate(groups)
    ]


def without_consolidated(
    samples: Sequence[Sample], phases: Sequence[Phase], batch: TokenBatch, rows: Rows = slice(None)
) -> tuple[list[Phase], TokenBatch]:
    """The phases and the batch for summaries of what was sampled. ``rows`` are those of the phases."""
    numbers = torch.arange(len(samples))[rows].tolist()
    sampled = [place for place, row in enumerate(numbers) if samples[row].role != CONSOLIDATED]
    if not sampled or len(sampled) == len(numbers):
        return list(phases), batch.rows(rows)
    return [phase.rows(sampled) for phase in phases], batch.rows([numbers[place] for place in sampled])


def _advantages(samples: Sequence[Sample], rewards: Tensor, groups: Tensor, mask: Tensor, kind: str) -> Tensor:
    """(B,) advantages: a sample's own one, or else normalised within its group.

    REINFORCE++ normalises over the rows of one role together, since others play another game.
    """
    preset = [sample.advantage for sample in samples]
    rest: dict[str, list[int]] = {}  # rows to normalise together
    for row, sample in enumerate(samples):
        if sample.advantage is None:
            rest.setdefault(sample.role if kind.startswith("reinforce-pp") else "", []).append(row)
    if [len(rows) for rows in rest.values()] == [len(preset)]:
        return advantages.TABLE[kind](rewards, groups, mask)
    values = torch.tensor([0.0 if value is None else value for value in preset], device=rewards.device)
    for rows in rest.values():
        values[rows] = advantages.TABLE[kind](rewards[rows], groups[rows], mask[rows]).to(values.dtype)
    return values


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
