"""A comparison in words before it runs: what it does, what it costs, what it can find."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite
from statistics import fmean, stdev
from typing import Any

from poise.comparison.arms import shown_rate
from poise.comparison.forecast import Forecast, update_lengths
from poise.comparison.plan import Plan
from poise.comparison.results import result_of
from poise.comparison.statistics import LEVEL, POWER, detectable, seeds_needed
from poise.comparison.verdict import listed
from poise.config.groups import HELD_OUT
from poise.runs.console import duration

# Settings that do not change what a response costs, or whose cost is counted.
AS_DEAR = ("regulator", "objective.", "optim.", "steps", "prompts", "group", "budget")
SPREAD = 0.05  # of differences over seeds, where none is measured: five points are usual


def heading(plan: Plan) -> list[str]:
    """The arms, the seeds and the held-out problems."""
    evaluation = plan.baseline.variants[0].config.evaluation
    lines = [f"{len(plan.arms)} arms × {len(plan.seeds)} seeds ({_span(plan.seeds)}) in {plan.folder}:"]
    lines += [f"  {arm.name}" + (" (baseline)" if arm is plan.baseline else "") for arm in plan.arms]
    tuned = [arm for arm in plan.arms if len(arm.variants) > 1]
    if tuned:
        rates = ", ".join(shown_rate(variant.rate) for variant in tuned[0].variants)
        runs = plan.tuning_runs()
        done = sum(result_of(run.folder) is not None for run in runs)
        count = f"{len(runs)} runs, {done} of them done" if done else f"{len(runs)} runs more"
        lines.append(
            f"each arm's learning rate is chosen among {rates} with seed{'s' * (len(plan.tuning_seeds) > 1)} "
            f"{_span(plan.tuning_seeds)} on other held-out problems: {count}"
        )
    few = "" if evaluation.problems >= HELD_OUT else f", fewer than the {HELD_OUT:,} that a fair comparison needs"
    lines.append(f"{evaluation.problems:,} held-out problems × {evaluation.samples} samples, and greedily{few}")
    return lines


def cost(plan: Plan, forecast: Forecast, jobs: int, done: int, spent: float) -> list[str]:
    """Runs, tokens and time, and how many seeds fit into the budget.

    ``done`` runs of the plan have results; ``spent`` tokens were sampled, but for those of runs that go on.
    """
    seconds, tokens = forecast.seconds or 0.0, forecast.tokens or 0.0
    left = plan.size - done
    time = left * seconds / jobs if left >= jobs else seconds * (left > 0)
    begun = f" ({done} done)" if done else ""
    lines = [
        f"{plan.size} runs{begun}, {jobs} side by side: about {duration(time)}, {left * tokens:,.0f} tokens sampled "
        f"for training (a run, on average: {duration(seconds)} if it has the device for itself, {tokens:,.0f} tokens)"
    ]
    lines += _measured(plan)
    if budget := plan.limits.budget():
        lines.append(f"the budget {budget} {_room(plan, seconds, tokens, jobs, done, spent)}")
    return lines


def _measured(plan: Plan) -> list[str]:
    """What the forecast takes from the baseline, where other arms differ from it."""
    by_length: dict[float, list[str]] = {}
    for name, length in update_lengths(plan).items():
        by_length.setdefault(length, []).append(name)
    parts = [
        f"updates of {listed(names)} are taken to last {length:g} times as long, by their phases"
        for length, names in by_length.items()
        if length != 1
    ]
    if any(not key.startswith(AS_DEAR) for arm in plan.arms for key in arm.settings):
        parts.append("others may sample more or less")
    return [f"measured for {plan.baseline.name}; {'; '.join(parts)}"] if parts else []


def _room(plan: Plan, seconds: float, tokens: float, jobs: int, done: int, spent: float) -> str:
    """How much of the plan fits into its budget."""
    limits = plan.limits
    by_time = limits.hours * 3600 * jobs / seconds if seconds else inf
    by_tokens = (limits.tokens - spent) / tokens if tokens else inf
    fits = max(0.0, min(by_time, by_tokens))
    if fits >= plan.size - done:
        return "has room for all of them"
    tuning = len(plan.tuning_runs())
    seeds = max(0, int((fits + done - tuning) // len(plan.arms)))
    few = "" if seeds >= 2 else ": too few to compare anything; raise it, or take fewer arms or steps"
    beside = f" beside the {done} that are done" if done else ""
    return f"has room for about {int(fits)} runs{beside}, {seeds} of {len(plan.seeds)} seeds{few}"


def power(plan: Plan) -> list[str]:
    """The smallest difference that the seeds can find."""
    comparisons, seeds = len(plan.arms) - 1, len(plan.seeds)
    needed = seeds_needed(comparisons)
    unit = detectable(seeds, 1.0, comparisons)
    if not isfinite(unit):
        return [
            f"{seeds} seeds cannot make any difference significant: {comparisons} comparison{'s' * (comparisons > 1)} "
            f"at the level {1 - LEVEL:.2g} with Holm's correction need{'s' * (comparisons == 1)} {needed}"
        ]
    return [
        f"smallest difference that {seeds} seeds find with a chance of {POWER:.0%}: {unit:.2f} times the spread of "
        f"differences over seeds, {100 * unit * SPREAD:.1f} points if that is {100 * SPREAD:.0f}"
    ]


def tuned(report: Sequence[dict[str, Any]]) -> list[str]:
    """What was chosen for each arm, and why."""
    lines = []
    for arm in report:
        if arm["chosen"] is None:
            lines.append(f"{arm['arm']}: no learning rate is chosen yet")
            continue
        scores = ", ".join(f"{shown_rate(rate['rate'])}: {100 * rate['mean']:.1f}" for rate in arm["rates"])
        edge = arm["chosen"] in (arm["rates"][0]["rate"], arm["rates"][-1]["rate"]) and len(arm["rates"]) > 2
        equal = len({rate["mean"] for rate in arm["rates"]}) == 1
        hint = "; it is at the end of the rates, so another one may be better" if edge else ""
        if close := [shown_rate(rate["rate"]) for rate in arm["rates"] if _close(arm, rate)]:
            hint += f"; {listed(close)} may be as good, within a standard error: more tuning seeds would tell"
        hint = "; all rates did equally well, so this says nothing" if equal else hint
        lines.append(f"{arm['arm']}: learning rate {shown_rate(arm['chosen'])} (points by rate: {scores}){hint}")
    return lines


def _close(arm: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a rate that was not chosen is behind by less than the standard error of that difference."""
    chosen = next(rate for rate in arm["rates"] if rate["rate"] == arm["chosen"])
    if other is chosen or len(chosen["scores"]) < 2 or other["diverged"] > chosen["diverged"]:
        return False
    ahead = [own - its for own, its in zip(chosen["scores"], other["scores"], strict=True)]
    return bool(fmean(ahead) <= stdev(ahead) / len(ahead) ** 0.5)


def _span(seeds: Sequence[int]) -> str:
    return f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
