"""What tasks share: checks of their settings, and problems drawn until one belongs to the split."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import sha256
from inspect import signature
from os import PathLike
from random import Random
from typing import Any, TypeVar

from poise._lib.errors import check_whole, short
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


def _texts(value: Any) -> bool:
    one = isinstance(value, str | bytes | Mapping) or not isinstance(value, Collection)
    return not one and all(isinstance(each, str) for each in value)


def _switch(value: Any) -> bool:
    """True, false, numpy's, and 1 and 0, which YAML files of old have."""
    return not hasattr(value, "__len__") and value in (0, 1)


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "str": (lambda value: isinstance(value, str | PathLike), "text"),
    "bool": (_switch, "true or false"),
    "None": (lambda value: value is None, "null"),
    "Sequence[str]": (_texts, "a list of texts"),
    "Mapping[str, Any]": (lambda value: isinstance(value, Mapping), "a group of settings, key: value"),
}


def check_kinds(name: str, maker: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """Raise if a setting of the task takes text, true or false, or texts, and its value is of another kind.

    Otherwise the task would fail in the midst of a run, or take ``slippery=no-thanks`` for true. Numbers are left to
    the task, which knows their range, and so are annotations with any other part.
    """
    parameters = signature(maker).parameters
    for key, value in settings.items():
        written = str(parameters[key].annotation) if key in parameters else ""
        kinds = [_KINDS.get(part.strip()) for part in written.split("|")]
        known = [kind for kind in kinds if kind is not None]
        if len(known) == len(kinds) and not any(fits(value) for fits, _ in known):
            raise TypeError(f"{name}: {key} must be {' or '.join(words for _, words in known)}, got {short(value)}")
