"""The recording of another trainer's run: a token file, or a folder of token files, which may still be growing.

The first scan of the files stores the file offsets of each step's lines; later scans read only new lines. So the cost
is linear in the size of the files, and only one step is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from poise._lib.files import loads
from poise.referee.report.reader import DAMAGED, Step, check_file
from poise.referee.report.token_row import Row, joined, parse
from poise.referee.report.token_texts import Decoder
from poise.referee.report.weighing import step_metrics

PATTERNS = ("*.jsonl", "step_*/*.jsonl", "token_exports/step_*/*.jsonl")  # poise's; prime-rl's, from two folders
OTHERS = ("metrics.jsonl",)  # JSON lines in run folders, not token files
MODELS = ("config.json", "adapter_config.json")  # mark the folder of a run or a model
LONGEST_LINE = 2**26  # bytes
LONGEST_REASON = 160  # the most characters of the reason why a line was skipped
NAMED = 5  # damaged lines that are described individually


def token_files(path: Path) -> list[Path]:
    """The token files at a path: the file itself, or a folder's token files; empty for the folder of a run or model."""
    if path.suffix == ".jsonl" and not path.is_dir():
        return [path] if path.exists() else []
    if not path.is_dir() or any((path / name).exists() for name in MODELS):
        return []
    return sorted(file for pattern in PATTERNS for file in path.glob(pattern) if file.name not in OTHERS)


class TokenFiles:
    """Like ``RunRecording``, but for token files. ``decode`` turns token ids into text, for lines without texts."""

    def __init__(self, path: Path, decode: Callable[[list[int]], str] | None = None) -> None:
        self.path, self._decoder = path, Decoder(decode)
        self._started = 0  # grows when reading starts over because a file was replaced
        self._forget()
        if not self.steps():
            why = "; ".join(self.skipped()) or "no line has been written yet"
            raise ValueError(f"{path} has no readable response: {why}")

    def _forget(self) -> None:
        self._started += 1
        self._places: dict[int, list[tuple[Path, int]]] = {}  # file and offset of each step's lines
        self._ends: dict[Path, tuple[int, int]] = {}  # bytes and lines read so far, by file
        self._metrics: dict[int, tuple[Hashable, dict[str, float]]] = {}
        self._damaged, self._damaged_count = list[str](), 0

    def steps(self) -> list[int]:
        """The steps in the current files."""
        files = self.files()
        if any(file.stat().st_size < self._ends.get(file, (0, 0))[0] for file in files):
            self._forget()
        for file in files:
            self._scan(file)
        return sorted(self._places)

    def version(self, step: int) -> Hashable:
        """A value that changes when the step gets more lines; None if the step is not recorded."""
        places = self._places.get(step)
        return (self._started, len(places)) if places else None

    def read(self, step: int) -> Step:
        """Read the responses and tokens of a step from all files."""
        rows: list[Row] = []
        try:
            for path, offset in self._places[step]:
                with path.open("rb") as file:
                    file.seek(offset)
                    rows.append(self._row(file.readline(LONGEST_LINE)))
        except ValueError:
            self._forget()  # a resumed run has replaced the file
            raise
        found = joined(rows)
        self._metrics[step] = self.version(step), step_metrics(found)
        return found

    def metrics(self) -> list[dict[str, Any]]:
        """The metrics, one dict per step, computed from the tokens."""
        steps = self.steps()
        for step in steps:
            if self._metrics.get(step, (None,))[0] != self.version(step):
                self.read(step)
        return [{"step": step, **self._metrics[step][1]} for step in steps]

    def files(self) -> list[Path]:
        """The token files."""
        return token_files(self.path)

    def json(self, _: str) -> None:
        """Return None: token files come without JSON files."""

    def skipped(self) -> list[str]:
        """Messages about the first few damaged lines, and the number of the others."""
        more = self._damaged_count - len(self._damaged)
        return [*self._damaged, f"{more:,} more lines of {self.path} cannot be read"] if more else self._damaged

    def _scan(self, path: Path) -> None:
        """Store the offsets of lines added since the last scan."""
        check_file(path)
        with path.open("rb") as file:
            offset, number = self._ends.get(path, (0, 0))
            file.seek(offset)
            for line in _lines(file):
                try:
                    if line.strip():
                        step = self._row(line).step
                        self._places.setdefault(step, []).append((path, offset))
                except ValueError as error:
                    if not line.endswith(b"\n"):  # the line is still being written, or the writer was killed
                        return
                    self._damaged_count += 1
                    if len(self._damaged) < NAMED:
                        self._damaged.append(f"{path}, line {number + 1} is skipped: {error}")
                offset, number = file.tell(), number + 1
                self._ends[path] = offset, number

    def _row(self, line: bytes) -> Row:
        if len(line) > LONGEST_LINE:
            raise ValueError(f"it is longer than {LONGEST_LINE:,} bytes")
        try:
            return parse(loads(line), self._decoder)
        except DAMAGED as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise ValueError(f"{kind}{error}"[:LONGEST_REASON]) from None


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file. A line over ``LONGEST_LINE`` bytes is cut, but stays long enough to be rejected."""
    while line := file.readline(LONGEST_LINE + 1):
        rest = line
        while len(line) > LONGEST_LINE and rest and not rest.endswith(b"\n"):
            rest = file.readline(LONGEST_LINE)
        yield line if rest is line else line[:LONGEST_LINE] + b" \n"
