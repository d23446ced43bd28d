"""In which settings two configurations differ: those that a run was made with, and those that are asked for now."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from poise import regulators
from poise._lib import user_code
from poise.config.documents import Document, merge


class Difference(NamedTuple):
    """One setting that differs: its dotted key and both values."""

    key: str
    saved: Any
    now: Any


def differences(saved: Document, now: Document) -> Iterator[Difference]:
    """What differs. A setting that an older version lacked counts as equal, and so does a regulator written otherwise.

    ``now`` is the user's own; ``saved`` may be anybody's, and code that it alone names is not loaded.
    """
    for found in _differences(merge(now, saved), now, ""):
        if found.key != "regulator" or not _same_regulator(found.saved, found.now):
            yield found


def _differences(saved: Document, now: Document, prefix: str) -> Iterator[Difference]:
    for key, value in saved.items():
        if isinstance(value, dict) and isinstance(now.get(key), dict):
            yield from _differences(value, now[key], f"{prefix}{key}.")
        elif value != now.get(key):
            yield Difference(f"{prefix}{key}", value, now.get(key))


def _same_regulator(saved: Any, now: Any) -> bool:
    """Whether two texts mean the same: ``ar`` and ``ar(alpha=0.2)``."""
    try:
        with user_code.untrusted("the run", [now]):
            return regulators.text(regulators.parse(saved)) == regulators.text(regulators.parse(now))
    except (ValueError, TypeError):
        return False
