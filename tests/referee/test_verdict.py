"""The verdict in words."""

from dataclasses import replace

import pytest

from poise.referee.compare.analysis import analyse
from poise.referee.compare.results import Arm
from poise.referee.compare.verdict import arm_sentence, signed, verdict
from support.arms import made_arm, made_run


def with_lost(arm, before, after):
    """The arm, with these shares of samples cut off."""
    runs = {}
    for seed, run in arm.runs.items():
        shares = [before] + [after] * (len(run.curve) - 1)
        points = zip(run.curve, shares, strict=True)
        curve = tuple(replace(point, scores={**point.scores, "cut_off": share}) for point, share in points)
        runs[seed] = replace(run, curve=curve)
    return Arm(arm.name, arm.settings, runs)


def arm(mean=0.012, interval=(-0.008, 0.031), seeds=10, p=0.21, p_adjusted=0.21, method="sign-flip"):
    found = {
        "mean": mean, "interval": interval, "seeds": list(range(seeds)), "p": p, "p_adjusted": p_adjusted,
        "values": [mean] * seeds, "method": method, "largest": max(abs(end) for end in interval) if interval else None,
    }  # fmt: skip
    return {"name": "lopti", "difference": found}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (arm(), ["+1.2 points [−0.8, +3.1] against grpo", "no significant", "above 3.1 points", "p = 0.21"]),
        (arm(0.04, (0.021, 0.059), p=0.002, p_adjusted=0.004), ["[+2.1, +5.9]", "better", "p = 0.004"]),
        (arm(-0.04, (-0.059, -0.021), p=0.0001, p_adjusted=0.0004), ["−4.0 points", "worse", "p < 0.001"]),
        (arm(0.02, (0.001, 0.039), p=0.04, p_adjusted=0.12), ["no significant", "= 0.12", "= 0.04 before Holm's"]),
        (arm(seeds=4, method="student"), ["no significant", "above 3.1 points", "Student's interval"]),
        (arm(seeds=2, interval=None), ["+1.2 points against grpo", "too few"]),
        (arm(seeds=0), ["no seed is complete yet"]),
    ],
)
def test_one_arm(found, words):
    said = arm_sentence(found, "grpo")
    assert all(each in said for each in words), said
    assert ("better" in said or "worse" in said) == (found["difference"]["p_adjusted"] <= 0.05)


def test_signs():
    assert [signed(value) for value in (0.0123, -0.0123, 0.0, -0.0001)] == ["+1.2", "−1.2", "0.0", "0.0"]


def test_the_smallest_detectable_difference_comes_first():
    document = analyse([made_arm("grpo", 0.0), made_arm("ar", 0.06), made_arm("lopti", 0.0)], "grpo")
    first, *others = verdict(document)
    assert document["verdict"] == [first, *others]
    assert "10 seeds find" in first
    assert f"{100 * document['detectable']:.1f} points" in first
    assert [sentence.split(":")[0] for sentence in others] == ["ar", "lopti"]


def test_too_few_seeds():
    found = verdict(analyse([made_arm("grpo", 0.0, seeds=4), made_arm("ar", 0.06, seeds=4)], "grpo"))
    assert "4 seeds cannot show a significant difference; 6 can" in found[0]
    found = verdict(analyse([made_arm("grpo", 0.0, seeds=1), made_arm("ar", 0.06, seeds=1)], "grpo"))
    assert "nothing to compare" in found[0]


def test_cautions():
    lopti = made_arm("lopti", 0.0, passes=2)
    runs = dict(lopti.runs)
    runs[3] = replace(made_run(3, 0.1, start=0.5, steps=40), state="diverged", why="step 41: nan")
    runs[4] = made_run(4, 0.5, steps=10, state="diverged")  # evaluations come every 20 steps
    del runs[5]
    document = analyse([made_arm("grpo", 0.0), Arm("lopti", {}, runs)], "grpo", range(10))
    assert [document["arms"][1]["results"][seed] for seed in ("3", "4")] == pytest.approx([0.1, 0.0])
    said = " ".join(document["verdict"])
    for words in (
        "1 of 10 runs are not finished", "2 of 9 runs diverged", "0 for 1 without a measurement",
        "1 of 9 runs ended far below their best", "× optimizer steps", "× FLOP",
    ):  # fmt: skip
        assert words in said


