"""The task: problems, prompts, settings, the table of names."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from poise import tasks
from poise.tasks.base import Problem
from poise.tasks.knights_knaves import KnightsKnaves, Puzzle
from support.puzzles import response


def test_problems_are_reproducible_survive_json_and_take_turns() -> None:
    task = KnightsKnaves(people="2-4")
    first = list(islice(task.problems("train", 3), 6))
    assert first == list(islice(task.problems("train", 3), 6))
    assert first != list(islice(task.problems("train", 4), 6))
    assert [problem.difficulty for problem in first] == ["2", "3", "4"] * 2
    for problem in first:
        again = Problem(problem.id, problem.prompt, problem.difficulty, json.loads(json.dumps(problem.data)))
        assert Puzzle.of(again) == Puzzle.of(problem)
        assert task.score(again, response(task.gold(again))).correct
        assert problem.prompt.startswith(task.instruction)
        assert problem.prompt.endswith(problem.data["quiz"])


def test_people_come_as_number_range_or_list() -> None:
    assert KnightsKnaves(people=5).counts == (5,)
    assert KnightsKnaves(people="3-7").counts == (3, 4, 5, 6, 7)
    assert KnightsKnaves(people="4").counts == (4,)
    assert KnightsKnaves(people=[2, 8]).counts == (2, 8)
    for wrong in ("7-3", "three", "3-99", (), 1, True, (3, "4")):
        with pytest.raises((ValueError, TypeError), match="people"):
            KnightsKnaves(people=wrong)  # type: ignore[arg-type]


def test_the_table_of_tasks() -> None:
    assert "kk" in tasks.names()
    task = tasks.get("kk", people="2-3")
    assert task.name == "kk"
    with pytest.raises(ValueError, match="unknown task 'kkk'; did you mean 'kk'"):
        tasks.get("kkk")
    with pytest.raises(TypeError, match="unknown setting 'peple'; did you mean 'people'"):
        tasks.get("kk", peple=3)
    with pytest.raises(ValueError, match="unknown split 'tset'; did you mean 'test'"):
        next(task.problems("tset", 0))  # type: ignore[arg-type]
