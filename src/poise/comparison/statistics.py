"""Statistics over seeds: the paired difference between two arms, and the smallest difference that could be found.

The seed is the unit. All arms of a seed see the same problems in the same order, so differences are taken seed by seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, inf, isfinite, log2, sqrt

import numpy as np

from poise._lib.errors import check_range
from poise.comparison import sign_flip
from poise.comparison.sign_flip import Interval

LEVEL = 0.95
POWER = 0.8
_SIMULATED = 12  # up to so many seeds the detectable effect is simulated; beyond, Student's t is near enough


@dataclass(frozen=True)
class Difference:
    """An arm minus the baseline, over the seeds that both have."""

    seeds: tuple[int, ...]
    values: tuple[float, ...]  # one for each of these seeds
    incomplete: tuple[int, ...]  # seeds that one of the two lacks so far
    mean: float | None  # None: no seed yet
    spread: float | None  # standard deviation over seeds; None with fewer than two
    exact: Interval | None  # by inverting the sign-flip test; None: too few seeds, no difference can be excluded
    student: Interval | None  # Student's t, which assumes normal differences; None with fewer than two seeds
    p: float  # of the two-sided sign-flip test, not corrected for the number of arms

    @property
    def interval(self) -> Interval | None:
        """The exact interval, or Student's if there are too few seeds for it."""
        return self.exact or self.student

    @property
    def largest(self) -> float | None:
        """No difference larger than this, in either direction, is compatible with the results."""
        return None if self.interval is None else max(abs(end) for end in self.interval)


def difference(
    arm: Mapping[int, float], baseline: Mapping[int, float], planned: Iterable[int] = (), level: float = LEVEL
) -> Difference:
    """Compare two arms by their results for each seed. A seed that one of them lacks is listed as incomplete.

    ``planned`` are the seeds of the comparison, besides those of the results.
    """
    seeds = tuple(sorted(arm.keys() & baseline.keys()))
    values = tuple(arm[seed] - baseline[seed] for seed in seeds)
    incomplete = tuple(sorted({*arm, *baseline, *planned} - {*seeds}))
    if not values:
        return Difference(seeds, values, incomplete, None, None, None, None, 1.0)
    exact = sign_flip.interval(values, level) if any(values) else (-inf, inf)  # equal runs exclude no difference
    return Difference(
        seeds,
        values,
        incomplete,
        mean=float(np.mean(values)),
        spread=float(np.std(values, ddof=1)) if len(values) > 1 else None,
        exact=exact if isfinite(exact[0]) and isfinite(exact[1]) else None,
        student=student_interval(values, level) if any(values) else None,
        p=sign_flip.p_value(values),
    )


def student_interval(values: Sequence[float], level: float = LEVEL) -> Interval | None:
    """The mean's interval by Student's t; None with fewer than three values: with two it would be 13 errors wide."""
    n = len(values)
    if n < 3:
        return None
    margin = student_factor(n, level) * float(np.std(values, ddof=1)) / sqrt(n)
    mean = float(np.mean(values))
    return mean - margin, mean + margin


def student_factor(n: int, level: float = LEVEL) -> float:
    """How many standard errors the interval of a mean of n values extends to each side."""
    from scipy.stats import t

    return float(t.ppf((1 + level) / 2, n - 1))


def seeds_needed(comparisons: int = 1, level: float = LEVEL) -> int:
    """The fewest seeds with which Holm's correction can find one of so many comparisons significant."""
    check_range("seeds_needed", "comparisons", comparisons, 1)
    return ceil(1 + log2(comparisons / (1 - level)) - 1e-9)


def detectable(seeds: int, spread: float, comparisons: int = 1, level: float = LEVEL, power: float = POWER) -> float:
    """The smallest true difference that the test finds with chance ``power``; infinite with too few seeds.

    ``spread`` is the standard deviation of the differences over seeds, taken to be normal. ``comparisons`` is the
    number of arms besides the baseline: the smallest p must pass Holm's first and hardest threshold.
    """
    check_range("detectable", "seeds", seeds, 1)
    check_range("detectable", "spread", spread, 0)
    unit = _detectable(seeds, comparisons, level, power)
    return unit * spread if isfinite(unit) else inf


@lru_cache
def _detectable(n: int, comparisons: int, level: float, power: float) -> float:
    """``detectable`` for differences with standard deviation 1.

    Take a sample z with mean 0 and add δ: the sum is significant if its interval lies above 0, so if δ exceeds minus
    the lower end of the interval of z. The result is the quantile ``power`` of that end over simulated samples.
    """
    alpha = (1 - level) / comparisons
    if n < seeds_needed(comparisons, level):
        return inf
    if n <= _SIMULATED:
        generator = np.random.default_rng(0)
        ends = [sign_flip.intervals(generator.standard_normal((500, n)), 1 - alpha) for _ in range(10)]
        return float(np.quantile([end for low, high in ends for end in (-low, high)], power))  # by symmetry, both count
    from scipy.optimize import brentq
    from scipy.stats import nct, t

    limit = t.ppf(1 - alpha / 2, n - 1)
    return float(brentq(lambda effect: nct.sf(limit, n - 1, effect * sqrt(n)) - power, 0.0, 100.0 / sqrt(n)))
