"""The right answer as people who read a run's responses see it."""

import pytest

from poise import tasks
from poise.tasks import Problem, RewardError, gold_answer


class Own:
    name = "own"


class Says(Own):
    def __init__(self, said):
        self.said = said

    def gold(self, problem):  # noqa: ARG002
        if isinstance(self.said, Exception):
            raise self.said
        return self.said


@pytest.mark.parametrize(
    ("data", "gold"),
    [
        ({"answer": "42"}, "42"),
        ({"answer": 42}, "42"),
        ({"answer": [True], "solution": "yes"}, "yes"),
        ({"row": {"question": "?", "ground_truth": " 7 "}}, "7"),
        ({"row": "no row"}, None),
        ({"answer": ""}, None),
        ({}, None),
        (None, None),
    ],
)
def test_a_task_without_a_word_on_it_has_the_answer_in_its_data(data, gold):
    assert gold_answer(Own(), Problem("p", "?", "all", data)) == gold


def test_a_setting_of_that_name_is_not_asked():
    task = Own()
    task.gold = "the column's name"
    assert gold_answer(task, Problem("p", "?", "all", {"answer": "42"})) == "42"


def test_a_number_too_long_to_write_is_not_shown():
    assert gold_answer(Own(), Problem("p", "?", "all", {"answer": 10**5000})) is None


def test_a_task_may_say_it_itself():
    problem = Problem("p", "?", "all", {"answer": "not this"})
    assert gold_answer(Says("this"), problem) == "this"
    assert gold_answer(Says(None), problem) is None
    assert len(gold_answer(Says("x" * 10_000), problem)) == 4000
    with pytest.raises(
        RewardError,
        match=r"the gold answer of task 'own' raised KeyError: 'a' \(.*test_gold\.py, line \d+\) \(problem p\)",
    ):
        gold_answer(Says(KeyError("a")), problem)


@pytest.mark.parametrize("name", ["kk", "search-qa"])
def test_tasks_that_ship_show_it(name):
    task = tasks.get(name)
    problem = tasks.draw(task, "train", 0, 1)[0]
    gold = gold_answer(task, problem)
    text = f"<think>Hm.</think><answer>{gold}</answer>"
    episode = tasks.begin(task, problem)
    episode.start()
    episode.step(text)
    assert tasks.judge(task, problem, episode).correct
