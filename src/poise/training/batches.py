"""From trajectories to the ``TokenBatch``: ``make_batch``, for the trainer and for ``poise diagnose``.

``phases_of`` says which rows are updated, and with which phases. Shapes: B trajectories, T tokens (padded).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from poise import advantages
from poise._lib.device import send
from poise.algorithms.base import CONSOLIDATED, Trajectory
from poise.batch import Phase, Rows, TokenBatch
from poise.models.policy import Policy
from poise.models.scoring import score_all, score_min_p
from poise.regulators import Regulator
from poise.rollout.types import padded_batch
from poise.tasks import TaskError
from poise.tasks.base import NO_REWARD
from poise.training.frozen import Frozen
from poise.training.update import NotFiniteError

MOST_FAILED = 0.05  # share of a step's attempts that may end without a verdict
LARGE = 1e3  # size of a reward from which float32 may round the differences of rewards away
ALL = slice(None)


def with_verdict(
    samples: Sequence[Trajectory], advantage: str = "group-zscore"
) -> tuple[list[Trajectory], dict[str, float]]:
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


def _in_groups(before: Sequence[Trajectory], after: list[Trajectory]) -> list[Trajectory]:
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


def make_batch(
    trajectories: Sequence[Trajectory],
    policy: Policy,
    *,
    advantage: str = "group-zscore",
    temperature: float = 1.0,
    recompute: bool = False,
    reference: Frozen | None = None,
    hidden: bool = False,
    min_p: float | None = None,
    micro_tokens: int | None = None,
) -> TokenBatch:
    """The ``TokenBatch`` of these trajectories, on the policy's device.

    ``recompute`` takes old log-probabilities from a forward pass of the policy instead of the sampler. ``reference`` is
    the model of the KL term. ``hidden`` adds the head, and a function that computes the hidden states (n, T, d) of some
    rows by a forward pass, for regulators that need them. ``min_p`` adds the log-probabilities under the policy
    filtered by it (one more pass), for the surrogate lp-reg.
    """
    sampled = _sampled(_scored(trajectories, policy, temperature, micro_tokens), policy.device)
    old_logp, sampler_logp = sampled.old_logp, sampled.sampler_logp
    if recompute and sampler_logp is None:  # else the old ones already come from the policy
        old_logp, sampler_logp = score_all(policy, sampled, temperature, micro_tokens)[0], old_logp
    return replace(
        sampled,
        old_logp=old_logp,
        sampler_logp=sampler_logp,
        advantages=_advantages(trajectories, sampled, advantage).float(),
        ref_logp=reference.logp(sampled, temperature, micro_tokens) if reference else None,
        hidden=(lambda rows: policy.padded_hidden(sampled.rows(rows))) if hidden else None,
        head=policy.head(temperature) if hidden else None,
        min_p_logp=None if min_p is None else score_min_p(policy, sampled, temperature, min_p, micro_tokens),
    )


def _scored(
    trajectories: Sequence[Trajectory], policy: Policy, temperature: float, micro_tokens: int | None
) -> list[Trajectory]:
    """The trajectories; those that came without log-probabilities and entropies have the policy's."""
    without = [each for each in trajectories if each.logp is None]
    if not without:
        return list(trajectories)
    prompts, tokens, own = zip(*((each.prompt, each.tokens, each.own) for each in without), strict=True)
    batch = padded_batch(prompts, tokens, policy.device, own)
    values = zip(without, *(x.cpu() for x in score_all(policy, batch, temperature, micro_tokens)), strict=True)
    scored = iter([replace(each, logp=p[: len(each.tokens)], entropy=h[: len(each.tokens)]) for each, p, h in values])
    return [next(scored) if each.logp is None else each for each in trajectories]


