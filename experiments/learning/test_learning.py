"""learning.py: its tasks, its parts of files, and every path of it with models of a few thousand weights."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from poise import regulators, tasks

HERE = Path(__file__).parent

pytestmark = pytest.mark.studies

NAMES = ("Largest", "Animal", "Sums")


def own_task(name: str) -> Any:
    return tasks.get(f"{HERE}/learning_tasks.py:{name}")


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


def test_words_before_a_sum_vary_and_do_not_count() -> None:
    task = tasks.get(f"{HERE}/learning_tasks.py:Sums", low=10, high=99, digits=True, words=16)
    (problem,) = tasks.draw(task, "train", 0, 1)
    shown = [task.demonstration(problem, seed) for seed in range(200)]
    assert all(len([word for word in text.split() if word.isalpha()]) == 16 for text in shown)
    assert all(task.score(problem, text).correct for text in shown)
    assert {len({text.split()[place] for text in shown}) for place in range(16)} == {8}
    assert not task.score(problem, shown[0] + " 1").correct


def test_an_oracle_of_digits_leaves_words_alone() -> None:
    from transformers import AutoTokenizer

    from poise import TokenBatch
    from poise.models.policy import EMBEDDED

    oracle = regulators.get(f"{HERE.parent}/comparison/oracles.py:digits", model=str(EMBEDDED))
    tokenizer = AutoTokenizer.from_pretrained(str(EMBEDDED))
    targets = torch.tensor([tokenizer.encode("(1) Zoey is a knight (2)", add_special_tokens=False)])
    old = torch.full(targets.shape, -1.0)
    batch = TokenBatch(
        old_logp=old, advantages=torch.ones(1), mask=torch.ones_like(old, dtype=torch.bool), targets=targets
    )
    (phase,) = oracle(batch)
    decides = [any(map(str.isdigit, tokenizer.decode([i]))) for i in targets[0].tolist()]
    assert 0 < sum(decides) < len(decides)
    assert phase.policy.tolist() == [[float(each) for each in decides]]


def test_constant_answers_by_hand() -> None:
    problems = [
        tasks.Problem("1", "Which number is the largest: 1, 5 or 2?", "all", {"answer": "5"}),
        tasks.Problem("2", "Which number is the largest: 7, 9 or 2?", "all", {"answer": "9"}),
        tasks.Problem("3", "Which number is the largest: 5, 1 or 2?", "all", {"answer": "5"}),
    ]
    assert own_task("Largest").constants(problems) == {"answer": 2 / 3, "place": 2 / 3}


def test_a_file_in_parts_is_the_same_file_again(tmp_path: Path) -> None:
    import learning

    whole = tmp_path / "model.gguf"
    whole.write_bytes(os.urandom(1050))
    parts = learning.split(whole, tmp_path / "parts", size=100)
    assert len(parts) == 11
    (tmp_path / "again").mkdir()
    assert learning.join(tmp_path / "parts", tmp_path / "again").read_bytes() == whole.read_bytes()


@pytest.mark.long
def test_a_study_runs_its_commands_and_keeps_what_it_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import learning

    monkeypatch.setattr(sys, "argv", ["learning.py", str(tmp_path), "--tiny", "--only", "small-frozenlake"])
    monkeypatch.chdir(HERE.parents[1])  # it goes there itself, and would stay
    try:
        learning.main()
    except SystemExit:
        pytest.fail((tmp_path / "learning.log").read_text())
    found = json.loads((tmp_path / "learning.json").read_text())["studies"]["small-frozenlake"]
    assert [command.split()[1] for command in found["commands"]] == [learning.MAKE_MODEL, "train"]
    assert found["problems"]["also_in_training"] == 0
    assert found["before"]["n"] == found["after"]["n"] == 6
    assert [step["step"] for step in found["curve"]] == [1, 2]
    assert (tmp_path / "learning.png").exists()
    assert "| small-frozenlake |" in (tmp_path / "learning.md").read_text()
