"""What one learning curve says: its area, when it reaches a goal, where it levels off, and whether it is stable."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

import numpy as np

from poise.comparison.results import ACCURACY, RunResult

By = Literal["steps", "tokens", "seconds"]
Points = Sequence[tuple[float, float]]  # (cost so far, score), in the order of cost

DROP = 0.1  # a final accuracy so far below the run's own best is a collapse, or below half of a best under 0.2
SPIKE = 10.0  # a gradient norm so many times the median of the steps before it is a spike
WINDOW = 50
FEWEST_POINTS = 5  # for a fit of three numbers
LARGEST_ERROR = 0.05  # standard error up to which an asymptote counts as determined


def points(run: RunResult, by: By = "steps", score: str = ACCURACY) -> list[tuple[float, float]]:
    """The curve of a run over steps, sampled tokens or seconds."""
    measured = [point for point in run.curve if score in point.scores]
    return [
        (float(point.step) if by == "steps" else float(getattr(point.cost, by)), point.scores[score])
        for point in measured
    ]


def area(curve: Points, end: float) -> float | None:
    """The mean score from 0 to ``end``: the area under the curve, divided by its length; None without points.

    The last score is held until ``end``, for a run that diverged or reached its goal; a curve that goes on is cut.
    """
    if not curve or end <= 0:
        return None
    ends = [(x, y) for x, y in curve if x < end]
    ends = [*ends, (end, score_at(curve, end))]
    if ends[0][0] > 0:
        ends = [(0.0, ends[0][1]), *ends]
    return sum((x2 - x1) * (y1 + y2) / 2 for (x1, y1), (x2, y2) in pairwise(ends)) / end


def score_at(curve: Points, x: float) -> float:
    """The score at a cost, between two measurements by a straight line, and beyond them the nearest one."""
    return float(np.interp(x, [x for x, _ in curve], [y for _, y in curve]))


def reach(curve: Points, goal: float) -> float | None:
    """The cost at which the curve first reaches ``goal``, between two measurements by a straight line.

    None if it never does: more than the run's whole cost, not a number to average over.
    """
    for place, (x, y) in enumerate(curve):
        if y >= goal:
            before_x, before_y = curve[place - 1] if place else (x, y)
            return x if y == before_y else before_x + (x - before_x) * (goal - before_y) / (y - before_y)
    return None


class Reached(NamedTuple):
    """The cost at which a run reached a goal, None if it never did, and the cost up to which it was observed.

    A run that diverged never will: it was observed for ever.
    """

    cost: float | None
    observed: float

    def before(self, other: Reached) -> bool:
        """Whether this run is known to have been first."""
        if self.cost is None:
            return False
        return self.cost <= other.observed if other.cost is None else self.cost < other.cost


@dataclass(frozen=True)
class Reach:
    """How soon an arm reaches a goal and whether before the baseline. Seeds that never do are counted, not dropped."""

    reached: int  # seeds in which the arm reaches the goal
    seeds: int
    median: float | None  # cost of the median seed of the arm; None if half of the seeds never reach the goal
    sooner: int  # seeds in which the arm is first
    later: int
    p: float  # of the sign test of sooner against later


def compare_reach(arm: Mapping[int, Reached], baseline: Mapping[int, Reached]) -> Reach:
    """Compare costs by the sign test, which needs to know who was first but not when the other would have been.

    A seed in which that is not known, or both were equal, says nothing.
    """
    from scipy.stats import binomtest

    pairs = [(arm[seed], baseline[seed]) for seed in sorted(arm.keys() & baseline.keys())]
    costs = [inf if own.cost is None else own.cost for own, _ in pairs]
    sooner, later = sum(own.before(other) for own, other in pairs), sum(other.before(own) for own, other in pairs)
    middle = median(costs) if costs else inf
    return Reach(
        reached=sum(isfinite(cost) for cost in costs),
        seeds=len(pairs),
        median=middle if isfinite(middle) else None,
        sooner=sooner,
        later=later,
        p=float(binomtest(sooner, sooner + later).pvalue) if sooner + later else 1.0,
    )


@dataclass(frozen=True)
class Fit:
    """``score = asymptote + (start − asymptote)·exp(−rate·cost)``, or why there is no such curve."""

    asymptote: float | None = None
    rate: float | None = None  # per unit of cost
    error: float | None = None  # standard error of the asymptote
    failure: str = ""


def fit(curve: Points) -> Fit:
    """Fit a saturating curve. The asymptote tells a higher ceiling from mere speed (arXiv 2510.13786)."""
    from scipy.optimize import OptimizeWarning, curve_fit

    x, y = np.array([x for x, _ in curve]), np.array([y for _, y in curve])
    if len(x) < FEWEST_POINTS:
        return Fit(failure=f"{len(x)} evaluations, and a fit needs {FEWEST_POINTS}: lower evaluation.every")
    if np.ptp(y) == 0 or x[-1] <= 0:
        return Fit(failure="the score never changes")
    unit = x / x[-1]

    def model(x: Any, asymptote: float, start: float, rate: float) -> Any:
        return asymptote + (start - asymptote) * np.exp(-rate * x)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", OptimizeWarning)
            bounds = ([0.0, 0.0, 1e-3], [1.0, 1.0, 1e3])
            guess = np.clip([y[-1], y[0], 3.0], *bounds)
            best, covariance = curve_fit(model, unit, y, p0=guess, bounds=bounds, maxfev=5000)
    except (RuntimeError, OptimizeWarning):
        return Fit(failure="no saturating curve fits")
    error = float(np.sqrt(covariance[0, 0]))
    if not isfinite(error) or error > LARGEST_ERROR:
        return Fit(failure="the curve does not level off: its asymptote is not determined")
    return Fit(float(best[0]), float(best[2] / x[-1]), error)


@dataclass(frozen=True)
class Stability:
    """How steady a run was."""

    collapsed: bool  # its final accuracy is far below its own best
    best: float | None
    final: float | None
    entropy_start: float | None  # mean over the first tenth of the steps
    entropy_end: float | None
    spikes: int  # steps with a gradient norm far above the median of those before


def stability(run: RunResult) -> Stability:
    """The stability of a run so far."""
    scores = [score for _, score in points(run)]
    best, final = (max(scores), scores[-1]) if scores else (None, None)
    collapsed = best is not None and final is not None and best - final > max(DROP / 2, min(DROP, best / 2))
    tenth = max(1, len(run.entropy) // 10)
    return Stability(
        collapsed, best, final, _mean(run.entropy[:tenth]), _mean(run.entropy[-tenth:]), spikes(run.grad_norm)
    )


def spikes(norms: Sequence[float]) -> int:
    """The steps whose gradient norm is more than 10 times the median of the up to 50 steps before it.

    A step that moved nothing has no norm (NaN) and is left out, and so are the first five.
    """
    known = [norm for norm in norms if isfinite(norm)]
    return sum(known[i] > SPIKE * median(known[max(0, i - WINDOW) : i]) for i in range(5, len(known)))


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if isfinite(value)]
    return fmean(known) if known else None
