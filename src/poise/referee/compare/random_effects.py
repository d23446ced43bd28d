"""Combines a method's effects in several regimes (tasks, models, settings), treated as a random sample.

Each regime has a mean difference over its seeds, with a standard error. The true effects of regimes also differ, with a
variance τ² between regimes (Paule and Mandel, 1982). Three figures answer three questions:

- the *interval* of the mean over regimes (Hartung and Knapp, 2001; Student's t over regimes): the average effect;
- the *prediction interval*: the effect in one further regime;
- *I²*: the share of the spread between regimes that seed noise does not explain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from poise.referee.compare.sign_flip import Floats, Interval
from poise.referee.compare.statistics import student_factor


@dataclass(frozen=True)
class RandomEffects:
    """The mean effect over regimes."""

    mean: float
    interval: Interval
    prediction: Interval | None  # None with two regimes
    between: float  # τ, the standard deviation between regimes
    heterogeneity: float  # I², a share


def random_effects(regimes: Sequence[Sequence[float]]) -> RandomEffects:
    """Combine at least two regimes. Each regime is a list of differences for at least two seeds."""
    if len(regimes) < 2 or min(map(len, regimes)) < 2:
        raise ValueError("random effects need at least two regimes with two seeds each")
    means = np.array([np.mean(values) for values in regimes])
    variances = np.array([np.var(values, ddof=1) / len(values) for values in regimes])
    if not variances.all():
        raise ValueError("random effects need regimes whose seeds differ")
    count, between = len(means), _between(means, variances)
    weights = 1 / (variances + between)
    mean = float(np.average(means, weights=weights))
    error = 1 / float(weights.sum())  # equals Hartung and Knapp's, except that theirs may be smaller if τ² = 0
    reach = student_factor(count) * sqrt(error)
    ahead = student_factor(count - 1) * sqrt(between + error) if count > 2 else None
    apart = _excess(0.0, means, variances) + count - 1  # Cochran's Q
    return RandomEffects(
        mean=mean,
        interval=(mean - reach, mean + reach),
        prediction=None if ahead is None else (mean - ahead, mean + ahead),
        between=sqrt(between),
        heterogeneity=max(0.0, 1 - (count - 1) / apart) if apart else 0.0,
    )


def _between(means: Floats, variances: Floats) -> float:
    """τ²: the variance between regimes at which their weighted spread equals the expected spread; at least 0."""
    from scipy.optimize import brentq

    if _excess(0.0, means, variances) <= 0:
        return 0.0
    return float(brentq(_excess, 0.0, float(np.var(means, ddof=1)) + 1e-300, args=(means, variances)))


def _excess(between: float, means: Floats, variances: Floats) -> float:
    """The weighted spread of the regimes, minus the spread expected if ``between`` is the variance between them."""
    weights = 1 / (variances + between)
    mean = np.average(means, weights=weights)
    return float((weights * (means - mean) ** 2).sum()) - (len(means) - 1)
