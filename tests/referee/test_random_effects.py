"""Random effects over regimes."""

import numpy as np
import pytest

from poise.referee.compare.random_effects import random_effects
from poise.referee.compare.statistics import student_interval


def regimes(means, spread=1.0, seeds=10):
    """Regimes with exactly these means and this spread over seeds."""
    pattern = np.linspace(-1, 1, seeds)
    return [(mean + spread * pattern / pattern.std(ddof=1)).tolist() for mean in means]


def test_regimes_with_equal_errors_are_a_sample_of_their_means():
    means = [1.0, 4.0, -2.0, 3.0, 0.5]
    found = random_effects(regimes(means))
    assert found.mean == pytest.approx(np.mean(means))
    assert found.interval == pytest.approx(student_interval(means))
    assert found.between**2 == pytest.approx(np.var(means, ddof=1) - 1 / 10)
    assert found.heterogeneity == pytest.approx(1 - (1 / 10) / np.var(means, ddof=1))
    assert found.prediction[0] < found.interval[0] < found.interval[1] < found.prediction[1]


def test_regimes_that_differ_by_chance_alone():
    found = random_effects(regimes([1.0, 1.01, 0.99]))
    assert (found.between, found.heterogeneity) == (0.0, 0.0)
    assert found.mean == pytest.approx(1.0)
    half = (found.interval[1] - found.interval[0]) / 2
    assert half == pytest.approx(4.303 * (1 / 30) ** 0.5, rel=1e-3)  # not narrower because they agree so well


def test_exact_regimes_count_more_only_if_regimes_agree():
    exact, rough = regimes([1.0], spread=0.01)[0], regimes([3.0], spread=10.0)[0]
    assert random_effects([exact, rough]).mean == pytest.approx(1.0, abs=0.1)
    assert random_effects([exact, *regimes([9.0, 5.0], spread=0.1)]).mean == pytest.approx(5.0, abs=0.1)
    assert random_effects([exact, rough]).prediction is None


def test_intervals_cover_the_mean_and_the_next_regime():
    generator = np.random.default_rng(0)
    inside = np.zeros(2)
    for _ in range(400):
        truths = generator.normal(2.0, 1.5, 9)
        found = random_effects([generator.normal(truth, 2.0, 10).tolist() for truth in truths[:8]])
        inside += [
            ends[0] <= truth <= ends[1] for ends, truth in ((found.interval, 2.0), (found.prediction, truths[8]))
        ]
    assert inside / 400 == pytest.approx([0.95, 0.95], abs=0.035)


def test_too_little_to_combine():
    for few in (regimes([1.0]), [[1.0], [2.0, 3.0]], [[1.0, 1.0], [2.0, 3.0]]):
        with pytest.raises(ValueError, match="random effects need"):
            random_effects(few)
