"""The instrument on comparisons in which the truth is known: experiments/instrument/simulate.py, with smaller numbers.

The limits are four standard errors of the simulation above what is stated.
"""

import sys

import pytest

from support.pages import ROOT

sys.path.insert(0, str(ROOT / "experiments/instrument"))

from simulate import PLANTED, WORLDS, World, coverage, explanations, false_claims


def limit(share, trials):
    return share + 4 * (share * (1 - share) / trials) ** 0.5


@pytest.mark.parametrize("name", ["steep", "flat, 200 problems"])
def test_both_verdicts_are_wrong_as_rarely_as_stated(name):
    better, faster = false_claims(WORLDS[name], 100)
    assert better <= limit(0.05, 100)
    assert faster <= limit(0.05, 100)


@pytest.mark.parametrize("speed", [1.0, 1.6])
def test_the_interval_covers_the_speed_where_the_curve_rises(speed):
    found = coverage(World(reach=0.5), speed, 150)
    assert 1 - found["covered"] <= limit(0.05, 150)
    assert found["mean"] == pytest.approx(speed, rel=0.03)
    assert found["flat"] == 0


def test_flat_curves_are_recognised():
    assert coverage(WORLDS["flat"], 1.0, 30)["flat"] >= 0.9


@pytest.mark.parametrize(
    ("planted", "explanation"),
    [
        ("twice the rate, disguised", "2 × rate"),
        ("a second pass, disguised", "two passes"),
        ("a real improvement", "none"),
    ],
)
def test_a_planted_method_is_seen_through(planted, explanation):
    found = explanations(World(reach=0.5), PLANTED[planted], 20, seeds=12)
    assert found["faster"] == 1
    assert found[explanation] >= 0.8
    assert explanation == "none" or found["none"] <= 0.1
