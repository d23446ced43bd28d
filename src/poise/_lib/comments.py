"""Reads what the comments beside a class's fields say: they are the one place where a setting is explained."""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize

_MARKS = ("fmt:", "noqa", "type:")  # comments for tools


def field_comments(kind: type) -> dict[str, str]:
    """The comment of each field of a class: on its lines, or on lines of its own directly above."""
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):  # typed into a console, or built in
        return {}
    comments: dict[int, tuple[bool, str]] = {}  # by line: whether it stands alone, and what it says
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and (text := _text(token.string)):
            comments[token.start[0]] = token.line.lstrip().startswith("#"), text
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for node in definition.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        first = node.lineno
        while comments.get(first - 1, (False, ""))[0]:
            first -= 1
        lines = range(first, (node.end_lineno or node.lineno) + 1)
        found[node.target.id] = " ".join(comments[line][1] for line in lines if line in comments)
    return {name: text for name, text in found.items() if text}


def _text(comment: str) -> str:
    parts = (part.strip() for part in comment.split("#"))
    return " ".join(part for part in parts if part and not part.startswith(_MARKS))
