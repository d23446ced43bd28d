"""Choosing a learning rate for each arm: the same rates and seeds for all, none of which the comparison uses again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from poise.comparison.arms import PlannedArm, Variant
from poise.comparison.plan import Plan
from poise.comparison.results import ACCURACY, RunResult

Results = Callable[[Path], RunResult | None]  # the result of the run in a folder; None while it has none


def scores(plan: Plan, arm: PlannedArm, variant: Variant, results: Results) -> list[tuple[float, bool]] | None:
    """Held-out accuracy by tuning seed, and whether that run diverged; None while a run has no result."""
    found = [results(plan.run(arm, variant, seed).folder) for seed in plan.tuning_seeds]
    if any(result is None or ACCURACY not in result.scores for result in found):
        return None
    return [(result.scores[ACCURACY], result.state == "diverged") for result in found if result is not None]


def choose(plan: Plan, arm: PlannedArm, results: Results) -> Variant | None:
    """The variant of an arm that is compared; None until all its tuning runs have results.

    It has the highest mean accuracy among those whose runs diverged least often; of equals, the lower rate.
    """
    if len(arm.variants) == 1:
        return arm.variants[0]
    ranked = []
    for variant in arm.variants:
        found = scores(plan, arm, variant, results)
        if found is None:
            return None
        ranked.append((sum(diverged for _, diverged in found), -fmean(score for score, _ in found), variant.rate))
    best = min(ranked)
    return arm.variants[ranked.index(best)]


def report(plan: Plan, results: Results) -> list[dict[str, Any]]:
    """For ``comparison.json``: what was chosen for each arm, and all scores."""
    told = []
    for arm in plan.arms:
        if len(arm.variants) == 1:
            continue
        chosen = choose(plan, arm, results)
        rates = []
        for variant in arm.variants:
            found = scores(plan, arm, variant, results) or []
            rates.append(
                {
                    "rate": variant.rate,
                    "scores": [score for score, _ in found],
                    "mean": fmean(score for score, _ in found) if found else None,
                    "diverged": sum(diverged for _, diverged in found),
                }
            )
        told.append({"arm": arm.name, "chosen": chosen.rate if chosen else None, "rates": rates})
    return told
