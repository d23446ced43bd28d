"""Rewards in TRL's shape: lists in, a number for each completion out. Columns of the data come by their names."""

import re
from typing import Any


def correct(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 where the last number of a completion is the right answer."""
    numbers = [re.findall(r"-?\d+", completion) for completion in completions]
    return [float(bool(found) and found[-1] == right) for found, right in zip(numbers, answer, strict=True)]


def brief(completions: list[str], **_: Any) -> list[float]:
    """From 1 for an empty completion down to 0 for one of 100 characters or more."""
    return [max(0.0, 1 - len(completion) / 100) for completion in completions]
