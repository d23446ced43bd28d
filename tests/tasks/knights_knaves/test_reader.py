"""Public rows: read in order, refused by name, solved as they say."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from poise.tasks.knights_knaves import read, solve
from support.puzzles import public_rows


def row(**changes: Any) -> dict[str, Any]:
    return {
        "quiz": "Who?",
        "names": ["Ada", "Bruno"],
        "statements": "(('lying', 1), ('and', ('lying', 0), ('lying', 1)))",
        "solution": [True, False],
    } | changes


def test_rows_are_read_in_order(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps(row(quiz=f"Who {i}?")) for i in range(3)) + "\n\n"
    (tmp_path / "a.jsonl").write_text(lines)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(lines)
    for name in ("a.jsonl", "a.jsonl.gz"):
        found = read(tmp_path / name)
        assert [puzzle.quiz for puzzle in found] == ["Who 0?", "Who 1?", "Who 2?"]
        assert solve(found[0].statements) == [list(found[0].solution)]
        assert found[0].problem("Solve.").prompt == "Solve.\n\nWho 0?"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not JSON"),
        ("[]", "line 1: not an object"),
        (json.dumps({"quiz": ""}), "no field 'names'"),
        (json.dumps(row(statements="__import__('os')")), "row 1: "),
        (json.dumps(row(statements="(")), "row 1: "),
        (json.dumps(row(solution=[True])), "must be equal"),
        (json.dumps(row(names=["Ada", "ADA"])), "names must differ"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "bad.jsonl").write_text(line)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "bad.jsonl")


def test_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, message in (("a.txt", "must end in"), ("a.parquet", "needs pyarrow"), ("b.jsonl", "no such file")):
        if name[0] == "a":
            (tmp_path / name).touch()
        monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
        with pytest.raises(ValueError, match=message):
            read(tmp_path / name)


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([row(), row(quiz="And?")]), tmp_path / "a.parquet")
    assert [puzzle.quiz for puzzle in read(tmp_path / "a.parquet")] == ["Who?", "And?"]


def test_public_rows_are_solved_as_they_say() -> None:
    found = read(public_rows())
    assert len(found) == 4500
    for puzzle in found:
        assert solve(puzzle.statements) == [list(puzzle.solution)]
