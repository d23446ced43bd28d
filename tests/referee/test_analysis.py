"""From arms to the results of a comparison."""

import json
import math
from dataclasses import replace

import pytest

from poise.referee.compare.analysis import analyse
from poise.referee.compare.results import Arm
from poise.referee.compare.statistics import detectable, difference
from support.arms import made_arm, made_run

GRPO, AR, LOPTI = made_arm("grpo", 0.0), made_arm("ar", 0.06), made_arm("lopti", 0.0, passes=2)


def arms_of(document):
    return {arm["name"]: arm for arm in document["arms"]}


def test_the_results():
    document = analyse([GRPO, AR, LOPTI], "grpo", range(10))
    found = arms_of(document)
    expected = difference(AR.results(), GRPO.results())
    assert document["baseline"] == "grpo"
    assert document["seeds"] == found["ar"]["seeds"] == list(range(10))
    assert found["grpo"]["difference"] is None
    assert found["ar"]["settings"] == {"regulator": "ar"}
    assert found["ar"]["accuracy"] == pytest.approx(sum(AR.results().values()) / 10)
    own = found["ar"]["difference"]
    assert own["mean"] == expected.mean
    assert own["interval"] == list(expected.exact)
    assert own["method"] == "sign-flip"
    assert (own["p"], own["p_adjusted"]) == (2 / 2**10, 4 / 2**10)  # the smaller of two
    assert own["detectable"] == pytest.approx(detectable(10, expected.spread, 2))
    assert own["interval"][0] > 0 > found["lopti"]["difference"]["interval"][0]
    assert found["ar"]["scores"]["greedy"]["difference"]["mean"] == pytest.approx(expected.mean / 100)
    assert set(found["ar"]["scores"]) == {"avg@4", "pass@4", "greedy"}
    assert found["lopti"]["cost"] == {"tokens": 1e5, "optimizer_steps": 400.0, "seconds": 100.0, "flop": 2e11}
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_curves_over_steps_tokens_and_seconds():
    curve = arms_of(analyse([GRPO, LOPTI], "grpo"))["lopti"]["curve"]
    assert curve["steps"] == [0, 20, 40, 60, 80, 100]
    assert curve["tokens"][-1] == 1e5
    assert curve["seconds"][1] == 20.0
    assert curve["mean"][0] == pytest.approx(0.3)
    assert curve["low"][-1] < curve["mean"][-1] < curve["high"][-1]


def test_order_of_arms_and_seeds_does_not_matter():
    def turned(arm):
        return Arm(arm.name, arm.settings, dict(reversed(arm.runs.items())))

    first = arms_of(analyse([GRPO, AR, LOPTI], "grpo"))
    second = arms_of(analyse([turned(LOPTI), turned(AR), turned(GRPO)], "grpo"))
    assert first == second


def test_a_diverged_run_counts_and_a_missing_run_is_named():
    runs = dict(AR.runs)
    runs[3] = replace(made_run(3, 0.1, steps=40), state="diverged", why="step 41: nan")
    runs[4] = replace(runs[4], state="unfinished")
    del runs[5]
    found = arms_of(analyse([GRPO, Arm("ar", {}, runs)], "grpo", range(11)))
    assert found["ar"]["diverged"] == {"3": "step 41: nan"}
    assert found["ar"]["results"]["3"] == pytest.approx(0.1)
    assert found["ar"]["missing"] == [4, 5, 10]
    assert found["grpo"]["missing"] == [10]
    assert len(found["ar"]["difference"]["seeds"]) == 8
    assert found["ar"]["curve"]["steps"][-1] == 100  # the diverged run keeps its last score


def stability(final, start=0.3, **changes):
    run = made_run(0, final, start=start, **changes)
    return arms_of(analyse([GRPO, Arm("ar", {}, {0: run})], "grpo"))["ar"]["stability"]


def test_collapse():
    assert stability(0.2, start=0.6)["collapsed"] == 1
    assert stability(0.02, start=0.14)["collapsed"] == 1
    assert stability(0.55, start=0.6)["collapsed"] == 0
    assert stability(0.05, start=0.08)["collapsed"] == 0


def test_entropy_at_start_and_end():
    found = stability(0.5, entropy=tuple([1.0] * 10 + [math.nan] + [0.5] * 80 + [0.1] * 9))
    assert (found["entropy_start"], found["entropy_end"]) == pytest.approx((1.0, 0.14))
    assert stability(0.5, entropy=(math.nan,))["entropy_end"] is None


@pytest.mark.parametrize("seeds", [0, 1, 2])
def test_hardly_any_runs(seeds):
    document = analyse([made_arm("grpo", 0.0, seeds=seeds), made_arm("ar", 0.1, seeds=seeds)], "grpo", range(4))
    assert document["detectable"] is None
    assert document["verdict"]
    json.dumps(document, allow_nan=False)


def test_an_unknown_baseline():
    with pytest.raises(ValueError, match="'grop' is not among the arms: grpo, ar"):
        analyse([GRPO, AR], "grop")
