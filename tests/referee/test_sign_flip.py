"""The sign-flip test and its interval: against scipy, by brute force, and by simulation of 10,000 comparisons."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poise.referee.compare.sign_flip import EXACT, holm, interval, intervals, p_value, p_values

COMPARISONS = 10_000
DRAWS = {  # symmetric around 0, with what accuracies do: normal, heavy tails, two clusters, few values with ties
    "normal": lambda g, shape: g.standard_normal(shape),
    "heavy": lambda g, shape: g.standard_t(2, shape),
    "clusters": lambda g, shape: g.standard_normal(shape) * 0.1 + g.choice([-1.0, 1.0], shape),
    "discrete": lambda g, shape: g.integers(-2, 3, shape) / 300,
}
# The results of two equal arms are exchangeable, so that their difference is symmetric, however skewed each of them is.
RESULTS = {"skewed": lambda g, shape: g.exponential(size=shape), "discrete": lambda g, shape: g.poisson(4, shape)}
differences = st.lists(st.integers(-20, 20).map(lambda i: i / 7), min_size=2, max_size=8)


def flips(n):
    return np.array(list(itertools.product([1, -1], repeat=n)))


@settings(max_examples=40, deadline=None)
@given(differences)
def test_p_counts_every_flip(d):
    means = np.abs(flips(len(d)) @ np.array(d))
    assert p_value(d) == np.mean(means >= abs(sum(d)) - 1e-9)


@pytest.mark.parametrize("n", [3, 8, 11])
def test_p_is_scipys(n):
    from scipy.stats import permutation_test

    g = np.random.default_rng(n)
    for d in (g.standard_normal(n) + 0.5, g.exponential(size=n), g.integers(-2, 4, n) / 4):
        found = permutation_test((d,), np.mean, permutation_type="samples", n_resamples=np.inf)
        assert p_value(d) == pytest.approx(found.pvalue, abs=1e-12)


def test_random_flips_are_near_all_flips(monkeypatch):
    d = np.random.default_rng(0).standard_normal(14) + 0.5
    exact_p, exact_ends = p_value(d), interval(d)
    monkeypatch.setattr("poise.referee.compare.sign_flip.EXACT", 5)
    assert p_value(d) == pytest.approx(exact_p, rel=0.1)
    assert interval(d) == pytest.approx(exact_ends, abs=0.02)


@pytest.mark.parametrize("n", [6, 9, EXACT + 4])
def test_the_interval_is_the_test_inverted(n):
    d = np.random.default_rng(n).exponential(size=n)
    low, high = interval(d, 0.9)
    assert low < np.mean(d) < high
    for end, outwards in ((low, -1e-6), (high, 1e-6)):
        assert p_value(d - end - outwards) <= 0.1 < p_value(d - end + outwards)


@settings(max_examples=40, deadline=None)
@given(differences.filter(lambda d: len(d) >= 6), st.floats(-3, 3), st.floats(0.1, 10))
def test_the_interval_follows_shift_scale_and_sign(d, shift, scale):
    d = np.array(d)
    low, high = interval(d)
    assert interval(d + shift) == pytest.approx((low + shift, high + shift), abs=1e-9)
    assert interval(d * scale) == pytest.approx((low * scale, high * scale), abs=1e-9)
    assert interval(-d) == pytest.approx((-high, -low), abs=1e-9)
    assert p_value(-d) == p_value(d) == p_value(d * scale)


@pytest.mark.parametrize("n", [7, EXACT + 3])
def test_order_and_sign_do_not_matter(n):
    d = np.random.default_rng(n).standard_normal(n) + 0.4
    other = np.random.default_rng(1).permutation(d)
    assert p_value(other) == p_value(d) == p_value(-d)
    assert interval(other) == pytest.approx(interval(d), abs=1e-12)
    low, high = interval(d)
    assert interval(-d) == pytest.approx((-high, -low), abs=1e-12)


def test_few_seeds_exclude_nothing():
    assert interval([1.0] * 5) == (-math.inf, math.inf)
    assert p_value([1.0] * 5) == 2 / 2**5
    assert interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == pytest.approx((1.0, 6.0))
    assert p_value([3.0]) == 1.0
    assert p_value([0.0] * 8) == 1.0


def test_holm():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
    p = [0.2, 0.01, 0.04]
    assert [holm(p[::-1])[2 - i] for i in range(3)] == holm(p)


def in_parts(function, samples):
    """A function of many rows, part by part: each part fits into the processor's cache."""
    return np.concatenate([function(part) for part in np.split(samples, 50)], axis=-1)


def at_most(found, stated, trials=COMPARISONS):
    """Whether a share is at most the stated one, up to five standard errors of the simulation."""
    return found <= stated + 5 * math.sqrt(stated * (1 - stated) / trials)


@pytest.mark.parametrize("n", [6, 8, 10])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_with_no_effect_few_are_significant_and_intervals_cover(draw, n):
    d = draw(np.random.default_rng(n), (COMPARISONS, n))
    p = in_parts(p_values, d)
    for alpha in (0.01, 0.05, 0.2):
        assert at_most(np.mean(p <= alpha), alpha)
    low, high = in_parts(intervals, d + 0.3)
    assert at_most(np.mean((low > 0.3) | (high < 0.3)), 0.05)
    np.testing.assert_array_equal(p <= 0.05, np.logical_or(*np.greater([low - 0.3, 0.3 - high], 1e-9)))


@pytest.mark.parametrize("draw", RESULTS.values(), ids=RESULTS)
@pytest.mark.parametrize("arms", [1, 4])
def test_the_family_wise_rate_is_the_stated_one(draw, arms):
    """All arms share one baseline, so their differences depend on each other."""
    results = draw(np.random.default_rng(arms), (COMPARISONS, arms + 1, 9)).astype(float)
    p = np.stack([in_parts(p_values, results[:, arm] - results[:, 0]) for arm in range(1, arms + 1)], axis=1)
    false = np.mean([min(holm(row)) <= 0.05 for row in p.tolist()])
    assert at_most(false, 0.05)
    assert arms == 1 or np.mean(p.min(1) <= 0.05) > 0.08  # without correction there would be more


def test_what_skewed_differences_do():
    """The limit that the docs state: strongly skewed differences with mean 0 are no longer symmetric around it."""
    from scipy.stats import t

    d = np.random.default_rng(10).exponential(size=(COMPARISONS, 10)) - 1
    found = np.mean(in_parts(p_values, d) <= 0.05)
    student = np.mean(np.abs(d.mean(1)) / d.std(1, ddof=1) * math.sqrt(10) > t.ppf(0.975, 9))
    assert 0.05 < found < 0.11
    assert found < student  # which does not do better


def test_the_level_is_used_up():
    """The test is not merely valid because it never rejects: with ten seeds it has all but a bit of its level."""
    d = np.random.default_rng(0).standard_normal((COMPARISONS, 10))
    assert np.mean(in_parts(p_values, d) <= 0.05) > 0.04
    low, high = in_parts(intervals, d)
    from scipy.stats import t

    student = 2 * t.ppf(0.975, 9) * d.std(1, ddof=1).mean() / math.sqrt(10)
    assert np.mean(high - low) == pytest.approx(student, rel=0.06)
