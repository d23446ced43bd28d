"""Computes the results of a comparison from its arms and runs: the content of ``comparison.json``.

Scores are fractions, such as 0.575; only sentences and plots use percentage points. Secondary scores have intervals but
no corrected p, because only the main score is tested. With a ``cut``, all runs are compared after that many steps, and
each arm also has a speed factor: *better* and *faster* are two verdicts, each with its own correction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from math import isfinite
from statistics import fmean, median

import numpy as np

from poise.referee.compare.claims import against_controls, ends, paired, speed_claims
from poise.referee.compare.results import ACCURACY, Arm, Cost, Point, RunResult
from poise.referee.compare.sign_flip import holm
from poise.referee.compare.speed import is_flat
from poise.referee.compare.statistics import (
    LEVEL,
    POWER,
    Difference,
    detectable,
    difference,
    seeds_needed,
    student_interval,
)
from poise.referee.compare.verdict import verdict
from poise.training.config.documents import Document

DROP = 0.1  # a run that ends further below its best has collapsed; for a best below 0.2, half the best, at least 0.05


def analyse(
    arms: Sequence[Arm],
    baseline: str,
    seeds: Iterable[int] = (),
    *,
    looks: Iterable[int] = (),
    score: str = ACCURACY,
    cut: int | None = None,
    margin: float | None = None,
    controls: Mapping[str, Collection[str]] | None = None,
) -> Document:
    """Compare all arms with the arm ``baseline``. ``seeds`` are the planned seeds; some runs may still be missing.

    ``looks`` lists the numbers of seeds at which this comparison was analysed before. With ``cut``, arms are compared
    after that many steps and have speed factors; differences in speed up to the share ``margin`` count as equal.
    ``controls`` names, for each arm, the arms that may explain its gain. Arms that were added as controls make no
    claim: they have intervals, but do not count in Holm's correction.
    """
    whole = {arm.name: arm for arm in arms}
    if baseline not in whole:
        raise ValueError(f"the baseline {baseline!r} is not among the arms: {', '.join(whole)}")
    arms = arms if cut is None else [arm.until(cut) for arm in arms]
    (base,) = (arm for arm in arms if arm.name == baseline)
    planned = sorted({*seeds, *(seed for arm in arms for seed in arm.runs)})
    differences = {arm.name: difference(arm.results(score), base.results(score)) for arm in arms if arm is not base}
    claims = {arm.name: differences[arm.name] for arm in arms if arm is not base and not arm.control}
    adjusted = dict(zip(claims, holm([each.p for each in claims.values()]), strict=True))
    faster = {} if cut is None else speed_claims(whole, base, differences, score, cut)
    rows = [_arm(arm, base, planned, score) for arm in arms]
    for row in rows:
        name = row["name"]
        row["difference"], row["speed"] = None, faster.get(name)
        row["controls"] = against_controls(name, (controls or {}).get(name, ()), arms, faster, score)
        runs = dict(sorted(whole[name].runs.items()))
        row["curve"] = _band([run for run in runs.values() if run.scores], score)
        row["curves"] = {str(seed): _whole_curve(run) for seed, run in runs.items()}
        if own := differences.get(name):
            power = _power([own], len(claims)) if name in claims else {"detectable": None, "spread": own.spread}
            row["difference"] = {**_difference(own), **power, "p_adjusted": adjusted.get(name)}
    document: Document = {
        "baseline": baseline,
        "score": score,
        "level": LEVEL,
        "power": POWER,
        "seeds": planned,
        "cut": cut,
        "end": max((run.steps for run in whole[baseline].runs.values()), default=None),
        "margin": margin,
        "flat": cut is not None and is_flat(whole[baseline], score, cut),
        "looks": _looks(looks, claims.values()),
        **_power(list(claims.values()), len(claims)),
        "arms": rows,
    }
    document["verdict"] = verdict(document)
    return document


def _arm(arm: Arm, base: Arm, planned: Sequence[int], score: str) -> Document:
    results = arm.results(score)
    done = {seed: arm.runs[seed] for seed in results}
    names = dict.fromkeys(name for run in done.values() for name in run.scores)
    secondary = {name: (arm.results(name), base.results(name)) for name in names if name != score}
    return {
        "name": arm.name,
        "settings": dict(arm.settings),
        "control": arm.control,
        "seeds": list(results),
        "missing": [seed for seed in planned if seed not in results],
        "diverged": {str(seed): run.why for seed, run in done.items() if run.state == "diverged"},
        "counted_as_zero": [seed for seed, run in done.items() if run.counts_as_zero],
        "accuracy": fmean(results.values()) if results else None,
        "interval": ends(student_interval(list(results.values()))),
        "results": {str(seed): value for seed, value in results.items()},
        "before": _before(done.values(), score),
        "scores": {
            name: {"before": _before(done.values(), name), **_summary(own, other, arm is base)}
            for name, (own, other) in secondary.items()
        },
        "steps": sorted({run.steps for run in done.values() if run.state == "finished"}),
        "problems": sorted({run.problems for run in done.values()} - {""}),
        "unsealed": sum(not run.sealed for run in done.values()),
        "stability": _stability(done.values()),
        "cost": _cost(done.values()),
    }


def _before(runs: Iterable[RunResult], score: str) -> float | None:
    return _mean(run.curve[0].scores.get(score) for run in runs)


def _summary(own: Mapping[int, float], other: Mapping[int, float], alone: bool) -> Document:
    """The mean of a secondary score and, unless the arm is the baseline, its difference from the baseline."""
    return {
        "mean": _mean(own.values()),
        "interval": ends(student_interval(list(own.values()))),
        "difference": None if alone else paired(difference(own, other)),
    }


def _difference(result: Difference) -> Document:
    return {
        **paired(result),
        "student": ends(result.student),
        "largest": result.largest,
        "p": result.p,
        "seeds": list(result.seeds),
        "values": list(result.values),
    }


def _power(differences: Sequence[Difference], comparisons: int) -> Document:
    """The smallest detectable difference, and the median spread, of the arms with the most seeds.

    ``detectable`` is None with fewer than two seeds, or if no difference can be significant with these seeds.
    """
    most = max((len(each.seeds) for each in differences), default=0)
    spreads = [each.spread for each in differences if len(each.seeds) == most and each.spread]  # 0 means equal runs
    if not spreads:
        return {"detectable": None, "spread": None}
    effect = detectable(most, median(spreads), comparisons)
    return {"detectable": effect if isfinite(effect) else None, "spread": median(spreads)}


def _looks(earlier: Iterable[int], differences: Collection[Difference]) -> list[int]:
    """The seed counts of all analyses so far, including this one, with which a difference could be significant."""
    now = max((len(each.seeds) for each in differences), default=0)
    least = seeds_needed(max(1, len(differences)))
    return sorted({seeds for seeds in (*earlier, now) if least <= seeds <= now})


def _stability(runs: Collection[RunResult]) -> Document:
    tenths = [max(1, len(run.entropy) // 10) for run in runs]
    return {
        "collapsed": sum(_collapsed(run) for run in runs),
        "entropy_start": _mean(_mean(run.entropy[:n]) for run, n in zip(runs, tenths, strict=True)),
        "entropy_end": _mean(_mean(run.entropy[-n:]) for run, n in zip(runs, tenths, strict=True)),
    }


def _collapsed(run: RunResult) -> bool:
    """Whether a run's final accuracy is far below its best accuracy."""
    scores = [point.scores[ACCURACY] for point in run.curve if ACCURACY in point.scores]
    best = max(scores, default=0.0)
    return bool(scores) and best - scores[-1] > max(DROP / 2, min(DROP, best / 2))


