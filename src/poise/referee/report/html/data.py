"""The data of the page: a small index, loaded first, and one block per response, loaded when the reader opens it.

A block is zlib-compressed. It contains the length of the response's text, the text in UTF-8, and zeros up to a multiple
of 4. A JSON string with the environment's messages follows in the same form; each message has the number of tokens
before it. Then follow the arrays of the run's ``fields`` in order, as little-endian 4-byte numbers. Token ids are
replaced by their index in the run's ``words``.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from poise._lib.files import was_changed
from poise.referee.report.reader import RunRecording
from poise.referee.report.token_files import TokenFiles, token_files
from poise.runs.axes import AXES, x_values
from poise.runs.folder import RunFolder
from poise.runs.subscribers import warnings
from poise.runs.subscribers.summary import learned, measured_changes
from poise.sampling.trajectories import FIRST
from poise.training.accuracy import is_summary, without_repeats

Recording = RunRecording | TokenFiles
Decode = Callable[[list[int]], str]  # a tokenizer's method
Block = tuple[int, int, int]  # run, step, row: the address of a response
CHANGED = "summary.json was changed after the run wrote it."
REWRITE = "Restore it from a copy, or measure the model again with poise train --resume."
REMEDY = "Start again with a smaller optim.lr, or with dtype=float32."  # for a diverged run
COLUMNS = [
    *("run", "step", "row", "length", "reward", "correct", "finished", "difficulty"),
    *("problem", "prompt", "read", "parts", "role", "notes", "gold", "answer"),
]


class Source:
    """The runs of a page. Caches the rows of all steps and the tokens of four, until a resumed run rewrites a step."""

    def __init__(self, paths: Sequence[str | Path], x: str = "step", decode: Decode | None = None) -> None:
        self.x = x  # the x axis of curves until the reader chooses another
        self.runs: list[Recording] = [
            TokenFiles(path, decode) if token_files(path) else RunRecording(RunFolder.open(path, resume=False))
            for path in map(Path, paths)
        ]
        self.names = _names([run.path for run in self.runs])
        self._words: list[dict[str, int]] = [{} for _ in paths]
        self._fields: list[list[str]] = [[] for _ in paths]
        self._rows: dict[tuple[int, int], tuple[Hashable, list[dict[str, Any]]]] = {}
        self._step = lru_cache(maxsize=4)(self._read)

    def stamp(self) -> str:
        """A string that changes whenever a file of a run changes."""
        stats = [path.stat() for run in self.runs for path in run.files()]
        return " ".join(f"{stat.st_mtime_ns}/{stat.st_size}" for stat in stats)

    def index(self) -> dict[str, Any]:
        """All data except the tokens: settings, curves, results, and one row per response."""
        texts: dict[str, int] = {}
        rows: list[list[Any]] = []
        for run, recording in enumerate(self.runs):
            for step in recording.steps():
                rows += [self._row(run, step, i, record, texts) for i, record in enumerate(self._records(run, step))]
        return {
            "stamp": self.stamp(),
            "axes": AXES,
            "x": self.x,
            "runs": [self._run(run) for run in range(len(self.runs))],
            "columns": COLUMNS,
            "rows": rows,
            "texts": list(texts),  # prompts and answers, stored once for many rows
        }

    def blocks(self) -> Iterator[bytes]:
        """The block of every response, in the order of the index's rows."""
        for run, recording in enumerate(self.runs):
            for step in recording.steps():
                for row in range(len(self._records(run, step))):
                    yield self.block((run, step, row))

    def block(self, at: Block) -> bytes:
        """The block of one response. Raises KeyError if it does not exist."""
        run, step, row = at
        if not 0 <= run < len(self.runs) or (version := self.runs[run].version(step)) is None:
            raise KeyError(at)
        records, (_, arrays) = self._records(run, step), self._step(run, step, version)
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
        recording = self.runs[run]
        lines = recording.metrics()
        keys = sorted({key for line in lines for key in line} - {"step"})
        summary = recording.json("summary.json")
        final: dict[str, Any] = summary if isinstance(summary, dict) else {}
        return {
            "name": self.names[run],
            "config": recording.json("config.json"),
            "environment": _environment(recording.json("environment.json")),
            "before": _evaluation(recording.json("before.json")) or _evaluation(final.get("before")),
            "after": _evaluation(final.get("after")),
            "done": final.get("steps"),
            "learned": learned(final),
            "changes": {each.name: each.interval for each in measured_changes(final)},
            "warnings": _warnings(recording, lines[-1]["step"] if lines else 0),
            "diagnose": _diagnosis(recording),
            "steps": [line["step"] for line in lines],
            "x": {axis: x_values(lines, axis) for axis in AXES},
            "metrics": {key: [line.get(key) for line in lines] for key in keys},
            "words": list(self._words[run]),
            "fields": self._fields[run],
        }

    def _row(self, run: int, step: int, i: int, record: dict[str, Any], texts: dict[str, int]) -> list[Any]:
        def number(text: str | None) -> int | None:
            return None if text is None else texts.setdefault(text, len(texts))

        values = {"role": FIRST, "notes": {}, **record, "run": run, "step": step, "row": i}
        values |= {name: number(record.get(name)) for name in ("prompt", "read", "gold", "answer")}
        return [values[name] for name in COLUMNS]

    def _records(self, run: int, step: int) -> list[dict[str, Any]]:
        version = self.runs[run].version(step)
        if version is None:  # removed after the index was built
            raise FileNotFoundError(f"step {step} of {self.runs[run].path} has just been removed")
        if self._rows.get((run, step), (None, []))[0] != version:
            records, arrays = self._step(run, step, version)
            lengths = arrays["start"].diff().tolist()
            self._rows[run, step] = version, [r | {"length": n} for r, n in zip(records, lengths, strict=True)]
        return self._rows[run, step][1]

    def _read(
        self,
        run: int,
        step: int,
        version: Hashable,  # noqa: ARG002 - part of the cache's key
    ) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
        records, arrays, texts = self.runs[run].read(step)
        words, fields = self._words[run], self._fields[run]
        ids, inverse = arrays["id"].unique(return_inverse=True)
        numbers = [words.setdefault(texts[i], len(words)) for i in ids.tolist()]
        fields += [name for name in sorted(arrays, key=_order) if name != "start" and name not in fields]
        return records, arrays | {"id": torch.tensor(numbers, dtype=torch.int32)[inverse]}


