"""Puzzles of the public set, from its files."""

from __future__ import annotations

import ast
from os import PathLike
from pathlib import Path

from poise.tasks.data.rows import Row, read_all
from poise.tasks.knights_knaves.puzzle import Puzzle


def read(path: str | PathLike[str]) -> list[Puzzle]:
    """The puzzles of a file (``.jsonl``, ``.parquet``, …), in file order, their quiz texts as they are."""
    return [_puzzle(row, Path(path), number) for number, row in read_all(str(path))]


def _puzzle(row: Row, path: Path, number: int) -> Puzzle:
    where = f"{path}, row {number}"
    missing = [field for field in ("names", "statements", "solution", "quiz") if field not in row]
    if missing:
        raise ValueError(f"{where}: no field {missing[0]!r} (there are: {', '.join(row)})")
    statements = row["statements"]
    try:
        if isinstance(statements, str):
            statements = ast.literal_eval(statements)
        return Puzzle(tuple(row["names"]), statements, tuple(row["solution"]), row["quiz"], f"{path.name}:{number}")
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{where}: {error}") from None