def idle(run):
    """A run that sampled and took no optimizer step: every group had one reward."""
    return replace(made_run(run.seed, 0.3), cost=replace(run.cost, optimizer_steps=0.0))


def test_runs_without_an_optimizer_step_compare_nothing():
    arms = [made_arm(name, 0.0, seeds=6) for name in ("grpo", "ar")]
    still = [Arm(arm.name, {}, {seed: idle(run) for seed, run in arm.runs.items()}) for arm in arms]
    document = analyse(still, "grpo")
    assert document["verdict"] == ["Nothing was compared: no run took an optimizer step."]
    assert document["detectable"] is None
    assert document["arms"][1]["difference"]["interval"] is None
    said = analyse([arms[0], still[1]], "grpo")["verdict"]
    assert "ar: no run took an optimizer step." in said
    assert not any(sentence.startswith("grpo:") for sentence in said)


def test_equal_scores_exclude_no_difference():
    def same(name, final, seeds=6):
        return Arm(name, {}, {seed: made_run(seed, final + 0.01 * seed * (final != 0.5)) for seed in range(seeds)})

    assert analyse([same("grpo", 0.5), same("ar", 0.5)], "grpo")["verdict"] == [
        "All runs ended with the same score, 50.0 points."
    ]
    said = analyse([same("grpo", 0.4), same("ar", 0.4), made_arm("lopti", 0.0, seeds=6)], "grpo")["verdict"]
    assert "ar: the same score as grpo with every seed (seeds: 6)." in said
    assert not any("0.0 points" in sentence for sentence in said)


def test_looks_with_fewer_seeds_are_named():
    arms = [made_arm("grpo", 0.0), made_arm("ar", 0.06)]
    first = analyse(arms, "grpo")
    assert first["looks"] == [10]
    assert not any("were seen" in sentence for sentence in first["verdict"])
    assert analyse(arms, "grpo", looks=[10])["verdict"] == first["verdict"]  # the same results again
    assert analyse(arms, "grpo", looks=[5])["looks"] == [10]  # five seeds cannot show a significant difference
    again = analyse(arms, "grpo", looks=[6, 8])
    assert again["looks"] == [6, 8, 10]
    (said,) = (sentence for sentence in again["verdict"] if "were seen" in sentence)
    assert "with 6, 8 seeds before these 10" in said
    assert "in at most 15 %" in said


def test_learning_to_stop_is_named():
    grpo, ar = made_arm("grpo", 0.0), made_arm("ar", 0.1)
    document = analyse([with_lost(grpo, 0.5, 0.3), with_lost(ar, 0.5, 0.1)], "grpo")
    said = " ".join(document["verdict"])
    assert "ar, compared with grpo: " in said
    assert "ar, compared with before training: " in said
    assert "(50.0 → 10.0 %)" in said
    assert document["arms"][1]["scores"]["cut_off"]["before"] == pytest.approx(0.5)
    said = " ".join(analyse([with_lost(grpo, 0.1, 0.1), with_lost(ar, 0.1, 0.1)], "grpo")["verdict"])
    assert "cut off" not in said


def test_other_problems_other_steps_and_missing_checksums_are_named():
    def changed(arm, **changes):
        return Arm(arm.name, {}, {seed: replace(run, **changes) for seed, run in arm.runs.items()})

    grpo, ar = made_arm("grpo", 0.0), made_arm("ar", 0.06)
    alike = " ".join(analyse([changed(grpo, problems="a"), changed(ar, problems="a")], "grpo")["verdict"])
    assert not any(words in alike for words in ("same held-out problems", "was measured after", "checksum"))
    unlike = [changed(grpo, problems="a"), changed(ar, problems="b", steps=80, sealed=False)]
    said = " ".join(analyse(unlike, "grpo")["verdict"])
    assert "Not all runs were measured on the same held-out problems" in said
    assert "ar was measured after 80 steps, grpo after 100." in said
    assert "ar: 10 of 10 results have no checksum" in said
