"""The verdict in words."""

from dataclasses import replace

import pytest

from poise.comparison.analysis import analyse
from poise.comparison.results import Arm
from poise.comparison.verdict import against, signed, verdict
from support.arms import made_arm, made_run


def arm(mean=0.012, interval=(-0.008, 0.031), seeds=10, p=0.21, p_adjusted=0.21, method="sign-flip"):
    found = {
        "mean": mean, "interval": list(interval), "seeds": list(range(seeds)), "p": p, "p_adjusted": p_adjusted,
        "method": method, "largest": max(abs(end) for end in interval),
    }  # fmt: skip
    return {"name": "lopti", "difference": found}


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            arm(),
            "lopti: +1.2 points [−0.8, +3.1] against grpo, no difference larger than 3.1 points is compatible with ten "
            "seeds (p = 0.21 after Holm's correction).",
        ),
        (
            arm(0.04, (0.021, 0.059), p=0.002, p_adjusted=0.004),
            "lopti: +4.0 points [+2.1, +5.9] against grpo, better (p = 0.004 after Holm's correction, ten seeds).",
        ),
        (
            arm(-0.04, (-0.059, -0.021), seeds=14, p=0.0001, p_adjusted=0.0004),
            "lopti: −4.0 points [−5.9, −2.1] against grpo, worse (p < 0.001 after Holm's correction, 14 seeds).",
        ),
        (
            arm(0.02, (0.001, 0.039), p=0.04, p_adjusted=0.12),
            "lopti: +2.0 points [+0.1, +3.9] against grpo; alone this would be significant (p = 0.04), but not after "
            "Holm's correction (p = 0.12); no difference larger than 3.9 points is compatible with ten seeds.",
        ),
        (
            arm(seeds=4, method="student"),
            "lopti: +1.2 points [−0.8, +3.1] against grpo; if differences are normal, no difference larger than 3.1 "
            "points is compatible with four seeds, which are too few for an exact interval.",
        ),
        (arm(seeds=1), "lopti: +1.2 points against grpo in one seed, which says nothing about others."),
        (arm(seeds=2), "lopti: +1.2 points against grpo in two seeds, which says nothing about others."),
        (arm(seeds=0), "lopti: no seed is complete yet."),
    ],
)
def test_one_arm(found, sentence):
    assert against(found, "grpo") == sentence


def test_signs():
    assert [signed(value) for value in (0.0123, -0.0123, 0.0, -0.0001)] == ["+1.2", "−1.2", "0.0", "0.0"]


def test_the_smallest_detectable_difference_comes_first():
    document = analyse([made_arm("grpo", 0.0), made_arm("ar", 0.06), made_arm("lopti", 0.0)], "grpo")
    first, *others = verdict(document)
    assert document["verdict"] == [first, *others]
    expected = f"{100 * document['detectable']:.1f} points (two comparisons, Holm's correction, a spread of "
    assert first.startswith("The smallest difference that ten seeds would find with a chance of 80 % is " + expected)
    assert [sentence.split(":")[0] for sentence in others] == ["ar", "lopti"]
    assert "better" in others[0]


def test_too_few_seeds():
    found = verdict(analyse([made_arm("grpo", 0.0, seeds=4), made_arm("ar", 0.06, seeds=4)], "grpo"))
    assert found[0] == (
        "Four seeds cannot make any difference significant: one comparison at the level 0.05 with Holm's correction "
        "needs six."
    )
    found = verdict(analyse([made_arm("grpo", 0.0, seeds=1), made_arm("ar", 0.06, seeds=1)], "grpo"))
    assert found[0] == "No arm has two seeds in common with the baseline yet: there is nothing to compare."


def test_cautions():
    arms = [made_arm("grpo", 0.0), made_arm("lopti", 0.0, passes=2)]
    runs = dict(arms[1].runs)
    runs[3] = replace(made_run(3, 0.1, start=0.5, steps=40), state="diverged", why="step 41: nan")
    del runs[5]
    found = verdict(analyse([arms[0], Arm("lopti", {}, runs)], "grpo", range(10)))
    assert "lopti: one of ten runs is not finished yet." in found
    assert "lopti: one of nine runs diverged and counts with the accuracy last measured during training." in found
    assert "lopti: one of nine runs ended far below its own best." in found
    assert "lopti takes 1.8 times the optimizer steps and 1.8 times the FLOP (estimated) of grpo." in found


def test_missing_runs_are_told_in_one_line():
    def said(*counts):
        arms = [made_arm(name, 0.0, seeds=n) for name, n in zip(("grpo", "ar", "lopti"), counts, strict=True)]
        return [line for line in analyse(arms, "grpo", range(6))["verdict"] if "finished yet" in line]

    assert said(4, 4, 4) == ["Of every arm, two of six runs are not finished yet."]
    assert said(6, 5, 4) == ["Runs that are not finished yet: one of six of ar and two of six of lopti."]
    assert said(6, 6, 6) == []


def test_runs_that_diverged_before_any_evaluation_count_as_zero():
    def said(*steps):
        runs = [made_run(seed, 0.5, steps=each, state="diverged") for seed, each in enumerate(steps)]
        lopti = Arm("lopti", {}, {**made_arm("lopti", 0.0).runs, **dict(enumerate(runs))})
        found = analyse([made_arm("grpo", 0.0), lopti], "grpo")
        assert [found["arms"][1]["results"][str(run.seed)] for run in runs] == [0.5 * (each > 10) for each in steps]
        return next(sentence for sentence in found["verdict"] if "diverged" in sentence)

    early = "before any evaluation during training (evaluation.every)"  # which comes after 20 steps
    assert said(10) == f"lopti: one of ten runs diverged {early} and counts as 0."
    assert said(10, 10) == f"lopti: two of ten runs diverged {early} and count as 0."
    expected = f"lopti: two of ten runs diverged; one of them, {early}, counts as 0, the other with the accuracy last"
    assert said(10, 40) == f"{expected} measured."


def test_few_problems():
    arms = [made_arm(name, 0.0, noise=0.0, problems=50) for name in ("grpo", "ar")]
    assert "of the spread over seeds comes from the 50 held-out problems" in verdict(analyse(arms, "grpo"))[-1]
