"""Error messages and checks. A message names the value, what is allowed and, if it can be guessed, the intended value.

Messages may show text that a model wrote, which is untrusted: ``quote`` and ``visible`` make it safe to print.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from math import inf
from numbers import Real

# How to install an extra, for messages. CONTRIBUTING.md, "Release", has the command for the package index.
INSTALL = "in your clone of poise run: pip install -e '.[{extra}]' -c constraints.txt"
LONGEST = 100  # characters of a value shown in a message
LONGEST_QUOTE = 60  # characters of a text that a model wrote
MOST_LISTED = 50  # with more allowed names, a message shows only the likely one


class UserError(Exception):
    """An error that tells the user what to do. The command line prints it without a traceback."""


class _Short(reprlib.Repr):
    """``repr`` for messages: a user's value may be a million characters long, or contain itself."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = LONGEST
        self.maxlist = self.maxtuple = self.maxset = self.maxdict = 10

    def repr_int(self, x: int, level: int) -> str:  # noqa: ARG002
        """Describe a very long integer by its bits: Python refuses to print more than 4300 digits."""
        return repr(x) if abs(x) < 10**LONGEST else f"a whole number of {x.bit_length()} bits"


short = _Short().repr


def unknown(what: str, name: str, allowed: Iterable[str]) -> str:
    """The message for a name that is not in ``allowed``, with the nearest allowed name as a guess."""
    options = list(allowed)
    by_lower_case = {option.lower(): option for option in options}
    near = get_close_matches(name[:LONGEST].lower(), by_lower_case, n=1, cutoff=0.5)
    guess = f"; did you mean {by_lower_case[near[0]]!r}?" if near else ""
    if guess and len(options) > MOST_LISTED:
        return f"unknown {what} {short(name)}{guess} ({len(options)} names are allowed)"
    listed = ", ".join(options) if options else "there are none"
    return f"unknown {what} {short(name)}{guess} (allowed: {listed})"


def misspelt(name: str, names: Iterable[str]) -> str | None:
    """The entry of ``names`` that resembles ``name``; None if ``name`` is an entry itself, or resembles none."""
    options = list(names)
    near = [] if name in options else get_close_matches(name[:LONGEST].lower(), options, n=1, cutoff=0.8)
    return near[0] if near else None


def counted(count: int, noun: str) -> str:
    """A number and its noun: "1 row", "1,200 rows"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def bytes_text(size: float) -> str:
    """A size in MB or GB, such as 23.4 MB or 137 GB."""
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"


def how_to_install(extra: str) -> str:
    """The command that installs an extra."""
    return INSTALL.format(extra=extra)


def check_range(owner: str, name: str, value: float, low: float = -inf, high: float = inf) -> None:
    """Raise an error unless ``low <= value <= high``. Also refuses NaN, booleans and text."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{owner}: {name} must be a number, got {short(value)}")
    if not low <= value <= high:
        raise ValueError(f"{owner}: {name} must be between {low} and {high}, got {short(value)}")


def check_whole(owner: str, name: str, value: int, low: int, high: float = inf) -> None:
    """Raise an error unless ``value`` is a whole number from ``low`` to ``high``."""
    check_range(owner, name, value, low, high)
    if not isinstance(value, int):
        raise TypeError(f"{owner}: {name} must be a whole number, got {short(value)}")


def check_choice(owner: str, name: str, value: str, allowed: Iterable[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``allowed``."""
    options = list(allowed)
    if value not in options:
        raise ValueError(f"{owner}: " + unknown(name, str(value), options))


def check_settings(name: str, settings: Iterable[str], allowed: Iterable[str], hint: str = "") -> None:
    """Raise TypeError if ``settings`` has a name that is not in ``allowed``. ``hint`` ends the message."""
    options = list(allowed)
    for key in settings:
        if key not in options:
            raise TypeError(unknown(f"setting of {name}", key, options) + hint)


def quote(text: str, longest: int = LONGEST_QUOTE) -> str:
    r"""Quote a model's text on one line: cut short, with ? for invisible characters.

    >>> quote("a\n b\x00")
    '"a b?"'
    """
    start = " ".join(text[: 4 * longest].split())
    start = "".join(char if char.isprintable() else "?" for char in start)
    cut = len(start) > longest or len(text) > 4 * longest
    return f'"{start[:longest]}..."' if cut else f'"{start}"'


# Fonts do not draw these characters, so different texts could look the same. str.isprintable accepts them. They
# have Unicode's property Default_Ignorable_Code_Point, which Python does not offer.
IGNORABLE = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u3164\uffa0"  # joiner, fillers, inherent vowels
    + "".join(map(chr, [*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)]))  # variation selectors
)


def visible(text: str) -> str:
    """Replace control and invisible characters by escapes such as ``\\x1b``. Line breaks stay."""
    return "".join(
        char
        if char == "\n" or (char.isprintable() and char not in IGNORABLE)
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def complain(text: str) -> None:
    """Print a message to standard error."""
    print(visible(text), file=sys.stderr, flush=True)
