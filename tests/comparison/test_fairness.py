"""What makes arms comparable: the same problems in the same order, and controls that take as many optimizer steps."""

import pytest

from poise.comparison import matched
from poise.comparison.results import Arm, Cost, Point, RunResult
from support.small_runs import SHORT, run


def problems(folder):
    """The problems of every step, in order, without repetitions."""
    return [list(dict.fromkeys(record["problem"] for record in folder.rollouts(step))) for step in folder.recorded()]


@pytest.mark.usefixtures("short_evaluation")
def test_all_arms_of_a_seed_see_the_same_problems(tmp_path):
    arms = ["regulator=lopti", "regulator=random-split | ar", "algorithm=rltr", "algorithm=erl", "optim.lr=1e-3"]
    settings = [*SHORT, "steps=2", "rollouts_every=1", "evaluation.problems=1"]
    expected = problems(run(tmp_path, *settings, name="grpo")[0])
    assert [len(step) for step in expected] == [4, 4]
    assert expected[0] != expected[1]
    for arm in arms:
        assert problems(run(tmp_path, *settings, arm, name=arm.replace(" ", ""))[0]) == expected, arm
    assert problems(run(tmp_path, *settings, "seed=1", name="other")[0]) != expected


def arm(name, steps, results, /, **settings):
    """An arm of finished runs that took so many optimizer steps."""
    runs = {
        seed: RunResult(
            seed=seed, state="finished", steps=10, planned=10, cost=Cost(optimizer_steps=steps),
            curve=(Point(10, Cost(), {"accuracy": accuracy}),),
        )
        for seed, accuracy in enumerate(results)
    }  # fmt: skip
    return Arm(name, {"regulator": name} | settings, runs)


GRPO = arm("grpo", 10, [0.50, 0.52, 0.51])
LOPTI = arm("lopti", 20, [0.60, 0.61, 0.62])
CONTROL = arm("grpo(passes=2)", 19.8, [0.62, 0.64, 0.63])  # a step without an active token was left out


def test_a_method_of_two_phases_is_shown_beside_two_passes():
    arms = [GRPO, LOPTI, CONTROL, arm("ar", 10, [0.5, 0.5, 0.5])]
    (pair,) = matched.compare(arms, "grpo")
    assert (pair["arm"], pair["control"]) == ("lopti", "grpo(passes=2)")
    assert pair["mean"] == pytest.approx(-0.02)
    assert pair["p_adjusted"] == pair["p"] == 0.25
    said, rate = matched.sentences([pair], arms, "grpo", one_rate=True)
    assert said.startswith("lopti, against grpo(passes=2), which takes as many optimizer steps: −2.0 points [")
    assert rate == (
        "All arms have one learning rate. lopti and grpo(passes=2) take more steps, which can act as a higher rate: "
        "optim.lr=A,B,C tune=3, with rates around yours, tells the method from the rate."
    )


def test_several_rates_need_no_advice():
    arms = [GRPO, LOPTI, CONTROL]
    assert len(matched.sentences(matched.compare(arms, "grpo"), arms, "grpo")) == 1
    plain = [GRPO, arm("ar", 10, [0.5] * 3)]
    assert matched.sentences(matched.compare(plain, "grpo"), plain, "grpo", one_rate=True) == []


@pytest.mark.parametrize("key", ["steps", "prompts", "optim.mini_batch"])
def test_steps_that_settings_bring_are_no_methods(key):
    arms = [arm("grpo", 10, [0.5] * 3), arm("grpo, longer", 20, [0.6] * 3, **{key: "20"})]
    assert matched.compare(arms, "grpo") == []
    assert matched.sentences([], arms, "grpo", one_rate=True) == []


def test_a_missing_control_is_suggested():
    arms = [GRPO, LOPTI, arm("grpo(passes=3)", 30, [0.6, 0.6, 0.6])]
    (pair,) = matched.compare(arms, "grpo")
    assert pair["control"] is None
    assert "add the arm grpo(passes=2)" in matched.sentences([pair], arms, "grpo")[0]
    split = [GRPO, LOPTI, arm("random-split", 20, [0.6, 0.6, 0.6])]
    assert matched.sentences(matched.compare(split, "grpo"), split, "grpo")[0] == (
        "Without the method, no arm takes as many optimizer steps as lopti and random-split: add the arm "
        "grpo(passes=2) to tell the method from the steps."
    )
    other = arm("grpo(passes=2)", 20, [0.6, 0.6, 0.6], **{"objective.clip_high": "0.3"})
    assert matched.controls([GRPO, LOPTI, other], "grpo") == {"lopti": None}  # it differs in something else too
    tuned = [GRPO, arm("lopti", 20, [0.6] * 3, **{"optim.lr": 1e-4})]
    tuned.append(arm("grpo(passes=2)", 20, [0.6] * 3, **{"optim.lr": 5e-5}))
    assert matched.controls(tuned, "grpo") == {"lopti": None}
    assert matched.controls(tuned, "grpo", ["optim.lr"]) == {"lopti": "grpo(passes=2)"}
    assert matched.compare([GRPO, arm("ar", 10, [0.5, 0.5, 0.5])], "grpo") == []
    assert matched.compare([arm("grpo", 0, []), LOPTI], "grpo") == []