def _sized(text: str) -> bytes:
    """The text's length, the text, and zeros up to a multiple of 4."""
    encoded = text.encode("utf-8", "surrogatepass")
    return len(encoded).to_bytes(4, "little") + encoded + bytes(-len(encoded) % 4)


def _order(name: str) -> tuple[bool, str]:
    return name != "id", name


def _names(paths: Sequence[Path]) -> list[str]:
    """The folders' names, or their paths if two names are equal."""
    short = [path.resolve().name for path in paths]
    return short if len(set(short)) == len(short) else [str(path) for path in paths]


def _environment(saved: Any) -> Any:
    """``environment.json``, with earlier starts replaced by their number."""
    earlier = saved.get("earlier_starts") if isinstance(saved, dict) else None
    return {**saved, "earlier_starts": len(earlier)} if isinstance(earlier, list) else saved


def _evaluation(summary: Any) -> dict[str, Any] | None:
    """The summary of an evaluation for the page; None if it is missing or damaged."""
    if not is_summary(summary):
        return None
    figures = {key: value for key, value in summary.items() if key != "by_problem"}
    return figures | {"table": without_repeats(summary["table"], summary.get("temperature"))}


def _warnings(recording: Recording, last: int) -> list[dict[str, Any]]:
    """Warnings about the run: the step, what is wrong, and what to do."""
    place = str(recording.path / warnings.FILE)
    rows = [asdict(warning) for warning in warnings.parse(recording.json(warnings.FILE), place)]
    diverged = recording.json("diverged.json")
    if isinstance(diverged, dict) and type(step := diverged.get("step")) is int and step > last:  # no later step
        rows.append({"step": step, "what": f"The run diverged: {diverged.get('why')}.", "remedy": REMEDY})
    if was_changed(recording.json("summary.json")):
        rows.append({"step": 0, "what": CHANGED, "remedy": REWRITE})
    return rows + [{"step": 0, "what": what, "remedy": ""} for what in recording.skipped()]


def _diagnosis(recording: Recording) -> dict[str, Any] | None:
    """The results of ``poise diagnose``, averaged over batches, from this folder or its subfolder ``diagnose``."""
    figures = recording.json("diagnose.json") or recording.json("diagnose/diagnose.json")
    if figures is not None and not isinstance(figures, dict):
        raise ValueError(f"{recording.path}: diagnose.json holds no figures")
    return None if figures is None else {key: value for key, value in figures.items() if key != "batches"}
