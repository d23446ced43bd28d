"""What is read from a learning curve."""

import math

import numpy as np
import pytest

from poise.comparison.curves import Reached, area, compare_reach, fit, points, reach, spikes, stability
from poise.comparison.results import Cost, Point, RunResult


def run(accuracies, every=10, **changes):
    curve = [
        Point(i * every, Cost(tokens=i * 100.0, seconds=i * 2.0), {"accuracy": y}) for i, y in enumerate(accuracies)
    ]
    steps = (len(accuracies) - 1) * every
    return RunResult(0, "finished", steps, steps, tuple(curve), **changes)


def test_points_over_steps_tokens_and_seconds():
    found = run([0.1, 0.2])
    assert points(found) == [(0, 0.1), (10, 0.2)]
    assert points(found, "tokens") == [(0, 0.1), (100, 0.2)]
    assert points(found, "seconds") == [(0, 0.1), (2, 0.2)]
    assert points(found, score="greedy") == []


def test_area():
    curve = [(0, 0.0), (10, 1.0)]
    assert area(curve, 10) == pytest.approx(0.5)
    assert area(curve, 20) == pytest.approx(0.75)  # the last score is held
    assert area(curve, 5) == pytest.approx(0.25)  # and a curve that goes on is cut
    assert area([(5, 0.4)], 10) == pytest.approx(0.4)
    assert area([], 10) is None
    assert area(curve, 0) is None
    wavy = [(x, math.sin(x) ** 2) for x in np.sort(np.random.default_rng(0).uniform(0, 9, 30))]
    x, y = zip(*wavy, strict=True)
    expected = np.trapezoid([y[0], *y, y[-1]], [0, *x, 9]) / 9
    assert area(wavy, 9) == pytest.approx(expected)


def test_reach():
    curve = [(0, 0.2), (10, 0.4), (20, 0.3), (30, 0.8)]
    assert reach(curve, 0.3) == pytest.approx(5)
    assert reach(curve, 0.4) == 10
    assert reach(curve, 0.6) == pytest.approx(26)
    assert reach(curve, 0.1) == 0
    assert reach(curve, 0.9) is None
    assert reach([], 0.1) is None


def test_who_reaches_the_goal_first():
    arm = {0: Reached(5, 20), 1: Reached(None, 20), 2: Reached(9, 20), 3: Reached(None, 20), 4: Reached(8, 20)}
    baseline = {0: Reached(10, 20), 1: Reached(10, 20), 2: Reached(None, 20), 3: Reached(None, 20), 4: Reached(8, 20)}
    found = compare_reach(arm, baseline)
    assert (found.reached, found.seeds, found.sooner, found.later, found.median) == (3, 5, 2, 1, 9)
    assert found.p == 1.0
    none = compare_reach({0: Reached(None, 20)}, {0: Reached(5, 20)})
    assert (none.median, none.reached, none.later) == (None, 0, 1)
    assert compare_reach({}, {}).median is None


def test_a_run_that_stopped_before_the_other_reached_the_goal_is_undecided():
    """It used fewer tokens in all than the baseline needed, so nobody knows; a diverged run will never get there."""
    assert not Reached(10, 20).before(Reached(None, 8))
    assert Reached(10, 20).before(Reached(None, math.inf))
    assert compare_reach({0: Reached(None, 8)}, {0: Reached(10, 20)}).later == 0


def test_the_sign_test_of_first_is_exact():
    arm, baseline = {i: Reached(1, 9) for i in range(8)}, {i: Reached(2, 9) for i in range(8)}
    assert compare_reach(arm, baseline).p == 2 / 2**8


def test_a_fit_finds_asymptote_and_rate():
    x = np.linspace(0, 200, 21)
    y = 0.7 - 0.5 * np.exp(-0.03 * x) + np.random.default_rng(0).normal(0, 0.005, 21)
    found = fit(list(zip(x, y, strict=True)))
    assert found.failure == ""
    assert found.asymptote == pytest.approx(0.7, abs=0.01)
    assert found.rate == pytest.approx(0.03, rel=0.1)
    assert abs(found.asymptote - 0.7) < 4 * found.error


@pytest.mark.parametrize(
    ("curve", "why"),
    [
        ([(0, 0.1), (1, 0.2), (2, 0.3)], "evaluations"),
        ([(i, 0.25) for i in range(9)], "never changes"),
        ([(i, 0.1 + 0.05 * i) for i in range(9)], "level off"),  # a straight line has no asymptote
        ([(i, 0.1 + 0.001 * i * i) for i in range(20)], "level off"),
    ],
)
def test_a_fit_that_fails_says_why(curve, why):
    found = fit(curve)
    assert why in found.failure
    assert found.asymptote is found.rate is None


def test_noise_alone_never_crashes_a_fit():
    g = np.random.default_rng(0)
    for _ in range(30):
        found = fit(list(zip(range(8), g.uniform(0, 1, 8), strict=True)))
        assert (found.asymptote is None) == bool(found.failure)


def test_collapse():
    assert stability(run([0.3, 0.6, 0.2])).collapsed
    assert stability(run([0.05, 0.14, 0.02])).collapsed
    assert not stability(run([0.3, 0.6, 0.55])).collapsed
    assert not stability(run([0.05, 0.08, 0.05])).collapsed
    assert not stability(run([])).collapsed


def test_entropy_and_spikes():
    entropy = tuple([1.0] * 10 + [math.nan] + [0.5] * 80 + [0.1] * 9)
    found = stability(run([0.3, 0.6], entropy=entropy, grad_norm=(1.0,) * 20 + (math.nan, 11.0, 1.0)))
    assert (found.entropy_start, found.entropy_end) == pytest.approx((1.0, 0.14))
    assert found.spikes == 1
    assert stability(run([0.3], entropy=(math.nan,))).entropy_end is None
    assert spikes([]) == 0
    assert spikes([1e9, 1.0, 1.0]) == 0
