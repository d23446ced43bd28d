"""Statistics over seeds: the paired difference between two arms, and the smallest detectable difference.

The seed is the unit. All arms of a seed see the same problems in the same order, so differences are paired by seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, inf, isfinite, log2, sqrt

import numpy as np

from poise.referee.compare import sign_flip
from poise.referee.compare.sign_flip import Interval

LEVEL = 0.95
POWER = 0.8
_SIMULATED = 12  # up to this many seeds the detectable effect is simulated; beyond, Student's t is close enough


@dataclass(frozen=True)
class Difference:
    """The differences of an arm to the baseline, for the seeds that both have."""

    seeds: tuple[int, ...]
    values: tuple[float, ...]  # one per seed
    mean: float | None  # None without seeds
    spread: float | None  # standard deviation over seeds; None with fewer than two
    exact: Interval | None  # inverts the sign-flip test; None with too few seeds to exclude any difference
    student: Interval | None  # Student's t, which assumes normal differences; None with fewer than three seeds
    p: float  # from the two-sided sign-flip test, not corrected for the number of arms

    @property
    def interval(self) -> Interval | None:
        """The exact interval; with too few seeds, Student's."""
        return self.exact or self.student

    @property
    def largest(self) -> float | None:
        """The largest difference, in either direction, that the results do not exclude."""
        return None if self.interval is None else max(abs(end) for end in self.interval)


def difference(arm: Mapping[int, float], baseline: Mapping[int, float]) -> Difference:
    """Compare an arm with the baseline by their results for each seed that both have."""
    seeds = tuple(sorted(arm.keys() & baseline.keys()))
    values = tuple(arm[seed] - baseline[seed] for seed in seeds)
    if not values:
        return Difference(seeds, values, None, None, None, None, 1.0)
    exact = sign_flip.interval(values) if any(values) else (-inf, inf)  # equal results exclude no difference
    return Difference(
        seeds,
        values,
        mean=float(np.mean(values)),
        spread=float(np.std(values, ddof=1)) if len(values) > 1 else None,
        exact=exact if isfinite(exact[0]) and isfinite(exact[1]) else None,
        student=student_interval(values) if any(values) else None,
        p=sign_flip.p_value(values),
    )


def student_interval(values: Sequence[float]) -> Interval | None:
    """Student's interval of the mean; None with fewer than three values, because two would give ±13 standard errors."""
    n = len(values)
    if n < 3:
        return None
    margin = student_factor(n) * float(np.std(values, ddof=1)) / sqrt(n)
    mean = float(np.mean(values))
    return mean - margin, mean + margin


def student_factor(n: int) -> float:
    """Half the width of the interval of a mean of n values, in standard errors."""
    from scipy.stats import t

    return float(t.ppf((1 + LEVEL) / 2, n - 1))


def seeds_needed(comparisons: int = 1) -> int:
    """The fewest seeds with which any of ``comparisons`` tests can be significant after Holm's correction."""
    return ceil(1 + log2(comparisons / (1 - LEVEL)) - 1e-9)


def detectable(seeds: int, spread: float, comparisons: int = 1) -> float:
    """The smallest true difference that the test detects with probability ``POWER``; infinite with too few seeds.

    ``spread`` is the standard deviation of the differences over seeds, which are assumed to be normal. ``comparisons``
    is the number of arms without the baseline; the smallest p must pass Holm's first, strictest threshold.
    """
    unit = _detectable(seeds, comparisons)
    return unit * spread if isfinite(unit) else inf


@lru_cache
def _detectable(n: int, comparisons: int) -> float:
    """``detectable`` for differences with standard deviation 1.

    Add δ to a sample z with mean 0. The sum is significant if its interval lies above 0, that is, if δ exceeds minus
    the lower end of the interval of z. The result is the ``POWER`` quantile of that value over simulated samples.
    """
    alpha = (1 - LEVEL) / comparisons
    if n < seeds_needed(comparisons):
        return inf
    if n <= _SIMULATED:
        generator = np.random.default_rng(0)
        ends = [sign_flip.intervals(generator.standard_normal((500, n)), 1 - alpha) for _ in range(10)]
        return float(np.quantile([end for low, high in ends for end in (-low, high)], POWER))  # both, by symmetry
    from scipy.optimize import brentq
    from scipy.stats import nct, t

    limit = t.ppf(1 - alpha / 2, n - 1)
    return float(brentq(lambda effect: nct.sf(limit, n - 1, effect * sqrt(n)) - POWER, 0.0, 100.0 / sqrt(n)))
