"""``metrics.jsonl``: a JSON object for each step, one a line; and what its curves can be drawn over.

It is appended to, so a kill may tear the last line. Readers ignore a torn line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeGuard

from poise._lib.files import dumps, loads, replacing

Record = dict[str, Any]
COPY = "put the file back from a copy"
AXES = {"step": "step", "tokens": "sampled tokens", "seconds": "seconds"}  # name: label
LARGEST = 1e300  # nothing draws larger values


class DamagedError(ValueError):
    """A file of a run is not what poise wrote. The message names it, and says what to do."""


class MetricsFile:
    """The metrics of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of one step. NaN and infinities become null."""
        if "step" in metrics:
            raise ValueError("metrics: the name 'step' is reserved for the step's number")
        numbers = {name: value if isinstance(value, int) else float(value) for name, value in metrics.items()}
        line = dumps({"step": step, **numbers})
        with self.path.open("ab", buffering=0) as file:
            before = file.tell()
            try:
                while line:
                    line = line[file.write(line) :]
            except OSError:  # disk full: leave no half line before the next one
                os.truncate(self.path, before)
                raise

    def records(self) -> list[Record]:
        """The metrics of every step, including "step"."""
        return [record for _, record in self._lines()]

    def rewrite(self, change: Callable[[Record], Record | None]) -> None:
        """Replace each line by what ``change`` makes of it; None removes it. A torn last line goes too."""
        changed = ((line, record, change(record)) for line, record in self._lines())
        text = b"".join(line if new is old else dumps(new) for line, old, new in changed if new is not None)
        if self.path.exists() and self.path.read_bytes() != text:
            with replacing(self.path) as file:
                file.write(text)

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        if self.path.exists():
            with self.path.open("r+b") as file:
                os.fsync(file.fileno())

    def _lines(self) -> Iterator[tuple[bytes, Record]]:
        text = self.path.read_bytes() if self.path.exists() else b""
        *lines, torn = text.split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                record = dict(loads(line))
                record = {**record, "step": int(record["step"])}
            except (ValueError, TypeError, KeyError, OverflowError):
                # A power cut may leave a last line of the right length with wrong bytes.
                if number == len(lines) and not torn:
                    return
                why = f"this is not a JSON object with a step: {line[:60]!r}"
                raise DamagedError(f"{self.path}, line {number}: {why}; remove the line, or {COPY}") from None
            yield line + b"\n", record


def x_values(metrics: Sequence[Mapping[str, Any]], axis: str) -> list[float] | None:
    """Where each record of ``RunFolder.metrics()`` lies on an axis; None if the run has not recorded that.

    Seconds are those of the steps, without evaluations and pauses. A record that is no step, such as an evaluation,
    lies where the step before it does.
    """
    if axis == "step":
        return [record["step"] for record in metrics]
    key = {"tokens": "tokens/total", "seconds": "time/step"}[axis]
    if not any(drawable(record.get(key)) for record in metrics):
        return None
    values = (float(value) if drawable(value := record.get(key)) else 0.0 for record in metrics)
    return [*accumulate(values, max if axis == "tokens" else None)]


def drawable(value: Any) -> TypeGuard[float]:
    """Whether a value of a metrics file, which may be anybody's, is a number that can be drawn."""
    return isinstance(value, int | float) and abs(value) < LARGEST
