"""What generated tasks share: sizes as settings, and problems drawn until one belongs to the split."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from hashlib import sha256
from random import Random
from typing import TypeVar

from poise._lib.errors import check_range
from poise.tasks.base import Split

TEST_SHARE = 10  # one meaning in this many is for testing
PATIENCE = 20_000  # draws in a row that belong to the other split

T = TypeVar("T")


def split_of(meaning: str, share: int = TEST_SHARE) -> Split:
    """The split of a problem, by its meaning alone. Equal problems have equal meanings, so none is in both splits."""
    digest = sha256(meaning.encode(errors="surrogatepass")).digest()
    return "test" if int.from_bytes(digest[:8], "big") % share == 0 else "train"


def draw_of_split(
    owner: str,
    split: Split,
    rng: Random,
    draw: Callable[[Random], tuple[str, T]],
    suits: Callable[[T], bool] = lambda _: True,
    share: int = TEST_SHARE,
) -> T:
    """Draw until the meaning belongs to ``split`` and what has it ``suits``, which is asked second: it may be slow."""
    for _ in range(PATIENCE):
        meaning, found = draw(rng)
        if split_of(meaning, share) == split and suits(found):
            return found
    raise RuntimeError(
        f"{owner}: no {split} problem among {PATIENCE} draws: these settings allow too few different problems; "
        "widen them"
    )


def sizes(owner: str, name: str, value: int | str | Sequence[int], low: int, high: int) -> tuple[int, ...]:
    """The whole numbers that a setting such as ``5``, ``(3, 4)`` or ``"3-7"`` means, each from ``low`` to ``high``."""
    numbers: int | Sequence[int]
    if not isinstance(value, str):
        numbers = value
    elif match := re.fullmatch(r"\s*(\d{1,3})\s*(?:-\s*(\d{1,3})\s*)?", value):
        numbers = range(int(match[1]), int(match[2] or match[1]) + 1)
    else:
        raise ValueError(f"{owner}: {name} must be like 5, (3, 4) or '3-7', got {value!r}")
    found = tuple(numbers) if isinstance(numbers, Sequence) else (numbers,)
    if not found:
        raise ValueError(f"{owner}: {name} = {value!r} is empty; in a range the smaller number comes first")
    for one in found:
        check_whole(owner, name, one, low, high)
    return found


def check_whole(owner: str, name: str, value: int, low: int, high: int) -> None:
    """Raise unless ``value`` is a whole number from ``low`` to ``high``."""
    check_range(owner, name, value, low, high)
    if not isinstance(value, int):
        raise TypeError(f"{owner}: {name} must be a whole number, got {value!r}")
