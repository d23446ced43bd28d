"""The sources of data: files, folders, data sets on the hub with configurations and splits, and objects in memory."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any

from poise._lib import live
from poise._lib.errors import check_range, short, unknown
from poise._lib.files import expand
from poise.tasks.data.rows import ENDINGS, SUFFIXES, DataError, Row, Rows, module, read_file

TRAIN = "train"
HELD_OUT = ("test", "validation")  # names of held-out splits, tried in this order
OFF = "off"  # a value of ``test_split``: hold out a share of the training split
IN_MEMORY = "in memory"
LONGEST_REASON = 500  # characters shown of an error message from datasets


@dataclass(frozen=True)
class Source:
    """One data set. ``name`` is a path, a hub id, a table in memory, or ``python:name`` for a Python object.

    ``weight`` is the relative weight of the data set in a mixture.
    """

    name: Any
    config: str | None = None
    split: str | None = None
    test_split: str | None = None
    streaming: bool = False
    weight: float = 1.0

    def __post_init__(self) -> None:
        for key in ("config", "split", "test_split"):
            if not isinstance(value := getattr(self, key), str | None):
                raise DataError(f"data {self}: {key} must be text, got {short(value)}")
        if not isinstance(self.streaming, bool):
            raise DataError(f"data {self}: streaming must be true or false, got {short(self.streaming)}")
        check_range(f"data {self}", "weight", self.weight, 1e-9)

    def __str__(self) -> str:
        if not isinstance(self.name, str | PathLike):
            return IN_MEMORY
        return f"{self.name} {self.config}" if self.config else str(self.name)

    @property
    def in_memory(self) -> bool:
        """Whether the data is a Python object."""
        return live.is_name(self.name) or not isinstance(self.name, str | PathLike)


def sources_of(data: Any, questions: Iterable[str], **defaults: Any) -> list[Source]:
    """Return the data sets of a setting: a name, a group of settings with a name, a list of these, or rows in memory.

    A list contains rows if its first entry is a dict without ``name``, or with one of the columns ``questions``.
    """
    several = isinstance(data, list | tuple) and bool(data) and _is_named(data[0], questions)
    return [_source(each, defaults) for each in (data if several else [data])]


def _is_named(value: Any, questions: Iterable[str]) -> bool:
    return isinstance(value, str) or (
        isinstance(value, Mapping) and "name" in value and not any(column in value for column in questions)
    )


def _source(value: Any, defaults: Mapping[str, Any]) -> Source:
    if not (isinstance(value, Mapping) and "name" in value):
        return Source(value, **defaults)
    allowed = [field.name for field in fields(Source)]
    if wrong := [str(key) for key in value if key not in allowed]:
        raise DataError("data: " + unknown("setting of a data set", wrong[0], allowed))
    return Source(**{**defaults, **value})


class Tables:
    """The tables of a data set: a single table, or one table per split.

    ``rows`` reads only the first ``buffer`` rows of a streamed table.
    """

    def __init__(self, source: Source, buffer: int = sys.maxsize) -> None:
        self.source, self.buffer = source, buffer
        found = _load(source)
        self.splits: Mapping[str, Any] | None = found if isinstance(found, Mapping) else None
        self._table = found
        some = next(iter(self.splits.values()), None) if self.splits is not None else found
        endless = source.in_memory and not hasattr(some, "__len__")
        self.streamed = source.streaming or endless

    def training(self) -> str:
        """Return the name of the training split."""
        return self.source.split or TRAIN

    def held_out(self) -> str | None:
        """Return the name of the held-out split; None if there is none or ``test_split`` is ``off``."""
        named = self.source.test_split
        if named not in (None, OFF) and self.splits is None:
            raise DataError(f"data {self.source} has no splits: remove test_split, or set task.test_file=FILE")
        if named is not None:
            return None if named == OFF else named
        return next((name for name in HELD_OUT if name in (self.splits or ()) and name != self.training()), None)

    def only_held_out(self) -> str:
        """Return the split to use if the whole data set is held out."""
        named, splits = self.source.split or self.source.test_split, list(self.splits or ())
        if named or not splits:
            return named or TRAIN
        if found := next((name for name in HELD_OUT if name in splits), None):
            return found
        if len(splits) > 1:
            listed = ", ".join(splits)
            raise DataError(f"data {self.source} has the splits {listed}: choose one with task.test_split=NAME")
        return splits[0]

    def table(self, split: str, setting: str = "split") -> Any:
        """Return the table of a split, without converting it."""
        if self.splits is None:
            return self._table
        if split in self.splits:
            return self.splits[split]
        if re.search(r"[\[+]", split) and _on_hub(self.source) and not self.streamed:
            return _load(self.source, split)  # a slice such as "train[:1000]", which only datasets can read
        names = ", ".join(self.splits)
        columns = "; if these are columns, pass datasets.Dataset.from_dict(data)" if type(self.splits) is dict else ""
        raise DataError(
            f"data {self.source} has no split {split!r}, but {names}; choose one with task.{setting}=NAME{columns}"
        )

    def rows(self, split: str, setting: str = "split") -> Rows:
        """Return the rows of a split. ``setting`` is the setting that chose the split, for messages."""
        table = self.table(split, setting)
        if isinstance(table, Rows):
            return table
        found = Rows(str(self.source) if self.splits is None or split == TRAIN else f"{self.source} {split}")
        for number, row in enumerate(islice(each_row(table), self.buffer if self.streamed else None), 1):
            found.add(number, row)
        return found


def each_row(table: Any) -> Iterable[Row]:
    """Return the rows of a ``datasets`` table, a pandas table, a list, or any object with ``len()`` and indexing."""
    if hasattr(table, "to_dict") and hasattr(table, "columns"):
        rows: list[Row] = table.to_dict("records")
        return rows
    return table if hasattr(table, "__iter__") else (table[place] for place in range(len(table)))


def read_all(name: str) -> list[tuple[int, Row]]:
    """Read the rows of a file, or of a data set's training split, with their row numbers.

    Raise an error if a row cannot be read or there are no rows.
    """
    tables = Tables(Source(name))
    found = tables.rows(tables.training())
    if found.unreadable:
        number, why = found.unreadable[0]
        more = f" ({len(found.unreadable)} such lines)" if len(found.unreadable) > 1 else ""
        raise DataError(f"data {name}, line {number}: {why}{more}")
    if not found.rows:
        raise DataError(f"data {name} has no rows")
    return found.rows


def _load(source: Source, split: str | None = None) -> Any:
    """Load a source: a table, or a dict of tables by split."""
    if source.in_memory:
        return _in_memory(source)
    name = str(source.name)
    path = expand(name)
    saved = any((path / mark).exists() for mark in ("dataset_info.json", "dataset_dict.json"))
    if path.is_file() or saved:
        _refuse_hub_settings(source)
        return read_file(name, path) if path.is_file() else _loaded(source, "load_from_disk", str(path))
    if path.is_dir() and not (path / "README.md").exists():
        raise DataError(
            f"data {name}: this folder has neither files of datasets' save_to_disk nor a data set's README.md: name a "
            "file in it"
        )
    if path.is_dir() or _may_be_hub_id(name, path):
        config = [] if source.config is None else [source.config]
        # With streaming, datasets reads a folder's files; otherwise it would use a cached copy of their old content.
        options: dict[str, Any] = {"streaming": True} if source.streaming or path.is_dir() else {}
        options |= {} if split is None else {"split": split}
        return _loaded(source, "load_dataset", str(path) if path.is_dir() else name, *config, **options)
    raise DataError(f"data {name}: there is no such file or folder; poise reads files that end in {ENDINGS}")


def _in_memory(source: Source) -> Any:
    _refuse_hub_settings(source)
    found = live.resolve(source.name)
    for table in found.values() if isinstance(found, Mapping) else [found]:
        if isinstance(table, str | bytes) or not (hasattr(table, "__getitem__") or hasattr(table, "__iter__")):
            raise DataError(f"data must be a file, a hub id, a datasets.Dataset or a list of rows, got {short(table)}")
        if not hasattr(table, "__len__") and iter(table) is table:
            raise DataError(f"data {short(table)} can be read only once: pass a list of its rows")
    return found


def _refuse_hub_settings(source: Source) -> None:
    for key in ("config", "streaming"):
        if getattr(source, key):
            raise DataError(
                f"data {source}: {key} is only for data sets on the hub and folders with a data set's README.md"
            )


def _on_hub(source: Source) -> bool:
    return not source.in_memory and not expand(str(source.name)).exists()


def _may_be_hub_id(name: str, path: Path) -> bool:
    # Names on the hub have dots too (owner/words-v1.5).
    is_file = path.name.lower().endswith((*SUFFIXES, ".txt", ".tsv", ".gz"))
    return name.count("/") <= 1 and not name.startswith((".", "~", "/")) and not is_file


def _loaded(source: Source, function: str, *arguments: Any, **options: Any) -> Any:
    """Call a function of ``datasets``. If it fails, raise an error that says what to do."""
    datasets = module("datasets", str(source.name))
    try:
        return getattr(datasets, function)(*arguments, **options)
    except Exception as error:  # the hub and datasets raise exceptions of many types
        why = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_REASON]
        if "Config name is missing" in why or "BuilderConfig" in why:
            hint = "; choose one with data.config=NAME"
        else:
            hint = "; poise looked on the hub: check the network and the name" * _on_hub(source)
        raise DataError(f"data {source} cannot be loaded ({why}){hint}") from None
