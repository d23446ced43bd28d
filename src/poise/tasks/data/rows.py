"""Rows of a data set: read files, report unreadable rows, and compute the fingerprint of a data set."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from poise._lib.errors import UserError, how_to_install, short
from poise.tasks.base import Problem

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")
Row = dict[str, Any]
ENDINGS = ", ".join(SUFFIXES)


class DataError(UserError, ValueError):
    """The data cannot be used. The message names the file and the line, and says what to do."""


@dataclass
class Rows:
    """Rows with the row numbers that messages show, and the lines that could not be read."""

    source: str
    rows: list[tuple[int, Row]] = field(default_factory=list)
    unreadable: list[tuple[int, str]] = field(default_factory=list)  # line number, reason

    def add(self, number: int, row: Any) -> None:
        """Add ``row`` to ``rows``, or its number and the reason to ``unreadable``."""
        try:
            self.rows.append((number, plain_row(row)))
        except ValueError as error:
            self.unreadable.append((number, str(error)))


def plain_row(row: Any) -> Row:
    """Convert a row to JSON-serializable values."""
    if not isinstance(row, Mapping):
        raise ValueError(f"not an object with named fields, but {short(row)}")
    found = {str(key): plain(value) for key, value in row.items()}
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a lone surrogate, which is not valid text") from None
    return found


def read_file(source: str, path: Path) -> Rows:
    """Read the rows of a file. The file name's suffix determines the format."""
    found = Rows(source)
    try:
        if path.name.endswith(".parquet"):
            for number, row in enumerate(module("pyarrow.parquet", source).read_table(path).to_pylist(), 1):
                found.add(number, row)
        elif path.name.endswith(".csv"):
            with path.open(encoding="utf-8-sig", newline="") as lines:
                _read_csv(found, lines)
        elif path.name.endswith(".json"):
            _read_json(found, path)
        elif path.name.endswith((".jsonl", ".jsonl.gz")):
            with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    _read_line(found, number, line)
        else:
            raise DataError(f"data {source}: the name of a file must end in {ENDINGS}")
    except DataError:
        raise
    except Exception as error:  # pyarrow defines its own exceptions
        raise DataError(f"data {source} cannot be read: {type(error).__name__}: {error}") from None
    return found


def _read_line(found: Rows, number: int, line: bytes) -> None:
    if not line.strip():
        return
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        found.add(number, json.loads(text, object_pairs_hook=_object))
    except UnicodeDecodeError:
        found.unreadable.append((number, "not UTF-8"))
    except json.JSONDecodeError as error:  # str(error) would say "line 1", because each line is parsed separately
        found.unreadable.append((number, f"not JSON: {error.msg} at column {error.colno}"))
    except (ValueError, RecursionError) as error:
        found.unreadable.append((number, f"not JSON: {error}"))


def _object(pairs: list[tuple[str, Any]]) -> Row:
    """Build a row from a JSON object. Reject duplicate keys: Python would silently keep the last value."""
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError(f"the key {_twice([key for key, _ in pairs])!r} occurs twice")
    return row


def _twice(names: Sequence[str]) -> str:
    return next(name for name in names if names.count(name) > 1)


def _read_json(found: Rows, path: Path) -> None:
    """Read a list of objects, or an object that contains one such list."""
    try:
        whole = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"data {found.source} is not JSON: {error}; if each line is an object, rename the file to .jsonl"
        ) from None
    lists = [whole] if isinstance(whole, list) else [v for v in getattr(whole, "values", list)() if isinstance(v, list)]
    if len(lists) != 1:
        raise DataError(f"data {found.source}: expected a list of objects, or an object that contains one such list")
    for number, row in enumerate(lists[0], 1):
        found.add(number, row)


def _read_csv(found: Rows, lines: TextIO) -> None:
    csv.field_size_limit(sys.maxsize)
    reader = csv.DictReader(lines, strict=True)
    columns = list(reader.fieldnames or ())
    if len({*columns}) < len(columns):
        raise DataError(f"data {found.source}: the column {_twice(columns)!r} occurs twice; rename one")
    for row in reader:
        extra = row.pop(None, None)
        if extra or None in row.values():
            found.unreadable.append((reader.line_num, f"{'more' if extra else 'fewer'} fields than the header names"))
        else:
            found.add(reader.line_num, dict(row))


def module(name: str, source: str) -> Any:
    """Import a package for reading data, or raise an error that says how to install the package."""
    try:
        return import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise DataError(f"data {source}: reading it needs {package}; {how_to_install('data')}") from None


def plain(value: Any) -> Any:
    """Convert a value to JSON-serializable values; convert other types to text."""
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if hasattr(value, "tolist"):  # numpy's and torch's numbers and arrays
        return plain(value.tolist())
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def some(numbers: list[int]) -> str:
    """List the first five line numbers, for a message."""
    shown = ", ".join(map(str, numbers[:5]))
    return f"line{'s' if len(numbers) > 1 else ''} {shown}{', …' if len(numbers) > 5 else ''}"


def share(key: str) -> float:
    """Hash a key to a number from 0 to 1, so that a row stays in its split when other rows are added."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def fingerprint(problems: Mapping[str, Sequence[Problem]]) -> str:
    """Hash the problems of both splits."""
    digest = hashlib.blake2b(digest_size=16)
    for split in ("train", "test"):
        for problem in problems[split]:
            digest.update(json.dumps([split, problem.id, problem.data], sort_keys=True).encode())
    return digest.hexdigest()
