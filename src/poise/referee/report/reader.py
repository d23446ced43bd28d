"""Reads and checks the files of a run folder, which may be damaged or malicious.

``RunRecording`` reads the page's data from a run folder; ``token_files`` reads the same data from another trainer's
export.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from poise.runs.folder import LAST_STEP, RunFolder
from poise.sampling.trajectories import FIRST

DAMAGED = (  # errors that a damaged or foreign file may raise
    *(ValueError, TypeError, KeyError, AttributeError, EOFError, OSError, OverflowError, RuntimeError),
    *(zlib.error, SafetensorError),
)
TEXTS = ("problem", "difficulty", "prompt", "text")
NEEDED = ("logp", "entropy", "advantage")
FILES = (  # files that the page reads
    *("config.json", "metrics.jsonl", "tokens", "warnings.json", "before.json", "summary.json", "diverged.json"),
    *("diagnose.json", "diagnose"),
)


class Step(NamedTuple):
    """A recorded step: its responses, arrays over all their tokens, and the text of each token id."""

    records: list[dict[str, Any]]
    arrays: dict[str, Tensor]
    texts: dict[int, str]


class RunRecording:
    """A run's recorded responses by step, and its metrics and JSON files."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.path = folder, folder.path

    def steps(self) -> list[int]:
        """The steps that have both files, the responses and the tokens."""
        return [step for step in self.folder.recorded() if self.folder.tokens_path(step).exists()]

    def version(self, step: int) -> Hashable:
        """A value that changes when the step is rewritten; None if the step is not recorded."""
        tokens = self.folder.tokens_path(step)
        return tokens.stat().st_mtime_ns if self.folder.rollouts_path(step).exists() and tokens.exists() else None

    def read(self, step: int) -> Step:
        """Read the responses and tokens of a step. Raises ValueError if its files cannot be read."""
        folder = self.folder
        try:
            check_file(folder.tokens_path(step))
            check_file(folder.rollouts_path(step))
            check(0 <= step <= LAST_STEP, f"the last step that can be shown is {LAST_STEP}")
            tokens_and_texts, records = folder.tokens(step), folder.rollouts(step)
            assert tokens_and_texts is not None
            return _checked(records, *tokens_and_texts)
        except DAMAGED as error:
            why = str(error) or type(error).__name__
            raise ValueError(f"step {step} of {folder.path} cannot be read: {why}") from None

    def metrics(self) -> list[dict[str, Any]]:
        """The metrics, one dict per step."""
        return self.folder.metrics()

    def files(self) -> list[Path]:
        """The files and folders that change while the run continues."""
        return [path for name in FILES if (path := self.path / name).exists()]

    def json(self, name: str) -> Any:
        """The contents of a JSON file of the run folder; None if the file does not exist."""
        return self.folder.read_json(name)

    def skipped(self) -> list[str]:
        """Messages about skipped data: always empty, because reading a damaged run folder raises an error."""
        return []


def check_file(path: Path) -> None:
    """Raise ValueError if the path is not a file: reading a pipe or a device could block forever."""
    check(path.is_file() or not path.exists(), f"{path} is not a file")


def check(condition: bool, problem: str) -> None:
    """Raise ValueError unless the condition holds."""
    if not condition:
        raise ValueError(problem)


def _checked(records: list[dict[str, Any]], arrays: dict[str, Tensor], texts: dict[int, str]) -> Step:
    for number, record in enumerate(records):
        check_record(record, f"response {number}")
    start, ids = arrays["start"], arrays["id"]
    for name, values in arrays.items():
        check(values.dim() == 1 and not values.is_complex(), f"{name} is not a list of numbers")
        check(name == "start" or len(values) == len(ids), f"{name} has {len(values)} values for {len(ids)} tokens")
    whole = not start.is_floating_point() and not ids.is_floating_point()
    check(whole, "start and id are not whole numbers")
    check(len(start) == len(records) + 1, f"{len(records)} responses, but tokens of {len(start) - 1} responses")
    ordered = bool((start.diff() >= 0).all()) and int(start[0]) == 0 and int(start[-1]) == len(ids)
    check(ordered, "start does not divide the tokens into responses")
    for name in NEEDED:
        check(name in arrays, f"the tokens have no {name}")
    check(any(name.startswith("weight/") for name in arrays), "the tokens have no weight")
    check(all(isinstance(text, str) for text in texts.values()), "the text of a token is not a string")
    missing = set(ids.unique().tolist()) - texts.keys()
    check(not missing, f"token {min(missing, default=0)} has no text")
    exact = {name: values if name in ("start", "id") else values.to(torch.float32) for name, values in arrays.items()}
    return Step(records, exact, texts)


def check_record(record: dict[str, Any], name: str) -> None:
    """Raise ValueError unless the page can show this record of a response."""
    for key in TEXTS:
        check(isinstance(record[key], str), f"{name}: {key} is not a string")
    for key in ("read", "gold", "answer"):
        check(isinstance(record.get(key, ""), str), f"{name}: {key} is not a string")
    turns = record.get("environment", [])
    usable = isinstance(turns, list) and all(
        isinstance(turn, list) and len(turn) == 2 and type(turn[0]) is int and isinstance(turn[1], str)
        for turn in turns
    )
    check(usable, f"{name}: environment is not a list of pairs (number, text)")
    check(isinstance(record.get("role", FIRST), str), f"{name}: role is not a string")
    check(isinstance(record.get("notes", {}), dict), f"{name}: notes is not a mapping of names to numbers")
    for key in ("correct", "finished"):
        check(isinstance(record[key], bool | None), f"{name}: {key} is neither true nor false")
    for key, value in [("reward", record["reward"]), *record["parts"].items(), *record.get("notes", {}).items()]:
        usable = value is None or (isinstance(value, int | float) and abs(value) < inf)
        check(usable, f"{name}: {key} is not a number")
