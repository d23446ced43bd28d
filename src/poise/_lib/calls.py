"""Parse ``name(setting=value, …)`` from settings, without evaluating any code."""

from __future__ import annotations

import ast
import re
from typing import Any

from poise._lib.errors import short


def read_call(text: str, whole: str | None = None) -> tuple[str, list[Any], dict[str, Any]]:
    """The name, the positional values and the named values. Values are Python literals.

    ``whole`` is the longer text that ``text`` is a part of, for error messages.
    """
    whole = text if whole is None else whole
    match = re.fullmatch(r"\s*([\w.:/~-]+)\s*(?:\((.*)\))?\s*", text, re.DOTALL)
    if not match:
        raise ValueError(f"cannot read {short(text.strip())} in {short(whole)}; write name(setting=value) | name(...)")
    name, inside = match[1], match[2] or ""
    try:
        call = ast.parse(f"f({inside})", mode="eval").body
        assert isinstance(call, ast.Call)
        args = [ast.literal_eval(node) for node in call.args]
        settings = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError, AssertionError, RecursionError, MemoryError):
        raise ValueError(
            f"cannot read the settings of {short(name)} in {short(whole)}; write {name}(setting=value, ...)"
        ) from None
    return name, args, settings


def split_bars(text: str) -> list[str]:
    """Split at the bars that stand outside brackets and quotes."""
    parts, depth, quote, start = [], 0, "", 0
    for i, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "|" and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]
