"""The data of the page: a small index, read at once, and one block per response, read when you open that response.

A block is zlib-compressed. It holds the length of the response's text, the text in UTF-8, zeros up to a multiple of 4;
in the same form, as JSON, what an environment said between the replies, each with the number of tokens before it; then
the arrays of the run's ``fields`` in order, as little-endian 4-byte numbers. Token ids are replaced by their index in
the run's ``words``.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from poise._lib.files import was_changed
from poise.algorithms.base import FIRST
from poise.reports.recorded import read_json, read_metrics, read_step
from poise.runs.folder import RunFolder
from poise.runs.metrics_file import AXES, x_values
from poise.runs.subscribers import warnings
from poise.runs.subscribers.results import change_intervals, learned
from poise.training.accuracy import is_summary, without_repeats

Block = tuple[int, int, int]  # run, step, row: the address of a response
WATCHED = (
    "config.json", "metrics.jsonl", warnings.FILE, "before.json", "summary.json", "diverged.json", "diagnose.json",
    "diagnose", "tokens",
)  # fmt: skip
CHANGED = "summary.json was changed after the run wrote it."
REWRITE = "Put it back from a copy, or have poise train --resume measure the model again."
REMEDY = "Begin again with a smaller optim.lr, or with dtype=float32."  # for a run that diverged


class Source:
    """Run folders as the page reads them. A step is read once, and again if a resumed run rewrites it."""

    def __init__(self, paths: Sequence[str | Path], x: str = "step") -> None:
        self.x = x  # what curves are drawn over until the reader chooses
        self.folders = [RunFolder.open(path, resume=False) for path in paths]
        self.names = _names([folder.path for folder in self.folders])
        self._words: list[dict[str, int]] = [{} for _ in paths]
        self._fields: list[list[str]] = [[] for _ in paths]
        self._rows: dict[tuple[int, int], tuple[int, list[dict[str, Any]]]] = {}
        self._step = lru_cache(maxsize=4)(self._read)

    def stamp(self) -> str:
        """A text that changes whenever there is something new to show."""
        watched = [path for folder in self.folders for name in WATCHED if (path := folder.path / name).exists()]
        return " ".join(f"{stat.st_mtime_ns}/{stat.st_size}" for stat in (path.stat() for path in watched))

    def index(self) -> dict[str, Any]:
        """Everything except the tokens: settings, curves, figures, and one row per response."""
        texts: dict[str, int] = {}
        rows: list[list[Any]] = []
        for run, folder in enumerate(self.folders):
            for step in folder.recorded():
                if folder.tokens_path(step).exists():
                    records = enumerate(self._records(run, step))
                    rows += [self._row(run, step, i, record, texts) for i, record in records]
        return {
            "stamp": self.stamp(),
            "axes": AXES,
            "x": self.x,
            "runs": [self._run(run) for run in range(len(self.folders))],
            "columns": ["run", "step", "row", "length", "reward", "correct", "finished", "difficulty", "problem",
                        "prompt", "parts", "role", "notes", "gold", "answer"],
            "rows": rows,
            "texts": list(texts),  # prompts and answers, which many rows share
        }  # fmt: skip

    def blocks(self) -> Iterator[tuple[Block, bytes]]:
        """The block of every response, in the order of the index's rows."""
        for run, folder in enumerate(self.folders):
            for step in folder.recorded():
                if folder.tokens_path(step).exists():
                    for row in range(len(self._records(run, step))):
                        yield (run, step, row), self.block((run, step, row))

    def block(self, at: Block) -> bytes:
        """One response, token by token. KeyError if it does not exist."""
        run, step, row = at
        if not 0 <= run < len(self.folders) or step not in self.folders[run].recorded():
            raise KeyError(at)
        records, (_, arrays) = self._records(run, step), self._step(run, step, self._written(run, step))
        if not 0 <= row < len(records):
            raise KeyError(at)
        turns = records[row].get("environment")
        head = _sized(records[row]["text"]) + _sized(json.dumps(turns) if turns else "")
        begin, end = arrays["start"][row : row + 2].tolist()
        missing = torch.full((end - begin,), torch.nan)
        columns = [arrays[name][begin:end] if name in arrays else missing for name in self._fields[run]]
        numbers = [values.numpy().astype("<i4" if values.dtype == torch.int32 else "<f4") for values in columns]
        return zlib.compress(head + b"".join(values.tobytes() for values in numbers), 6)

    def _run(self, run: int) -> dict[str, Any]:
        folder = self.folders[run]
        lines = read_metrics(folder)
        keys = sorted({key for line in lines for key in line} - {"step"})
        summary = read_json(folder, "summary.json")
        ended: dict[str, Any] = summary if isinstance(summary, dict) else {}
        return {
            "name": self.names[run],
            "config": read_json(folder, "config.json"),
            "environment": _environment(read_json(folder, "environment.json")),
            "before": _evaluation(read_json(folder, "before.json")) or _evaluation(ended.get("before")),
            "after": _evaluation(ended.get("after")),
            "done": ended.get("steps"),
            "learned": learned(ended),
            "changes": change_intervals(ended),
            "warnings": _warnings(folder, lines[-1]["step"] if lines else 0),
            "diagnose": _diagnosis(folder),
            "steps": [line["step"] for line in lines],
            "x": {axis: x_values(lines, axis) for axis in AXES},
            "metrics": {key: [line.get(key) for line in lines] for key in keys},
            "words": list(self._words[run]),
            "fields": self._fields[run],
        }

    def _row(self, run: int, step: int, i: int, record: dict[str, Any], texts: dict[str, int]) -> list[Any]:
        def number(text: str | None) -> int | None:
            return None if text is None else texts.setdefault(text, len(texts))

        return [
            run, step, i, record["length"], record["reward"], record["correct"], record["finished"],
            record["difficulty"], record["problem"], number(record["prompt"]), record["parts"],
            record.get("role", FIRST), record.get("notes", {}), number(record.get("gold")),
            number(record.get("answer")),
        ]  # fmt: skip

    def _written(self, run: int, step: int) -> int:
        return self.folders[run].tokens_path(step).stat().st_mtime_ns

    def _records(self, run: int, step: int) -> list[dict[str, Any]]:
        written = self._written(run, step)
        if self._rows.get((run, step), (0, []))[0] != written:
            records, arrays = self._step(run, step, written)
            lengths = arrays["start"].diff().tolist()
            self._rows[run, step] = written, [r | {"length": n} for r, n in zip(records, lengths, strict=True)]
        return self._rows[run, step][1]

    def _read(
        self,
        run: int,
        step: int,
        written: int,  # noqa: ARG002 - part of the cache's key
    ) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
        records, arrays, texts = read_step(self.folders[run], step)
        words, fields = self._words[run], self._fields[run]
        ids, inverse = arrays["id"].unique(return_inverse=True)
        numbers = [words.setdefault(texts[i], len(words)) for i in ids.tolist()]
        fields += [name for name in sorted(arrays, key=_order) if name != "start" and name not in fields]
        return records, arrays | {"id": torch.tensor(numbers, dtype=torch.int32)[inverse]}


