"""The sign-flip test of paired differences, the interval that it implies, and Holm's correction.

If two methods do not differ, a seed's difference is as likely to be d as −d. So the test tries all sign flips and
counts how often the mean is at least as far from 0 as the measured mean. It assumes symmetry but no normal
distribution, and is exact: without an effect, p ≤ α in at most a share α of all comparisons, for any number of seeds.

The interval inverts the test: it contains every shift δ for which the test of d − δ does not reject. Its ends are means
of subsets of the differences (Hartigan, 1969), so no search is needed. For δ below the mean, flipping a subset of d − δ
gives a mean at least as far from 0 as the observed mean exactly if the mean of the subset, or the mean of the rest, is
at most δ.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, inf

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Interval = tuple[float, float]

EXACT = 20  # up to this many differences all flips are counted (2^19, because a flip equals its opposite)
RANDOM = 99_999  # the number of random flips for more differences
_ROUNDING = 1e-12  # rounding makes equal sums differ by less than this, relative to the differences


def p_value(differences: Sequence[float]) -> float:
    """The two-sided p for the hypothesis that the differences are symmetric around 0."""
    return float(p_values([differences])[0])


def interval(differences: Sequence[float], level: float = 0.95) -> Interval:
    """The interval of all means that the test does not reject at 1 − ``level``; infinite if it rejects none.

    The coverage is at least ``level`` for differences with a symmetric distribution.
    """
    low, high = intervals([differences], level)
    return float(low[0]), float(high[0])


def p_values(samples: ArrayLike) -> Floats:
    """``p_value`` of every row."""
    d_RN = np.asarray(samples, dtype=float)
    total_R = d_RN.sum(1)
    sums_RF, _ = _flips(d_RN)
    least_R = np.abs(total_R) - _ROUNDING * np.abs(d_RN).sum(1)
    as_far_R = (np.abs(total_R[:, None] - 2 * sums_RF) >= least_R[:, None]).sum(1)
    p_R: Floats = (1 + as_far_R) / (1 + sums_RF.shape[1])
    return p_R


def intervals(samples: ArrayLike, level: float = 0.95) -> tuple[Floats, Floats]:
    """The lower and upper ends of each row's ``interval``."""
    d_RN = np.asarray(samples, dtype=float)
    rows, n = d_RN.shape
    sums_RF, sizes_F = _flips(d_RN)
    flips = sums_RF.shape[1]
    rank = floor((1 - level) * (1 + flips) * (1 + _ROUNDING))  # flips needed besides the identity for p > 1 − level
    if rank == 0:
        return np.full(rows, -inf), np.full(rows, inf)
    with np.errstate(invalid="ignore", divide="ignore"):  # a random flip may flip nothing or everything
        inside_RF = sums_RF / sizes_F
        outside_RF = (d_RN.sum(1, keepdims=True) - sums_RF) / (n - sizes_F)
    whole_F = (sizes_F == 0) | (sizes_F == n)  # flipping nothing or everything counts at every shift
    low_RF = np.where(whole_F, -inf, np.minimum(inside_RF, outside_RF))
    high_RF = np.where(whole_F, inf, np.maximum(inside_RF, outside_RF))
    rounding_R = _ROUNDING * np.abs(d_RN).max(1)
    low_R: Floats = np.partition(low_RF, rank - 1, axis=1)[:, rank - 1] - rounding_R
    high_R: Floats = np.partition(high_RF, flips - rank, axis=1)[:, flips - rank] + rounding_R
    return low_R, high_R


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjusted p. Rejecting p ≤ α limits the chance of any false rejection to α, also for dependent tests."""
    adjusted, largest = [0.0] * len(p), 0.0
    for place, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        largest = max(largest, min(1.0, (len(p) - place) * p[i]))
        adjusted[i] = largest
    return adjusted


def _flips(d_RN: Floats) -> tuple[Floats, Floats]:
    """The sum and the number of the flipped differences, for every flip except the identity.

    The means of a flip and its opposite differ only in sign, so the first difference is never flipped.
    """
    n = d_RN.shape[1]
    if n > EXACT:
        return _random_flips(d_RN)
    sums_RF, sizes_F = np.zeros((len(d_RN), 1)), np.zeros(1)
    for i in range(1, n):
        sums_RF = np.concatenate([sums_RF, sums_RF + d_RN[:, i : i + 1]], axis=1)
        sizes_F = np.concatenate([sizes_F, sizes_F + 1])
    return sums_RF[:, 1:], sizes_F[1:]


def _random_flips(d_RN: Floats) -> tuple[Floats, Floats]:
    """``_flips`` with random flips, the same in every call. Rows are sorted: the order of seeds must not matter.

    Rows with negative skew are mirrored, so that the sign of the differences does not matter either.
    """
    rows, n = d_RN.shape
    centred_RN = d_RN - d_RN.mean(1, keepdims=True)
    sign_R = np.where((centred_RN**3).sum(1) < 0, -1.0, 1.0)
    ordered_RN = np.sort(sign_R[:, None] * d_RN, axis=1) * sign_R[:, None]
    generator = np.random.default_rng(0)
    sums, sizes = [], []
    for start in range(0, RANDOM, 4096):
        flip_FN = generator.random((min(4096, RANDOM - start), n)) < 0.5
        sums.append(ordered_RN @ flip_FN.T.astype(float))
        sizes.append(flip_FN.sum(1).astype(float))
    return np.concatenate(sums, axis=1).reshape(rows, RANDOM), np.concatenate(sizes)
