"""Rows of a dataset, wherever it comes from: a file, a folder saved by ``datasets``, or a hub id."""

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

from poise._lib.errors import how_to_install, short
from poise._lib.files import expand
from poise.tasks.base import Problem

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")
# What names of other files end in. Names on the hub have dots too (owner/words-v1.5), so this is a list.
OTHER_SUFFIXES = (
    ".txt", ".tsv", ".xls", ".xlsx", ".yaml", ".yml", ".ndjson", ".jsonlines", ".arrow", ".feather", ".pkl", ".py",
    ".md", ".xml", ".html", ".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".db", ".sqlite", ".npy", ".npz", ".pt",
)  # fmt: skip
Row = dict[str, Any]
_ENDINGS = ", ".join(SUFFIXES)


class DataError(ValueError):
    """Data that cannot be used; the message says which file, which line, and what to do."""


@dataclass
class Rows:
    """Rows with the number by which a person finds them, and the lines that could not be read."""

    source: str
    rows: list[tuple[int, Row]] = field(default_factory=list)
    unreadable: list[tuple[int, str]] = field(default_factory=list)  # line, why

    def add(self, number: int, row: Any) -> None:
        """A row, if it is one."""
        if not isinstance(row, dict):
            self.unreadable.append((number, f"not an object with named fields, but {short(row)}"))
            return
        row = {str(key): plain(value) for key, value in row.items()}
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            self.unreadable.append((number, "half of a surrogate pair, which no text may have"))
        else:
            self.rows.append((number, row))


def read(source: str, split: str = "train") -> Rows:
    """The rows of a file, of a folder that ``datasets`` saved, or of a hub id. ``split`` is for the last two."""
    path = expand(source)
    if path.is_dir():
        return _from_datasets(source, split, saved=path)
    if path.is_file():
        return _from_file(source, path)
    if _may_be_hub_id(source, path):
        return _from_datasets(source, split)
    raise DataError(f"data {source}: there is no such file or folder; files that can be read end in {_ENDINGS}")


def read_all(source: str) -> list[tuple[int, Row]]:
    """The rows of a file; raises where a line cannot be read, or where there are none."""
    found = read(source)
    if found.unreadable:
        number, why = found.unreadable[0]
        more = f" ({len(found.unreadable)} such lines)" if len(found.unreadable) > 1 else ""
        raise DataError(f"data {source}, line {number}: {why}{more}")
    if not found.rows:
        raise DataError(f"data {source} has no rows")
    return found.rows


def splits_of(source: str) -> list[str]:
    """The names of the splits that a folder saved by ``datasets`` has; none for anything else."""
    try:
        return list(json.loads((expand(source) / "dataset_dict.json").read_text())["splits"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _may_be_hub_id(source: str, path: Path) -> bool:
    is_file = path.name.lower().endswith(SUFFIXES + OTHER_SUFFIXES)
    return source.count("/") <= 1 and not source.startswith((".", "~", "/")) and not is_file


def _from_file(source: str, path: Path) -> Rows:
    found = Rows(source)
    try:
        if path.name.endswith(".parquet"):
            for number, row in enumerate(_module("pyarrow.parquet", source).read_table(path).to_pylist(), 1):
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
            raise DataError(f"data {source}: the name of a file must end in {_ENDINGS}")
    except DataError:
        raise
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"data {source} cannot be read: {error}") from None
    except Exception as error:  # pyarrow has exceptions of its own
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
    except json.JSONDecodeError as error:  # whose own text says "line 1", which is the line in question
        found.unreadable.append((number, f"not JSON: {error.msg} at column {error.colno}"))
    except (ValueError, RecursionError) as error:
        found.unreadable.append((number, f"not JSON: {error}"))


def _object(pairs: list[tuple[str, Any]]) -> Row:
    """A JSON object. Of a key that is there twice, Python would keep the last value without a word."""
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError(f"the key {_twice([key for key, _ in pairs])!r} is there twice")
    return row


def _twice(names: Sequence[str]) -> str:
    return next(name for name in names if names.count(name) > 1)


def _read_json(found: Rows, path: Path) -> None:
    """A list of objects, or an object with one such list."""
    try:
        whole = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise DataError(f"data {found.source} is not JSON: {error}; for one object per line name it .jsonl") from None
    lists = [whole] if isinstance(whole, list) else [v for v in getattr(whole, "values", list)() if isinstance(v, list)]
    if len(lists) != 1:
        raise DataError(f"data {found.source}: expected a list of objects, or an object with one such list")
    for number, row in enumerate(lists[0], 1):
        found.add(number, row)


def _read_csv(found: Rows, lines: TextIO) -> None:
    csv.field_size_limit(sys.maxsize)
    reader = csv.DictReader(lines, strict=True)
    columns = list(reader.fieldnames or ())
    if len({*columns}) < len(columns):
        raise DataError(f"data {found.source}: the column {_twice(columns)!r} is there twice; rename one")
    for row in reader:
        extra = row.pop(None, None)
        if extra or None in row.values():
            found.unreadable.append((reader.line_num, f"{'more' if extra else 'fewer'} fields than the header names"))
        else:
            found.add(reader.line_num, dict(row))


def _from_datasets(source: str, split: str, saved: Path | None = None) -> Rows:
    datasets = _module("datasets", source)
    if saved and not any((saved / name).exists() for name in ("dataset_info.json", "dataset_dict.json")):
        raise DataError(f"data {source} is a folder, and not one that datasets' save_to_disk wrote; name a file in it")
    try:
        loaded = datasets.load_from_disk(str(saved)) if saved else datasets.load_dataset(source)
    except Exception as error:  # the hub's and datasets' exceptions are many
        why = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        hint = "" if saved else f"; no file or folder {source!r} is here, so it was looked for on the hub: is there a "
        hint += "" if saved else "network, and is the name right?"
        raise DataError(f"data {source} cannot be loaded ({why}){hint}") from None
    if isinstance(loaded, dict):  # a DatasetDict
        if split not in loaded:
            names = ", ".join(loaded)
            raise DataError(f"data {source} has no split {split!r}, but {names}; choose one: task.split=NAME")
        loaded = loaded[split]
    found = Rows(source)
    for number, row in enumerate(loaded, 1):
        found.add(number, row)
    return found


def _module(name: str, source: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise DataError(f"data {source}: reading it needs {package}; {how_to_install('data')}") from None


def plain(value: Any) -> Any:
    """A value that survives a trip through JSON: what else a row holds becomes text."""
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def some(numbers: list[int], limit: int = 5) -> str:
    """The first few line numbers, for a message."""
    shown = ", ".join(map(str, numbers[:limit]))
    return f"line{'s' if len(numbers) > 1 else ''} {shown}{', …' if len(numbers) > limit else ''}"


def share(key: str) -> float:
    """A number from 0 to 1 by a hash of the key: a row stays in its split whatever rows are added beside it."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def fingerprint(problems: Mapping[str, Sequence[Problem]]) -> str:
    """A hash of the problems of both splits."""
    digest = hashlib.blake2b(digest_size=16)
    for split in ("train", "test"):
        for problem in problems[split]:
            digest.update(json.dumps([split, problem.id, problem.data], sort_keys=True).encode())
    return digest.hexdigest()