def _sampled(trajectories: Sequence[Trajectory], device: torch.device) -> TokenBatch:
    """What was sampled, with advantages of 0."""

    def known(values: Sequence[Tensor | None], other: Sequence[Tensor]) -> list[Tensor]:
        return [y if x is None else x for x, y in zip(values, other, strict=True)]

    nothing = [torch.zeros(len(each.tokens)) for each in trajectories]
    logp, own = known([each.logp for each in trajectories], nothing), [each.own for each in trajectories]
    if not torch.cat(logp)[torch.cat(own)].isfinite().all():
        raise NotFiniteError("the model's probabilities are not finite")
    reported = [each.sampler_logp for each in trajectories]
    rewards = [each.score.reward for each in trajectories]
    exact = torch.float64 if max(map(abs, rewards)) > LARGE else torch.float32
    return padded_batch(
        [each.prompt for each in trajectories], [each.tokens for each in trajectories], device, own, old_logp=logp,
        entropy=known([each.entropy for each in trajectories], nothing),
        sampler_logp=None if all(x is None for x in reported) else known(reported, logp),
        groups=torch.tensor(group_numbers([each.group for each in trajectories]), device=device),
        rewards=torch.tensor(rewards, dtype=exact, device=device),
        correct=torch.tensor([each.score.correct for each in trajectories], device=device),
    )  # fmt: skip


def group_numbers(groups: Sequence[Hashable]) -> list[int]:
    """An integer per row, equal for rows of the same group; a row without a group gets a number of its own."""
    numbers: dict[Hashable, int] = {}
    return [
        numbers.setdefault(("alone", row) if group is None else ("group", group), len(numbers))
        for row, group in enumerate(groups)
    ]


def without_consolidated(
    samples: Sequence[Trajectory], phases: Sequence[Phase], batch: TokenBatch, rows: Rows = slice(None)
) -> tuple[list[Phase], TokenBatch]:
    """The phases and the batch for summaries of what was sampled. ``rows`` are those of the phases."""
    numbers = torch.arange(len(samples))[rows].tolist()
    sampled = [place for place, row in enumerate(numbers) if samples[row].role != CONSOLIDATED]
    if not sampled or len(sampled) == len(numbers):
        return list(phases), batch.rows(rows)
    return [phase.rows(sampled) for phase in phases], batch.rows([numbers[place] for place in sampled])


def _advantages(trajectories: Sequence[Trajectory], batch: TokenBatch, kind: str) -> Tensor:
    """(B,) advantages: a trajectory's own one, or else normalised within its group; (B, T) if any is per token.

    REINFORCE++ normalises over the rows of one role together, since others play another game.
    """
    rewards, groups, estimate = batch.rewards, batch.groups, advantages.TABLE[kind]
    assert rewards is not None
    assert groups is not None
    rest: dict[str, list[int]] = {}  # rows to normalise together
    for row, each in enumerate(trajectories):
        if each.advantage is None:
            rest.setdefault(each.role if kind.startswith("reinforce-pp") else "", []).append(row)
    if [len(rows) for rows in rest.values()] == [len(trajectories)]:
        return estimate(rewards, groups, batch.mask)
    own = [0.0 if each.advantage is None else each.advantage for each in trajectories]
    preset = [torch.as_tensor(value, dtype=torch.float32) for value in own]
    if any(value.dim() for value in preset):
        preset = [value.expand(len(each.tokens)) for value, each in zip(preset, trajectories, strict=True)]
    values = send(pad_sequence(preset, batch_first=True) if preset[0].dim() else torch.stack(preset), rewards.device)
    for rows in rest.values():
        estimated = estimate(rewards[rows], groups[rows], batch.mask[rows]).to(values.dtype)
        values[rows] = estimated[:, None] if values.dim() == 2 else estimated
    return values


def phases_of(
    regulator: Regulator, samples: Sequence[Trajectory], batch: TokenBatch, *, drop_equal_groups: bool = False
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


def groups_with_spread(samples: Sequence[Trajectory]) -> tuple[list[int], int]:
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
