"""Countdown: puzzles that can be solved, splits that share nothing, and a verifier that takes any text."""

import json
from dataclasses import replace
from itertools import islice

import pytest

from poise import tasks
from poise.tasks.arithmetic import evaluate
from poise.tasks.countdown import Countdown


def puzzles(task, split="train", seed=0, count=100):
    return list(islice(task.problems(split, seed), count))


@pytest.mark.parametrize("settings", [{}, {"numbers": 2}, {"numbers": "5-6", "target": 999}, {"largest": 9}])
def test_every_puzzle_has_the_solution_it_says(settings):
    task = Countdown(**settings)
    for problem in puzzles(task):
        data = problem.data
        value, used = evaluate(data["solution"])
        assert value == data["target"]
        assert sorted(used) == sorted(data["numbers"])
        assert 10 <= data["target"] <= task.target
        assert max(data["numbers"]) <= task.largest
        for step in data["steps"]:
            left, _, right = step.partition(" = ")
            assert evaluate(left)[0] == int(right) > 0
        again = replace(problem, data=json.loads(json.dumps(data)))
        for seed in range(3):
            text = task.demonstration(again, seed)
            assert task.score(again, text) == tasks.Score(1.0, True, answer=task.score(again, text).answer)


def test_the_splits_share_no_numbers_with_the_same_target():
    task = Countdown(numbers=2, largest=12)
    train, test = (
        {(*sorted(p.data["numbers"]), p.data["target"]) for p in puzzles(task, split, 1, 800)} for split in tasks.SPLITS
    )
    assert train
    assert test
    assert not train & test
    assert puzzles(task) == puzzles(Countdown(numbers=[2], largest=12))
    assert puzzles(task) != puzzles(task, seed=1)


GIVEN = tasks.Problem("x", "", "", {"numbers": [2, 3, 4, 4], "target": 13})


@pytest.mark.parametrize(
    ("answer", "reward", "said"),
    [
        ("2 + 3 + 4 + 4", 1.0, "which is right"),
        ("(4+4) × 2 - 3", 1.0, "which is right"),
        ("3 + 2 + 4 * 4", 0.1, "The value of the answer is 21, not 13."),
        ("9 + 4", 0.1, "uses 9, which is not one of the numbers"),
        ("3 * 3 + 4", 0.1, "uses 3 2 times, and it is given 1 times"),
        ("4 * 4 - 3", 0.1, "does not use 2"),
        ("2 + 3 + 4 + 4 = 13", 0.0, "no expression"),
        ("13", 0.1, "uses 13"),
        ("", 0.0, "no expression"),
    ],
)
def test_answers(answer, reward, said):
    text = f"<think><answer>1</answer></think><answer>{answer}</answer>"
    score = Countdown().score(GIVEN, text)
    assert (score.reward, score.correct) == (reward, reward == 1)
    assert said in Countdown().feedback(GIVEN, text)


def test_some_numbers_may_be_left_over_where_the_setting_says_so():
    assert Countdown(use="some").score(GIVEN, "<answer>3 * 3 + 4</answer>").reward == 0.1
    some = tasks.Problem("x", "", "", {"numbers": [2, 3, 10], "target": 13})
    assert Countdown(use="some").score(some, "<answer>10 + 3</answer>").correct
    assert not Countdown().score(some, "<answer>10 + 3</answer>").correct


@pytest.mark.parametrize("text", ["", "<answer>", "</answer><answer>", "<answer>" * 10**5, "(" * 10**6, "\x00\ud800"])
def test_any_text_gets_a_score(text):
    assert Countdown().score(GIVEN, text).reward == 0
    assert Countdown().score(GIVEN, f"<answer>{text}</answer>").reward == 0
    assert len(Countdown().feedback(GIVEN, text)) < 200
    assert len(Countdown().feedback(GIVEN, f"<answer>{text}</answer>")) < 200


def test_noise_makes_demonstrations_that_are_sometimes_wrong():
    task = Countdown(noise=0.5)
    right = [task.score(p, task.demonstration(p, seed)).correct for seed, p in enumerate(puzzles(task, count=200))]
    assert 60 < sum(right) < 180
    assert all(task.score(p, task.demonstration(p, noise=0.0)).correct for p in puzzles(task))


def test_the_answer_is_the_same_text_for_the_same_expression():
    one, other = (Countdown().score(GIVEN, f"<answer>{t}</answer>").answer for t in ("2+3 * 4", " 2 + 3*4 "))
    assert one == other == "2+3*4"


def test_the_episode_passes_feedback_on():
    episode = tasks.begin(Countdown(), GIVEN)
    episode.step("<answer>2 + 3</answer>")
    said = "The answer does not use 4. Use each number exactly once."
    assert episode.feedback() == Countdown().feedback(GIVEN, "<answer>2 + 3</answer>") == said
