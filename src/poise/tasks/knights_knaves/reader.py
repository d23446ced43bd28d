"""Puzzles of the public set, from its files."""

from __future__ import annotations

import ast
import gzip
import json
from collections.abc import Iterator
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

from poise.tasks.knights_knaves.puzzle import Puzzle

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")


def read(path: str | PathLike[str]) -> list[Puzzle]:
    """The puzzles of a ``.jsonl``, ``.jsonl.gz`` or ``.parquet`` file, in file order, their quiz texts as they are."""
    path = Path(path)
    if path.name.endswith(".parquet"):
        rows = _parquet(path)
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        rows = _jsonl(path)
    else:
        raise ValueError(f"{path}: cannot tell the format; the name must end in {', '.join(SUFFIXES)}")
    return [_puzzle(row, path, number) for number, row in rows]


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except (json.JSONDecodeError, RecursionError) as error:
                    raise ValueError(f"{path}, line {number}: not JSON ({error})") from None


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError:
        raise ImportError(
            f"{path}: reading parquet needs pyarrow (pip install pyarrow); .jsonl needs nothing"
        ) from None
    yield from enumerate(parquet.read_table(path).to_pylist(), 1)


def _puzzle(row: Any, path: Path, number: int) -> Puzzle:
    where = f"{path}, row {number}"
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object, got {type(row).__name__}")
    missing = [field for field in ("names", "statements", "solution", "quiz") if field not in row]
    if missing:
        raise ValueError(f"{where}: no field {missing[0]!r} (there are: {', '.join(map(str, row))})")
    statements = row["statements"]
    try:
        if isinstance(statements, str):
            statements = ast.literal_eval(statements)
        return Puzzle(tuple(row["names"]), statements, tuple(row["solution"]), row["quiz"], f"{path.name}:{number}")
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{where}: {error}") from None
