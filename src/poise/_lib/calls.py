"""Parse ``name(setting=value, …)`` from settings, without evaluating any code."""

from __future__ import annotations

import ast
import re
from threading import RLock
from typing import Any

from poise._lib.errors import short

YAML_WORDS = {"true": True, "false": False, "null": None}
_PARSING = RLock()


def syntax_tree(source: str | bytes, mode: str = "exec") -> Any:
    """``ast.parse``, in one thread at a time.

    Python 3.11 raises SystemError if several threads parse at the same time.
    """
    with _PARSING:
        return ast.parse(source, mode=mode)


def read_call(text: str, whole: str | None = None) -> tuple[str, list[Any], dict[str, Any]]:
    """Parse a call into its name, its positional values and its named values.

    Values are Python literals, or YAML's ``true``, ``false`` and ``null``. ``whole`` is a longer text that contains
    ``text``, for error messages.
    """
    whole = text if whole is None else whole
    match = re.fullmatch(r"\s*([\w.:/~-]+)\s*(?:\((.*)\))?\s*", text, re.DOTALL)
    if not match:
        raise ValueError(f"cannot read {short(text.strip())} in {short(whole)}; write name(setting=value) | name(...)")
    name, inside = match[1], match[2] or ""
    try:
        call = syntax_tree(source := f"f({inside})", mode="eval").body
        assert isinstance(call, ast.Call)
        args = [_literal(node, source) for node in call.args]
        settings = {str(k.arg): _literal(k.value, source, f"{k.arg}=") for k in call.keywords}
    except (SyntaxError, ValueError, AssertionError, RecursionError, MemoryError) as error:
        why = f": {error}" if isinstance(error, _NoLiteralError) else f"; write {name}(setting=value, ...)"
        raise ValueError(f"cannot read the settings of {short(name)} in {short(whole)}{why}") from None
    return name, args, settings


class _NoLiteralError(ValueError):
    """A value that is not a literal. The message says what is allowed."""


def _literal(node: ast.expr, source: str, setting: str = "") -> Any:
    """The value of a literal; YAML's true, false and null are allowed. ``setting`` is quoted in error messages."""
    if isinstance(node, ast.Name) and node.id in YAML_WORDS:
        return YAML_WORDS[node.id]
    try:
        return ast.literal_eval(node)
    except (ValueError, RecursionError, MemoryError):
        source_text = short(setting + (ast.get_source_segment(source, node) or ""))
        raise _NoLiteralError(f"{source_text}: write a number, true, false, null, a list, or text in quotes") from None


def split_outside(text: str, separator: str) -> list[str]:
    """Split at each ``separator`` (one character) outside brackets and quotes."""
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
        elif char == separator and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]
