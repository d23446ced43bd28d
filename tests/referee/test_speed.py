"""The speed factor: curves, limits of what can be seen, and the verdict on speed."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from poise.referee.compare.analysis import analyse
from poise.referee.compare.results import Arm, Cost, Point
from poise.referee.compare.speed import Curve, is_flat, rising, speed_factor, speeds
from support.arms import made_arm, made_run


def curve(*scores, every=10):
    return Curve(np.arange(len(scores)) * float(every), np.array(scores))


def test_a_curve_that_falls_is_levelled():
    found = rising([(20, 0.3), (0, 0.1), (10, 0.4), (30, 0.5)])
    assert found.steps.tolist() == [0, 10, 20, 30]
    assert found.scores.tolist() == pytest.approx([0.1, 0.35, 0.35, 0.5])


@pytest.mark.parametrize(
    ("score", "step"), [(0.05, 0), (0.2, 5), (0.3, 10), (0.4, 15), (0.5, 25), (0.55, 35), (0.61, inf)]
)
def test_between_evaluations_a_curve_is_straight(score, step):
    """Of the steps 20 to 30, which all have 0.5, it is the one nearest to 25."""
    assert curve(0.1, 0.3, 0.5, 0.5, 0.6).step_of(score, near=25) == pytest.approx(step)


def test_the_factor_is_limited_by_the_baselines_evaluations():
    baseline = curve(0.1, 0.3, 0.5, 0.6, 0.7)
    assert speed_factor(0.5, 10, baseline) == 2
    assert speed_factor(0.4, 30, baseline) == pytest.approx(0.5)
    assert speed_factor(0.9, 20, baseline) == 2  # it ends at step 40
    assert speed_factor(0.0, 20, baseline) == 0.5  # its first evaluation in training is after step 10


def slow_and_fast(seeds=10, speed=1.25, **changes):
    """A baseline of 200 steps, and an arm that learns faster by a factor, up to some noise, for 100."""
    noise = np.random.default_rng(0).normal(0, 0.003, seeds)
    base = {seed: made_run(seed, 0.7 + seed / 100, steps=200, every=10) for seed in range(seeds)}
    fast = {
        seed: made_run(seed, 0.3 + speed * (0.4 + seed / 100) / 2 + noise[seed], every=10, **changes)
        for seed in range(seeds)
    }
    return Arm("grpo", {}, base), Arm("fast", {}, fast)


def test_faster_and_better_are_two_verdicts():
    base, fast = slow_and_fast()
    document = analyse([base, fast], "grpo", cut=100, margin=0.07)
    row = document["arms"][1]
    assert row["speed"]["mean"] == pytest.approx(1.25, abs=0.02)
    assert row["speed"]["interval"][0] < 1.25 < row["speed"]["interval"][1]
    assert row["difference"]["mean"] == pytest.approx(0.25 * row["accuracy"] - 0.25 * 0.3, abs=0.03)
    assert document["arms"][0]["steps"] == [100]  # all are compared as they were there
    assert document["arms"][0]["curve"]["steps"][-1] == 200
    assert len(document["arms"][0]["curves"]["0"]["accuracy"]) == 21
    said = "\n".join(document["verdict"])
    assert "against grpo after 100 steps: better (p = 0.002)" in said
    assert "× the speed of grpo: faster (p = 0.002)" in said
    assert "against grpo after 200 steps: it is not shown to end higher" in said


def test_without_a_cut_there_is_no_speed():
    document = analyse(list(slow_and_fast()), "grpo")
    assert document["arms"][1]["speed"] is None
    assert not any("speed" in sentence for sentence in document["verdict"])


def test_equal_speeds_within_a_margin():
    base, same = slow_and_fast(speed=1.0)

    def said(margin):
        return " ".join(analyse([base, same], "grpo", cut=100, margin=margin)["verdict"])

    assert "no significant difference, and within ± 7 % of equal speed" in said(0.07)
    assert "no significant difference, but not shown to be within ± 0.01 % of equal speed" in said(0.0001)
    assert "within" not in said(None)


def test_an_accuracy_that_the_baseline_never_reaches_is_a_lower_bound():
    base, fast = slow_and_fast(speed=2.5)
    row = analyse([base, fast], "grpo", cut=100)["arms"][1]
    assert row["speed"]["beyond"] == list(range(10))
    assert row["speed"]["text"] == "> 2.00"
    mixed = Arm("fast", {}, {seed: (fast if seed % 2 else slow_and_fast()[1]).runs[seed] for seed in range(10)})
    document = analyse([base, mixed], "grpo", cut=100)
    assert document["arms"][1]["speed"]["text"].startswith("≥ 1.5")
    assert document["arms"][1]["speed"]["text"].endswith(", …]")


def test_a_baseline_that_diverged_is_passed_and_an_arm_that_diverged_counts():
    base, fast = slow_and_fast()
    broken = replace(made_run(0, 0.35, steps=40, every=10), state="diverged", why="step 41: nan")
    found = speeds(fast, Arm("grpo", {}, {**base.runs, 0: broken}), "accuracy", 100)
    assert found.factors[0] == 2  # it would never have got there
    assert found.beyond == (0,)
    nothing = replace(made_run(1, 0.5, steps=5, every=10), state="diverged")
    found = speeds(Arm("fast", {}, {**fast.runs, 1: nothing, 0: broken}), base, "accuracy", 100)
    assert found.factors[1] == 0.1  # no evaluation in training: 0 points, which the baseline has before its first
    assert found.factors[0] == pytest.approx(0.25)  # its last accuracy, after all its steps


def test_a_flat_curve_is_named():
    base, fast = slow_and_fast()
    flat = {}
    for seed, run in base.runs.items():
        points = [point if point.step <= 100 else replace(run.curve[10], step=point.step) for point in run.curve]
        flat[seed] = replace(run, curve=tuple(points))
    assert not is_flat(base, "accuracy", 100)
    assert not is_flat(fast, "accuracy", 100)  # it ends there
    assert is_flat(Arm("grpo", {}, flat), "accuracy", 100)
    said = analyse([Arm("grpo", {}, flat), fast], "grpo", cut=100)["verdict"]
    assert any("grpo hardly rises after step 100" in sentence for sentence in said)


def test_a_run_until_a_step():
    run = made_run(0, 0.7, steps=200, every=20, entropy=(0.5,) * 200)
    cut = run.until(90)
    assert (cut.steps, cut.state, len(cut.entropy)) == (90, "finished", 90)
    assert [point.step for point in cut.curve] == [0, 20, 40, 60, 80, 90]
    assert cut.scores["accuracy"] == pytest.approx(0.3 + 0.4 * 90 / 200)
    assert cut.cost == Cost(90_000.0, 180.0, 45.0, 9e10)
    assert run.until(200) is run
    late = replace(run, state="diverged", why="step 201: nan", steps=205)
    assert late.until(100).state == "finished"
    blind = replace(run, state="diverged", steps=150, curve=(Point(0, Cost(), {"accuracy": 0.3}),))
    assert blind.until(100).counts_as_zero  # it was never evaluated in training


def test_arms_that_equal_the_baseline_have_its_speed():
    base = made_arm("grpo", 0.0)
    same = Arm("same", {}, base.runs)
    document = analyse([base, same, made_arm("ar", 0.1)], "grpo", cut=100)
    assert document["arms"][1]["speed"]["values"] == pytest.approx([1.0] * 10)
