"""Quotations of text that a model wrote."""

from __future__ import annotations

LONGEST = 60  # characters


def quote(text: str, longest: int = LONGEST) -> str:
    r"""A text in quotation marks, on one line, cut short, without characters that cannot be seen.

    >>> quote("a\n b\x00")
    '"a b?"'
    """
    start = " ".join(text[: 4 * longest].split())
    start = "".join(char if char.isprintable() else "?" for char in start)
    cut = len(start) > longest or len(text) > 4 * longest
    return f'"{start[:longest]}..."' if cut else f'"{start}"'
