"""What kind of value a task's setting takes, by its annotation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from inspect import signature
from os import PathLike
from typing import Any

from poise._lib.errors import short


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
