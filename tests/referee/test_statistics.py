"""Paired differences and the detectable effect."""

import math
import subprocess
import sys

import numpy as np
import pytest

from poise.referee.compare import sign_flip
from poise.referee.compare.statistics import detectable, difference, seeds_needed, student_interval


def results(values):
    return dict(enumerate(values))


def test_seeds_are_paired():
    arm, baseline = {3: 0.7, 1: 0.5, 2: 0.6, 9: 0.1}, {1: 0.4, 2: 0.4, 3: 0.4, 5: 0.9}
    found = difference(arm, baseline)
    assert found.seeds == (1, 2, 3)
    assert found.values == pytest.approx((0.1, 0.2, 0.3))
    assert found.mean == pytest.approx(0.2)
    assert found.spread == pytest.approx(0.1)
    assert found.p == 0.25
    assert found.exact is None  # three seeds exclude nothing
    assert found.interval == found.student == pytest.approx((0.2 - 0.2484, 0.2 + 0.2484), abs=1e-4)
    assert found.largest == pytest.approx(0.4484, abs=1e-4)


def test_pairing_matters():
    """Seeds differ far more than arms do: paired, every comparison finds the effect; shuffled, hardly any."""
    g = np.random.default_rng(0)
    seeds = g.normal(0.5, 0.1, (200, 10))
    baseline = seeds + g.normal(0, 0.01, seeds.shape)
    arm = seeds + g.normal(0.03, 0.01, seeds.shape)
    paired, unpaired = arm - baseline, arm - g.permuted(baseline, axis=1)
    assert np.mean(sign_flip.p_values(paired) <= 0.05) > 0.99
    assert np.mean(sign_flip.p_values(unpaired) <= 0.05) < 0.25


@pytest.mark.parametrize("seeds", [0, 1, 2, 7])
def test_any_number_of_seeds(seeds):
    found = difference(results([0.5] * seeds), results([0.25] * seeds))
    assert (found.mean is None) == (seeds == 0)
    assert (found.spread is None) == (seeds < 2)
    assert (found.student is None) == (seeds < 3)
    assert (found.exact is None) == (seeds < 6)
    assert found.p == (1.0 if seeds < 2 else 2.0 ** (1 - seeds))


def test_order_does_not_matter():
    values = {seed: (seed * 7 % 5) / 10 for seed in range(8)}
    baseline = {seed: (seed * 3 % 4) / 10 for seed in range(8)}
    assert difference(values, baseline) == difference(dict(reversed(values.items())), dict(sorted(baseline.items())))


def test_students_interval_is_scipys():
    from scipy.stats import ttest_1samp

    values = np.random.default_rng(0).standard_normal(7)
    expected = ttest_1samp(values, 0).confidence_interval(0.95)
    assert student_interval(values) == pytest.approx((expected.low, expected.high))


def test_students_interval_covers():
    from scipy.stats import t

    d = np.random.default_rng(1).normal(0.2, 1.0, (10_000, 4))
    margin = t.ppf(0.975, 3) * d.std(1, ddof=1) / 2
    assert np.mean(np.abs(d.mean(1) - 0.2) <= margin) == pytest.approx(0.95, abs=0.01)
    assert student_interval(d[0]) == pytest.approx((d[0].mean() - margin[0], d[0].mean() + margin[0]))


def test_seeds_needed():
    assert [seeds_needed(arms) for arms in (1, 2, 10)] == [6, 7, 9]
    for arms in range(1, 40):
        seeds = seeds_needed(arms)
        assert arms * sign_flip.p_value([1.0] * seeds) <= 0.05 < arms * sign_flip.p_value([1.0] * (seeds - 1))


@pytest.mark.parametrize(("seeds", "arms"), [(6, 1), (8, 1), (10, 1), (10, 10), (12, 4), (14, 4)])
def test_the_detectable_effect_is_found_with_the_stated_power(seeds, arms):
    effect = detectable(seeds, 0.05, arms)
    d = np.random.default_rng(7).normal(effect, 0.05, (2000, seeds))
    found = np.mean(np.concatenate([sign_flip.p_values(part) for part in np.split(d, 10)]) <= 0.05 / arms)
    assert found == pytest.approx(0.8, abs=0.035)


def test_the_detectable_effect():
    assert detectable(5, 0.05) == math.inf
    assert detectable(8, 0.05, comparisons=10) == math.inf
    assert detectable(10, 0.1) == pytest.approx(2 * detectable(10, 0.05))
    assert detectable(10, 0.05) < detectable(10, 0.05, comparisons=3) < detectable(8, 0.05, comparisons=3)
    assert detectable(30, 0.05) < detectable(13, 0.05) < detectable(12, 0.05) < detectable(10, 0.05)


def test_scipy_is_loaded_on_first_use_only():
    code = "import sys; from poise.referee.compare import sign_flip, statistics; print('scipy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
