"""Reads the records of a run folder and checks them first: they may be damaged, or made by an attacker."""

from __future__ import annotations

import zlib
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from poise.algorithms.base import FIRST
from poise.runs.folder import RunFolder

LAST_STEP = 10**12 - 1
TEXTS = ("problem", "difficulty", "prompt", "text")
NEEDED = ("logp", "entropy", "advantage")


class Step(NamedTuple):
    """The records of a step: its responses, arrays of all their tokens end to end, and the text of each token id."""

    records: list[dict[str, Any]]
    arrays: dict[str, Tensor]
    texts: dict[int, str]


def read_json(folder: RunFolder, name: str) -> Any:
    """The contents of a JSON file of the run, None if the file does not exist. ValueError if it cannot be read."""
    path = folder.path / name
    try:
        _check_file(path)
        return folder.read_json(name)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def read_metrics(folder: RunFolder) -> list[dict[str, Any]]:
    """One dict per step. Values that cannot be drawn in a curve become None."""
    path = folder.path / "metrics.jsonl"
    try:
        _check_file(path)
        lines = folder.metrics()
    except RecursionError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not all(isinstance(line.get("step"), int) and 0 <= line["step"] <= LAST_STEP for line in lines):
        raise ValueError(f"{path}: a line has no step number")
    return [{key: _plain_number(value) for key, value in line.items()} for line in lines]


def read_step(folder: RunFolder, step: int) -> Step:
    """The responses and tokens of a step. ValueError if they cannot be read."""
    tokens = folder.tokens_path(step)
    rollouts = folder.path / "rollouts" / f"{tokens.stem}.jsonl.gz"
    try:
        _check_file(tokens)
        _check_file(rollouts)
        _check(0 <= step <= LAST_STEP, f"the last step that can be shown is {LAST_STEP}")
        tokens_and_texts, records = folder.tokens(step), folder.rollouts(step)
        assert tokens_and_texts is not None
        return _checked(records, *tokens_and_texts)
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        EOFError,
        OSError,
        RecursionError,
        zlib.error,
        SafetensorError,
    ) as error:
        why = str(error) or type(error).__name__
        raise ValueError(f"step {step} of {folder.path} cannot be read: {why}") from None


def _plain_number(value: Any) -> float | int | None:
    usable = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return value if usable else None


def _check_file(path: Path) -> None:
    """ValueError if the path is something other than a file: reading a pipe or a device could block for ever."""
    _check(path.is_file() or not path.exists(), f"{path} is not a file")


def _check(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def _checked(records: list[dict[str, Any]], arrays: dict[str, Tensor], texts: dict[int, str]) -> Step:
    for number, record in enumerate(records):
        _check_record(record, f"response {number}")
    start, ids = arrays["start"], arrays["id"]
    for name, values in arrays.items():
        _check(values.dim() == 1 and not values.is_complex(), f"{name} is not a list of numbers")
        _check(name == "start" or len(values) == len(ids), f"{name} has {len(values)} values for {len(ids)} tokens")
    whole = not start.is_floating_point() and not ids.is_floating_point()
    _check(whole, "start and id are not whole numbers")
    _check(len(start) == len(records) + 1, f"{len(records)} responses, but tokens of {len(start) - 1} responses")
    ordered = bool((start.diff() >= 0).all()) and int(start[0]) == 0 and int(start[-1]) == len(ids)
    _check(ordered, "start does not divide the tokens into responses")
    for name in NEEDED:
        _check(name in arrays, f"the tokens have no {name}")
    _check(any(name.startswith("weight/") for name in arrays), "the tokens have no weight")
    _check(all(isinstance(text, str) for text in texts.values()), "the text of a token is not a string")
    missing = set(ids.unique().tolist()) - texts.keys()
    _check(not missing, f"token {min(missing, default=0)} has no text")
    exact = {name: values if name in ("start", "id") else values.to(torch.float32) for name, values in arrays.items()}
    return Step(records, exact, texts)


def _check_record(record: dict[str, Any], name: str) -> None:
    for key in TEXTS:
        _check(isinstance(record[key], str), f"{name}: {key} is not a string")
    for key in ("gold", "answer"):
        _check(isinstance(record.get(key, ""), str), f"{name}: {key} is not a string")
    turns = record.get("environment", [])
    usable = isinstance(turns, list) and all(
        isinstance(turn, list) and len(turn) == 2 and type(turn[0]) is int and isinstance(turn[1], str)
        for turn in turns
    )
    _check(usable, f"{name}: environment is not a list of numbers and texts")
    _check(isinstance(record.get("role", FIRST), str), f"{name}: role is not a string")
    _check(isinstance(record.get("notes", {}), dict), f"{name}: notes are not a group of numbers")
    for key in ("correct", "finished"):
        _check(isinstance(record[key], bool), f"{name}: {key} is neither true nor false")
    for key, value in [("reward", record["reward"]), *record["parts"].items(), *record.get("notes", {}).items()]:
        usable = value is None or (isinstance(value, int | float) and abs(value) < inf)
        _check(usable, f"{name}: {key} is not a number")