def _cost(runs: Collection[RunResult]) -> Document:
    """Each cost's mean over the runs; None if it is unknown for any run."""
    columns = {each.name: [getattr(run.cost, each.name) for run in runs] for each in fields(Cost)}
    return {name: None if None in values else _mean(values) for name, values in columns.items()}


def _band(runs: Sequence[RunResult], score: str) -> Document:
    """The mean curve over seeds, with interval and mean cost, at every step with an evaluation.

    A run that ended early keeps its last score and cost.
    """
    curves = [[point for point in run.curve if score in point.scores] for run in runs]
    curves = [points for points in curves if points]
    steps = sorted({point.step for points in curves for point in points})

    def at(step: int, value: Callable[[Point], float]) -> list[float]:
        return [
            float(np.interp(step, [point.step for point in points], [value(point) for point in points]))
            for points in curves
        ]

    scores = [at(step, lambda point: point.scores[score]) for step in steps]
    bands = [ends(student_interval(values)) for values in scores]
    return {
        "steps": steps,
        "tokens": [fmean(at(step, lambda point: point.cost.tokens)) for step in steps],
        "seconds": [fmean(at(step, lambda point: point.cost.seconds)) for step in steps],
        "mean": [fmean(values) for values in scores],
        "low": [pair[0] if pair else None for pair in bands],
        "high": [pair[1] if pair else None for pair in bands],
    }


def _whole_curve(run: RunResult) -> Document:
    """All evaluations of a run: the steps, and the values of each score."""
    names = dict.fromkeys(name for point in run.curve for name in point.scores)
    return {
        "steps": [point.step for point in run.curve],
        **{name: [point.scores.get(name) for point in run.curve] for name in names},
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and isfinite(value)]
    return fmean(known) if known else None
