"""benchmarks/learning.py: its tasks, its parts of files, and every path of it with models of a few thousand weights."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from poise import tasks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


NAMES = ("Largest", "Animal", "Sums")


def own_task(name: str) -> Any:
    return tasks.get(f"{BENCHMARKS}/learning_tasks.py:{name}")


def test_held_out_questions_are_different_ones_and_none_is_trained_on() -> None:
    for name in NAMES:
        task = own_task(name)
        held_out, trained = tasks.draw(task, "test", 0, 500), tasks.draw(task, "train", 5, 2000)
        assert len({problem.prompt for problem in held_out}) == 500
        assert not {problem.id for problem in held_out} & {problem.id for problem in trained}
        for problem in held_out[:20]:
            assert task.score(problem, task.demonstration(problem)).correct
            assert not task.score(problem, "I do not know.").correct


@pytest.mark.parametrize(
    ("name", "data", "reply", "right"),
    [
        ("Sums", {"answer": "109", "options": []}, "27 + 82 = 109.", True),
        ("Sums", {"answer": "1090", "options": []}, "It is 1,090", True),
        ("Sums", {"answer": "109", "options": []}, "109 is more than 100", False),
        ("Animal", {"answer": "cow", "options": ["cow", "hat"]}, "A cow, as you know", True),
        ("Animal", {"answer": "cow", "options": ["cow", "hat"]}, "A cow is no hat", False),
        ("Animal", {"answer": "cow", "options": ["cow", "hat"]}, "Cowboys", False),
    ],
)
def test_the_last_answer_counts(name: str, data: dict[str, Any], reply: str, right: bool) -> None:
    assert own_task(name).score(tasks.Problem("1", "?", "all", data), reply).correct is right


def test_constant_answers_by_hand() -> None:
    problems = [
        tasks.Problem("1", "Which number is the largest: 1, 5 or 2?", "all", {"answer": "5"}),
        tasks.Problem("2", "Which number is the largest: 7, 9 or 2?", "all", {"answer": "9"}),
        tasks.Problem("3", "Which number is the largest: 5, 1 or 2?", "all", {"answer": "5"}),
    ]
    assert own_task("Largest").constants(problems) == {"answer": 2 / 3, "place": 2 / 3}


def test_a_file_in_parts_is_the_same_file_again(benchmarks: None, tmp_path: Path) -> None:  # noqa: ARG001
    import learning

    whole = tmp_path / "model.gguf"
    whole.write_bytes(os.urandom(1050))
    parts = learning.split(whole, tmp_path / "parts", size=100)
    assert len(parts) == 11
    (tmp_path / "again").mkdir()
    assert learning.join(tmp_path / "parts", tmp_path / "again").read_bytes() == whole.read_bytes()


@pytest.mark.long
def test_a_study_runs_its_commands_and_keeps_what_it_found(
    benchmarks: None,  # noqa: ARG001
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import learning

    monkeypatch.setattr(sys, "argv", ["learning.py", str(tmp_path), "--tiny", "--only", "small-frozenlake"])
    monkeypatch.chdir(BENCHMARKS.parent)  # it goes there itself, and would stay
    try:
        learning.main()
    except SystemExit:
        pytest.fail((tmp_path / "learning.log").read_text())
    found = json.loads((tmp_path / "learning.json").read_text())["studies"]["small-frozenlake"]
    assert [command.split()[1] for command in found["commands"]] == ["warmstart", "train"]
    assert found["problems"]["also_in_training"] == 0
    assert found["before"]["n"] == found["after"]["n"] == 6
    assert [step["step"] for step in found["curve"]] == [1, 2]
    assert (tmp_path / "learning.png").exists()
    assert "| small-frozenlake |" in (tmp_path / "learning.md").read_text()
