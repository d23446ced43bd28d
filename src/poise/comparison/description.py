"""A comparison in words before it runs: what it does, how long it takes, what it can find. And the rates it chose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from poise.comparison import verdict
from poise.comparison.arms import shown_rate
from poise.comparison.plan import Plan
from poise.comparison.statistics import detectable
from poise.config.groups import HELD_OUT
from poise.runs.console import duration

SPREAD = 0.05  # of differences over seeds, where none is measured: five points are usual


def heading(plan: Plan) -> list[str]:
    """The arms, the seeds and the held-out problems."""
    evaluation = plan.baseline.variants[0].config.evaluation
    lines = [f"{len(plan.arms)} arms × {len(plan.seeds)} seeds ({_span(plan.seeds)}) in {plan.folder}:"]
    lines += [f"  {arm.name}" + (" (baseline)" if arm is plan.baseline else "") for arm in plan.arms]
    if runs := plan.tuning_runs():
        rates = ", ".join(shown_rate(variant.rate) for variant in runs[0].arm.variants)
        lines.append(
            f"each arm's learning rate is chosen among {rates} with seeds {_span(plan.tuning_seeds)} on other held-out "
            f"problems: {len(runs)} runs"
        )
    few = "" if evaluation.problems >= HELD_OUT else f", fewer than the {HELD_OUT:,} that a fair comparison needs"
    lines.append(f"{evaluation.problems:,} held-out problems × {evaluation.samples} samples, and greedily{few}")
    return lines


def forecast(plan: Plan, seconds: float, jobs: int, done: int) -> str:
    """How long the runs that are left take, if each takes ``seconds``."""
    left = plan.size - done
    total = seconds * max(left / jobs, min(left, 1))
    begun = f" ({done} done)" if done else ""
    return (
        f"{plan.size} runs{begun}, {jobs} side by side: about {duration(total)} ({duration(seconds)} for a run alone)"
    )


def power(plan: Plan) -> str:
    """The smallest difference that the seeds can find, at a usual spread."""
    seeds, comparisons = len(plan.seeds), len(plan.arms) - 1
    return verdict.power(seeds, comparisons, detectable(seeds, SPREAD, comparisons), SPREAD)


def tuned(report: Sequence[dict[str, Any]]) -> list[str]:
    """What was chosen for each arm."""
    lines = []
    for arm in report:
        if arm["chosen"] is None:
            lines.append(f"{arm['arm']}: no learning rate is chosen yet")
            continue
        scores = ", ".join(f"{shown_rate(rate['rate'])}: {verdict.points(rate['mean'])}" for rate in arm["rates"])
        edge = len(arm["rates"]) > 2 and arm["chosen"] in (arm["rates"][0]["rate"], arm["rates"][-1]["rate"])
        hint = "; it is at the end of the rates, so another one may be better" if edge else ""
        lines.append(f"{arm['arm']}: learning rate {shown_rate(arm['chosen'])} (points by rate: {scores}){hint}")
    return lines


def _span(seeds: Sequence[int]) -> str:
    return f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
