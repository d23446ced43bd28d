"""Knights & Knaves from files in the public format: finite, in epochs, train and test apart by meaning."""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from poise import tasks
from poise.tasks.knights_knaves import Puzzle, canonical, generate, read
from poise.tasks.knights_knaves.task import KnightsKnaves
from support.puzzles import response


def row(puzzle: Puzzle) -> dict[str, Any]:
    return {
        "names": list(puzzle.names),
        "statements": repr(puzzle.statements),  # the public files hold them as text
        "solution": list(puzzle.solution),
        "quiz": puzzle.quiz,
    }


def written(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return str(path)


@pytest.fixture(scope="module")
def puzzles() -> list[Puzzle]:
    return [generate(2 + seed % 3, seed) for seed in range(150)]


@pytest.fixture
def file(tmp_path: Path, puzzles: list[Puzzle]) -> str:
    return written(tmp_path / "puzzles.jsonl", [row(puzzle) for puzzle in puzzles])


def from_file(file: str, **settings: Any) -> KnightsKnaves:
    task = tasks.get("kk", file=file, **settings)
    assert isinstance(task, KnightsKnaves)
    return task


def test_every_puzzle_is_in_one_split_and_no_meaning_in_both(file: str, puzzles: list[Puzzle]) -> None:
    task = from_file(file)
    parts = {split: task.epoch(split, 0, 0) for split in ("train", "test")}
    forms = [{canonical(Puzzle.of(problem).statements) for problem in part} for part in parts.values()]
    assert forms[0]
    assert forms[1]
    assert not forms[0] & forms[1]
    quizzes = sorted(problem.data["quiz"] for part in parts.values() for problem in part)
    assert quizzes == sorted(puzzle.quiz for puzzle in puzzles)
    assert task.people == (2, 3, 4)


def test_an_epoch_is_an_order_that_seed_and_number_fix(file: str) -> None:
    task, again = from_file(file), from_file(file)
    assert task.epoch("train", 3, 1) == again.epoch("train", 3, 1)
    orders = [
        [problem.id for problem in task.epoch("train", seed, number)] for seed, number in ((3, 1), (3, 2), (4, 1))
    ]
    assert len({tuple(order) for order in orders}) == 3
    assert len({tuple(sorted(order)) for order in orders}) == 1
    first, second = task.epoch("train", 3, 0), task.epoch("train", 3, 1)
    assert list(islice(task.problems("train", 3), len(first) + 5)) == [*first, *second[:5]]


def test_other_puzzles_have_another_fingerprint(tmp_path: Path, file: str, puzzles: list[Puzzle]) -> None:
    assert from_file(file).fingerprint == from_file(file).fingerprint
    turned = [row(puzzles[1]), row(puzzles[0]), *map(row, puzzles[2:])]
    (tmp_path / "later").mkdir()
    other = written(tmp_path / "later" / "puzzles.jsonl", turned)
    assert from_file(file).fingerprint != from_file(other).fingerprint
    assert not hasattr(tasks.get("kk"), "fingerprint")


def test_training_walks_through_the_epochs(file: str) -> None:
    task = from_file(file)
    size = len(task.epoch("train", 3, 0))
    steps = [tasks.training_problems(task, seed=3, step=step, step_seed=0, count=50) for step in (1, 2, 3, 4)]
    walked = [problem for found in steps for problem in found]
    assert walked == [*task.epoch("train", 3, 0), *task.epoch("train", 3, 1)][:200]
    assert 50 < size < 200  # some step crosses the end of an epoch


def test_people_choose_among_the_files_puzzles(file: str, puzzles: list[Puzzle]) -> None:
    task = from_file(file, people="3-7")
    found = [problem for split in ("train", "test") for problem in task.epoch(split, 0, 0)]
    assert len(found) == sum(puzzle.people > 2 for puzzle in puzzles)
    assert task.people == (3, 4)


def test_problems_of_a_file_are_scored(file: str) -> None:
    task = from_file(file)
    for problem in task.epoch("train", 0, 0)[:10]:
        assert task.score(problem, response(task.gold(problem))).correct


def test_generated_puzzles_have_no_epochs() -> None:
    task = tasks.get("kk")
    assert not hasattr(task, "epoch")
    assert task.counts == (3, 4, 5, 6, 7)  # type: ignore[attr-defined]


def test_the_public_fields_are_read_packed_or_not(tmp_path: Path, file: str) -> None:
    packed = tmp_path / "puzzles.jsonl.gz"
    packed.write_bytes(gzip.compress(Path(file).read_bytes()))
    assert [p.quiz for p in read(packed)] == [p.quiz for p in read(file)]
    assert from_file(str(packed)).epoch("test", 0, 0)[0].id.startswith("puzzles.jsonl.gz:")


def test_mistakes_are_named(tmp_path: Path, file: str, puzzles: list[Puzzle]) -> None:
    good = row(puzzles[0])
    wrong = {
        "no such": ("gone.jsonl", None),
        "no rows": ("empty.jsonl", []),
        "row 2: no field 'solution'": ("missing.jsonl", [good, {k: v for k, v in good.items() if k != "solution"}]),
        "lies.jsonl, row 1: the puzzle's solution is wrong, or not the only one": (
            "lies.jsonl",
            [good | {"solution": [not x for x in good["solution"]]}],
        ),
        "must end in": ("puzzles.txt", []),
    }
    for message, (name, rows) in wrong.items():
        path = tmp_path / name
        with pytest.raises(ValueError, match=f"(?i){message}"):
            from_file(str(path) if rows is None else written(path, rows))
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(Path(file).read_bytes())[:500])
    with pytest.raises(ValueError, match="cannot be read"):
        from_file(str(cut))
    with pytest.raises(ValueError, match="no puzzle with 9 people"):
        from_file(file, people=9)
    with pytest.raises(ValueError, match="depth is a setting of generated puzzles"):
        from_file(file, depth=2)
    one = from_file(written(tmp_path / "one.jsonl", [good]))
    absent = "test" if one.of_file["train"] else "train"
    with pytest.raises(tasks.TaskError, match=f"no problem in split {absent}"):
        tasks.draw(one, absent, 0, 1)  # type: ignore[arg-type]
