"""From arms with their runs to the results of a comparison: the contents of ``comparison.json``.

Scores are fractions, such as 0.575; only words and pictures show points. Secondary scores have intervals but no
corrected p: the test is that of the main score.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from math import inf, isfinite
from statistics import fmean, median
from typing import Any

import numpy as np

from poise.comparison import curves
from poise.comparison.curves import By, Reached, compare_reach
from poise.comparison.results import ACCURACY, Arm, Cost, Point, RunResult
from poise.comparison.sign_flip import holm
from poise.comparison.statistics import (
    LEVEL,
    POWER,
    Difference,
    detectable,
    difference,
    sources,
    student_factor,
    student_interval,
)
from poise.comparison.verdict import verdict

Document = dict[str, Any]


def analyse(
    arms: Sequence[Arm], baseline: str, seeds: Iterable[int] = (), *, score: str = ACCURACY, level: float = LEVEL
) -> Document:
    """Compare all arms with the one named ``baseline``. ``seeds`` are those planned: runs may be missing so far."""
    base = next((arm for arm in arms if arm.name == baseline), None)
    if base is None:
        raise ValueError(f"the baseline {baseline!r} is none of the arms: {', '.join(arm.name for arm in arms)}")
    planned = sorted({*seeds, *(seed for arm in arms for seed in arm.runs)})
    against = {
        arm.name: difference(arm.results(score), base.results(score), planned, level) for arm in arms if arm is not base
    }
    adjusted = dict(zip(against, holm([found.p for found in against.values()]), strict=True))
    rows = [_arm(arm, base, planned, score, level) for arm in arms]
    for row in rows:
        row["difference"] = None
        if found := against.get(row["name"]):
            arm = next(arm for arm in arms if arm.name == row["name"])
            row["difference"] = {
                **_difference(found),
                **_power([found], len(against), level),
                "p_adjusted": adjusted[row["name"]],
                "sources": _sources(arm, base, found.seeds, level),
            }
    document: Document = {
        "baseline": baseline,
        "score": score,
        "level": level,
        "power": POWER,
        "seeds": planned,
        "problems": max((len(run.per_problem) for arm in arms for run in arm.runs.values()), default=0),
        **_power(list(against.values()), len(against), level),
        "arms": rows,
    }
    document["verdict"] = verdict(document)
    return document


def _arm(arm: Arm, base: Arm, planned: Sequence[int], score: str, level: float) -> Document:
    results = arm.results(score)
    done = {seed: arm.runs[seed] for seed in results}
    names = dict.fromkeys(name for run in done.values() for name in run.scores)
    secondary = {name: (arm.results(name), base.results(name)) for name in names if name != score}
    return {
        "name": arm.name,
        "settings": dict(arm.settings),
        "seeds": list(results),
        "missing": [seed for seed in planned if seed not in results],
        "diverged": {str(seed): run.why for seed, run in done.items() if run.state == "diverged"},
        "counted_as_zero": [seed for seed, run in done.items() if run.counts_as_zero],
        "accuracy": fmean(results.values()) if results else None,
        "interval": _ends(student_interval(list(results.values()), level)),
        "results": {str(seed): value for seed, value in results.items()},
        "before": _mean(run.curve[0].scores.get(score) for run in done.values()),
        "scores": {name: _summary(own, other, arm is base, level) for name, (own, other) in secondary.items()},
        "area": _summary(*_areas(arm, base, score), arm is base, level),
        "reach": None if arm is base else {by: asdict(_reach(arm, base, score, by)) for by in ("steps", "tokens")},
        "fit": _fits(done.values(), score),
        "stability": _stability(done.values()),
        "cost": _cost(done.values()),
        "curve": _band(list(done.values()), score, level),
    }


def _summary(own: Mapping[int, float], other: Mapping[int, float], alone: bool, level: float) -> Document:
    """A secondary score: its mean, and unless the arm is the baseline its difference."""
    found = None if alone else difference(own, other, level=level)
    return {
        "mean": _mean(own.values()),
        "interval": _ends(student_interval(list(own.values()), level)),
        "difference": found and {"mean": found.mean, "interval": _ends(found.interval), "seeds": len(found.seeds)},
    }


def _difference(found: Difference) -> Document:
    return {
        "mean": found.mean,
        "interval": _ends(found.interval),
        "method": "sign-flip" if found.exact else "student" if found.student else None,
        "student": _ends(found.student),
        "largest": found.largest,
        "p": found.p,
        "seeds": list(found.seeds),
        "incomplete": list(found.incomplete),
        "values": list(found.values),
    }


def _power(found: Sequence[Difference], comparisons: int, level: float) -> Document:
    """The smallest detectable difference with the most seeds that an arm has, and the median spread of such arms.

    ``detectable`` is None if so many seeds cannot make any difference significant, or if there are fewer than two.
    """
    most = max((len(each.seeds) for each in found), default=0)
    spreads = [each.spread for each in found if len(each.seeds) == most and each.spread is not None]
    if not spreads:
        return {"detectable": None, "spread": None}
    effect = detectable(most, median(spreads), comparisons, level)
    return {"detectable": effect if isfinite(effect) else None, "spread": median(spreads)}


def _sources(arm: Arm, base: Arm, seeds: Sequence[int], level: float) -> Document | None:
    """Where the spread comes from, over the seeds whose runs both have results by problem.

    ``interval`` is the difference on other problems too, by Student's t.
    """
    pairs = [(arm.runs[seed].per_problem, base.runs[seed].per_problem) for seed in seeds]
    rows = [np.subtract(own, other) for own, other in pairs if own and len(own) == len(other)]
    rows = [row for row in rows if len(row) == len(rows[0])]
    found = sources(np.stack(rows)) if rows else None
    if found is None:
        return None
    mean, margin = float(np.mean(rows)), student_factor(len(rows), level) * found.error
    return asdict(found) | {"seeds_used": len(rows), "interval": [mean - margin, mean + margin]}


def _areas(arm: Arm, base: Arm, score: str) -> tuple[dict[int, float], dict[int, float]]:
    """The mean score over training, up to the last step of the longest run that both could compare."""
    done = [run for each in (arm, base) for run in each.runs.values() if run.state != "unfinished"]
    end = max((run.steps for run in done), default=0)

    def areas(each: Arm) -> dict[int, float]:
        runs = ((seed, each.runs[seed]) for seed in each.results(score))
        found = {seed: curves.area(curves.points(run, score=score), end) for seed, run in runs}
        return {seed: value for seed, value in found.items() if value is not None}

    return areas(arm), areas(base)


def _reach(arm: Arm, base: Arm, score: str, by: By) -> curves.Reach:
    """The cost to reach the final score that the baseline has with the same seed."""
    goals = base.results(score)

    def reached(each: Arm) -> dict[int, Reached]:
        found = {}
        for seed in each.results(score).keys() & goals.keys():
            run = each.runs[seed]
            points = curves.points(run, by, score)
            observed = inf if run.state == "diverged" else points[-1][0]
            found[seed] = Reached(curves.reach(points, goals[seed]), observed)
        return found

    return compare_reach(reached(arm), reached(base))


def _fits(runs: Iterable[RunResult], score: str) -> Document:
    """Asymptote and rate per step, as means over the runs whose curve could be fitted; why the others could not."""
    fits = [curves.fit(curves.points(run, score=score)) for run in runs]
    return {
        "asymptote": _mean(fit.asymptote for fit in fits),
        "rate": _mean(fit.rate for fit in fits),
        "fitted": sum(not fit.failure for fit in fits),
        "failures": dict(Counter(fit.failure for fit in fits if fit.failure)),
    }


def _stability(runs: Iterable[RunResult]) -> Document:
    found = [curves.stability(run) for run in runs]
    return {
        "collapsed": sum(each.collapsed for each in found),
        "spikes": sum(each.spikes for each in found),
        "entropy_start": _mean(each.entropy_start for each in found),
        "entropy_end": _mean(each.entropy_end for each in found),
    }


def _cost(runs: Collection[RunResult]) -> Document:
    """Means over the runs; None where one of them does not know."""
    columns = {each.name: [getattr(run.cost, each.name) for run in runs] for each in fields(Cost)}
    return {name: None if None in values else _mean(values) for name, values in columns.items()}


def _band(runs: Sequence[RunResult], score: str, level: float) -> Document:
    """The mean curve over seeds with its interval at every step that one of them evaluated, and the mean cost there.

    A run that ended early keeps its last score and cost.
    """
    measured = [[point for point in run.curve if score in point.scores] for run in runs]
    measured = [points for points in measured if points]
    steps = sorted({point.step for points in measured for point in points})

    def at(step: int, value: Callable[[Point], float]) -> list[float]:
        return [curves.score_at([(point.step, value(point)) for point in points], step) for points in measured]

    scores = [at(step, lambda point: point.scores[score]) for step in steps]
    ends = [_ends(student_interval(values, level)) for values in scores]
    return {
        "steps": steps,
        "tokens": [fmean(at(step, lambda point: point.cost.tokens)) for step in steps],
        "seconds": [fmean(at(step, lambda point: point.cost.seconds)) for step in steps],
        "mean": [fmean(values) for values in scores],
        "low": [pair[0] if pair else None for pair in ends],
        "high": [pair[1] if pair else None for pair in ends],
    }


def _ends(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else list(interval)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