def _sized(text: str) -> bytes:
    """The text, after its length, filled up with zeros to a multiple of 4."""
    encoded = text.encode("utf-8", "surrogatepass")
    return len(encoded).to_bytes(4, "little") + encoded + bytes(-len(encoded) % 4)


def _order(name: str) -> tuple[bool, str]:
    return name != "id", name


def _names(paths: Sequence[Path]) -> list[str]:
    """The folders' names, or their paths if two names are equal."""
    short = [path.resolve().name for path in paths]
    return short if len(set(short)) == len(short) else [str(path) for path in paths]


def _environment(saved: Any) -> Any:
    """``environment.json`` with the number of earlier starts in place of what it says of them."""
    earlier = saved.get("earlier_starts") if isinstance(saved, dict) else None
    return {**saved, "earlier_starts": len(earlier)} if isinstance(earlier, list) else saved


def _evaluation(summary: Any) -> dict[str, Any] | None:
    """Held-out accuracy as ``Evaluation.summary`` has it; None if it was not measured, or is damaged."""
    if not is_summary(summary):
        return None
    shown = {key: value for key, value in summary.items() if key != "by_problem"}
    return shown | {"table": without_repeats(summary["table"])}


def _warnings(folder: RunFolder, last: int) -> list[dict[str, Any]]:
    """What to know before one reads the result: the step at which it showed, what is wrong, and what to do."""
    place = str(folder.path / warnings.FILE)
    said = [asdict(warning) for warning in warnings.parse(read_json(folder, warnings.FILE), place)]
    diverged = read_json(folder, "diverged.json")
    if isinstance(diverged, dict) and not _passed(diverged.get("step"), last):
        what = f"The run diverged: {diverged.get('why')}."
        said.append({"step": diverged.get("step"), "what": what, "remedy": REMEDY})
    if was_changed(read_json(folder, "summary.json")):
        said.append({"step": 0, "what": CHANGED, "remedy": REWRITE})
    return said


def _passed(step: Any, last: int) -> bool:
    """Whether a run that diverged at a step was resumed, and has passed it."""
    return type(step) is int and step <= last


def _diagnosis(folder: RunFolder) -> dict[str, Any] | None:
    """The figures of ``poise diagnose``, without single batches, from this folder or its subfolder ``diagnose``."""
    figures = read_json(folder, "diagnose.json") or read_json(folder, "diagnose/diagnose.json")
    if figures is not None and not isinstance(figures, dict):
        raise ValueError(f"{folder.path}: diagnose.json holds no figures")
    return None if figures is None else {key: value for key, value in figures.items() if key != "batches"}
