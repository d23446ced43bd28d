"""The speed factor: the number of baseline steps that one step of an arm is worth.

The factor is the number of steps in which the baseline reaches the arm's accuracy at the cut, divided by the arm's
steps. Both curves are first made monotone (isotonic regression); between evaluations they are straight lines.

The baseline's curve limits the measurement. An accuracy that the baseline never reaches counts as reached at the end of
the curve ("> 2" if the baseline runs twice as long). An accuracy that the baseline reaches before its first evaluation
in training counts as reached at that evaluation. Where the curve is flat, step counts are unreliable: noise of one
point in accuracy becomes noise of many steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

import numpy as np

from poise.referee.compare.results import Arm, RunResult
from poise.referee.compare.sign_flip import Floats

FLAT = 0.1  # the baseline's curve is flat if at most this share of its gain comes after the cut


class Curve(NamedTuple):
    """A non-decreasing curve of accuracy over steps."""

    steps: Floats
    scores: Floats

    def at(self, step: float) -> float:
        """The accuracy after a step. Outside the curve, the accuracy at its nearer end."""
        return float(np.interp(step, self.steps, self.scores))

    def step_of(self, score: float, near: float) -> float:
        """The (fractional) step with this accuracy; 0 if the whole curve is above it, infinite if below.

        On a plateau, this is the step nearest to ``near``.
        """
        first = int(np.searchsorted(self.scores, score))
        end = int(np.searchsorted(self.scores, score, side="right"))
        if first < end:
            return min(max(near, float(self.steps[first])), float(self.steps[end - 1]))
        if first in (0, len(self.scores)):
            return inf if first else 0.0
        return float(np.interp(score, self.scores[first - 1 : end + 1], self.steps[first - 1 : end + 1]))


def rising(points: Iterable[tuple[float, float]]) -> Curve:
    """Fit the nearest non-decreasing curve to points (step, accuracy)."""
    from scipy.optimize import isotonic_regression

    steps, scores = zip(*sorted(points), strict=True)
    return Curve(np.array(steps, dtype=float), isotonic_regression(scores).x)


def speed_factor(score: float, steps: float, baseline: Curve) -> float:
    """The speed, relative to the baseline, of an arm that reaches ``score`` after ``steps`` steps."""
    first, last = baseline.steps[:2][-1], baseline.steps[-1]
    return float(min(max(baseline.step_of(score, steps), first), last) / steps)


class Speeds(NamedTuple):
    """An arm's speed factors by seed."""

    factors: dict[int, float]
    beyond: tuple[int, ...]  # seeds with an accuracy that the baseline never reaches; their factors are lower bounds


def speeds(arm: Arm, baseline: Arm, score: str, cut: int) -> Speeds:
    """The speed factors of an arm at the cut, for the seeds that arm and baseline share."""
    end = max((run.steps for run in baseline.runs.values()), default=0)
    factors, beyond = {}, []
    for seed in sorted(arm.results(score).keys() & baseline.results(score).keys()):
        curve, run = _baseline_curve(baseline.runs[seed], score, end), arm.runs[seed].until(cut)
        steps = cut if run.state == "diverged" else min(cut, run.steps)
        reached = 0.0 if run.counts_as_zero else _curve(run, score).at(cut)
        factors[seed] = speed_factor(reached, steps, curve)
        if reached > curve.scores[-1]:
            beyond.append(seed)
    return Speeds(factors, tuple(beyond))


def is_flat(baseline: Arm, score: str, cut: int) -> bool:
    """Whether the baseline runs beyond the cut but hardly improves there, averaged over seeds."""
    end, at_cut = baseline.results(score), baseline.until(cut).results(score)
    if not end or all(baseline.runs[seed].steps <= cut for seed in end):
        return False
    gain = sum(end[seed] - baseline.runs[seed].curve[0].scores[score] for seed in end)
    return sum(end[seed] - at_cut[seed] for seed in end) <= FLAT * gain


def _curve(run: RunResult, score: str) -> Curve:
    return rising((point.step, point.scores[score]) for point in run.curve if score in point.scores)


def _baseline_curve(run: RunResult, score: str, end: int) -> Curve:
    """The run's curve. A diverged run keeps its last accuracy to the end."""
    curve = _curve(run, score)
    if run.state != "diverged":
        return curve
    return Curve(np.append(curve.steps, float(end)), np.append(curve.scores, curve.scores[-1]))
