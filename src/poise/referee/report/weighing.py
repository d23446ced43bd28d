"""Analyses recorded tokens without their model: a run's curves, and each method's effect on the run's batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from poise.batch import Phase, TokenBatch
from poise.diagnostics import Intervals
from poise.referee.report.reader import Step
from poise.regulators import Regulator, summary

if TYPE_CHECKING:
    from poise.referee.report.token_files import TokenFiles

RECORDED = "recorded"  # the weights that the trainer used


def token_batch(step: Step) -> tuple[TokenBatch, list[Phase]] | None:
    """The batch of a recorded step, and its phases; None if no token has both a log-probability and an advantage.

    Tokens without one of these are outside the mask. A field of the batch is None if its value is unknown for some
    tokens or responses.
    """
    logp, advantage = (step.arrays.get(name) for name in ("logp", "advantage"))
    if logp is None or advantage is None or not (usable := logp.isfinite() & advantage.isfinite()).any():
        return None
    lengths = step.arrays["start"].diff().tolist()

    def padded(values: Tensor) -> Tensor:
        return pad_sequence(list(values.split(lengths)), batch_first=True)

    fields: dict[str, Any] = {}
    for name in ("entropy", "sampler_logp"):
        values = step.arrays.get(name)
        if values is not None and values[usable].isfinite().all():
            fields[name] = padded(values)
    for ours, name, dtype in (("rewards", "reward", torch.float32), ("correct", "correct", torch.bool)):
        if None not in (known := [record[name] for record in step.records]):
            fields[ours] = torch.tensor(known, dtype=dtype)
    if None not in (groups := [record.get("group") for record in step.records]):
        numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
        fields["groups"] = torch.tensor([numbers[group] for group in groups])
    batch = TokenBatch(padded(logp), padded(usable), padded(advantage), **fields)
    weights = {name: values for name, values in step.arrays.items() if name.startswith("weight/")}
    phases = [Phase.of(batch, padded(w.nan_to_num(0.0)), name=name.partition("/")[2]) for name, w in weights.items()]
    return batch, phases or [Phase.of(batch)]


def step_metrics(step: Step) -> dict[str, float]:
    """The metrics of a step that can be computed from the recorded data, under the names that poise logs."""
    rewards = [record["reward"] for record in step.records if record["reward"] is not None]
    verdicts = [record["correct"] for record in step.records if record["correct"] is not None]
    entropy = step.arrays.get("entropy", torch.empty(0)).nanmean().item()
    means = {
        "reward/mean": fmean(rewards) if rewards else nan,
        "reward/accuracy": fmean(verdicts) if verdicts else nan,
        "rollout/entropy": entropy,
        "rollout/length": len(step.arrays["id"]) / len(step.records),
    }
    found = token_batch(step)
    regulated = {} if found is None else summary(found[1], found[0])
    return {name: value for name, value in means.items() if value == value} | regulated


class Weighed(NamedTuple):
    """A recording's tokens by interval of p. Shares add up to 1; ``pull`` has the shares of Σ w·|A|·(1 − p)."""

    steps: int
    responses: int
    tokens: int
    token_share: list[float]
    pull: dict[str, list[float] | None]  # by method; None if all its weights or all advantages are 0
    metrics: dict[str, dict[str, float]]  # by method: the means of its ``reg/…`` metrics over the steps
    missing: dict[str, list[str]]  # the missing fields of each method that cannot be applied


def weigh(recording: TokenFiles, methods: Mapping[str, Regulator], intervals: Intervals) -> Weighed:
    """Apply the methods to each recorded step. Raises ValueError if no token can be weighted."""
    tokens, responses, steps = torch.zeros(len(intervals)), 0, 0
    pulls: dict[str, Tensor] = {}
    metrics: dict[str, list[dict[str, float]]] = {}
    missing: dict[str, list[str]] = {}
    for number in recording.steps():
        step = recording.read(number)
        if (found := token_batch(step)) is None:
            continue
        batch, phases = found
        inside = intervals.masks(batch)
        tokens, responses, steps = tokens + inside.sum((1, 2)), responses + len(step.records), steps + 1
        recorded = {RECORDED: phases} if any(name.startswith("weight/") for name in step.arrays) else {}
        for name, method in methods.items():
            if lacking := sorted(field for field in method.needs if getattr(batch, field) is None):
                missing[name] = lacking
            else:
                recorded[name] = method(batch)
        for name, given in recorded.items():
            pull = sum(phase.policy for phase in given) * batch.token_advantages.abs() * (1 - batch.prob)
            pulls[name] = pulls.get(name, torch.zeros(len(intervals))) + (pull * inside).sum((1, 2))
            metrics.setdefault(name, []).append(summary(given, batch))
    if not steps:
        raise ValueError(f"{recording.path}: no token has both a log-probability (logp) and an advantage")
    return Weighed(
        steps, responses, int(tokens.sum()), (tokens / tokens.sum()).tolist(),
        {name: (pull / pull.sum()).tolist() if pull.sum() > 0 else None for name, pull in pulls.items()},
        {name: _means(each) for name, each in metrics.items()}, missing,
    )  # fmt: skip


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: fmean(row[name] for row in rows if name in row) for name in names}


def interval_table(weighed: Weighed, names: Sequence[str]) -> list[dict[str, Any]]:
    """One row per interval of p: its share of the tokens and of each method's ``pull``."""
    pulls = {name: pull for name, pull in weighed.pull.items() if pull is not None}
    return [
        {"p": name, "tokens": percent(share), **{method: percent(pull[i]) for method, pull in pulls.items()}}
        for i, (name, share) in enumerate(zip(names, weighed.token_share, strict=True))
    ]


def method_table(weighed: Weighed) -> list[dict[str, Any]]:
    """One row per phase of each method, with its ``reg/PHASE/…`` metrics."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for method, metrics in weighed.metrics.items():
        for name, value in metrics.items():
            phase, _, metric = name.removeprefix("reg/").rpartition("/")
            if phase:
                rows.setdefault((method, phase), {"method": method, "phase": phase})[metric] = round(value, 4)
    return list(rows.values())


def percent(share: float, error: float | None = None) -> str:
    """Format a share in percent, with its error if it is known."""
    return f"{100 * share:.3g} %" if error is None else f"{100 * share:.3g} ± {100 * error:.3g} %"
