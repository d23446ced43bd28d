"""What every error of ours has in common: it names the value and, where it can be guessed, what was meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Real


def unknown(what: str, name: str, allowed: Iterable[str]) -> str:
    """The message for a name that is not among ``allowed``, with the nearest one that is."""
    options = list(allowed)
    plain = {option.lower(): option for option in options}
    near = get_close_matches(name.lower(), plain, n=1, cutoff=0.5)
    guess = f"; did you mean {plain[near[0]]!r}?" if near else ""
    listed = ", ".join(options) if options else "there are none"
    return f"unknown {what} {name!r}{guess} (allowed: {listed})"


def check_range(
    owner: str,
    name: str,
    value: float,
    low: float = float("-inf"),
    high: float = float("inf"),
) -> None:
    """Raise unless ``low <= value <= high``. NaN, booleans and text are refused too."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{owner}: {name} must be a number, got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{owner}: {name} must be between {low} and {high}, got {value!r}")


def check_choice(owner: str, name: str, value: str, allowed: Iterable[str]) -> None:
    """Raise unless ``value`` is one of ``allowed``."""
    options = list(allowed)
    if value not in options:
        raise ValueError(f"{owner}: " + unknown(name, str(value), options))
