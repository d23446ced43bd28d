"""Knights and Knaves to test on: statements, puzzles, answers, the public rows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st

quick = settings(max_examples=40, deadline=None)  # a loaded machine is no failure

PEOPLE = ("Ada", "Bruno", "Clara")
SOLUTION = (True, False, True)
GOLD = "(1) Ada is a knight (2) Bruno is a knave (3) Clara is a knight"


def public_rows() -> Path:
    folder = os.environ.get("POISE_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data"
    path = Path(folder) / "kk_train.jsonl.gz"
    if not path.exists():
        pytest.skip(f"the public rows are not here ({path.name}; set POISE_DATA to their folder)")
    return path


def claims(people: int, depth: int = 2) -> st.SearchStrategy[Any]:
    person = st.integers(0, people - 1)
    plain = st.tuples(st.sampled_from(["telling-truth", "lying"]), person)
    return st.recursive(
        plain,
        lambda part: st.one_of(
            st.tuples(st.just("not"), part),
            st.tuples(st.sampled_from(["and", "or", "->", "<=>"]), part, part),
        ),
        max_leaves=2**depth,
    )


@st.composite
def puzzles(draw: st.DrawFn, most: int = 5) -> tuple[Any, ...]:
    people = draw(st.integers(1, most))
    return tuple(draw(claims(people)) for _ in range(people))


def renamed(statement: Any, to: Any) -> Any:
    if statement[0] in ("telling-truth", "lying"):
        return (statement[0], to[statement[1]])
    return (statement[0], *(renamed(part, to) for part in statement[1:]))


def permuted(statements: Any, to: Any) -> tuple[Any, ...]:
    """Person i becomes person to[i]."""
    moved: list[Any] = [None] * len(statements)
    for i, statement in enumerate(statements):
        moved[to[i]] = renamed(statement, to)
    return tuple(moved)


def response(answer: str, think: str = "so it is") -> str:
    return f"<think>{think}</think>\n<answer>{answer}</answer>"


def mentioned(statement: Any) -> list[int]:
    """The people a statement speaks of."""
    if statement[0] in ("telling-truth", "lying"):
        return [statement[1]]
    return [person for part in statement[1:] for person in mentioned(part)]


def holds(statement: Any, knights: Any) -> bool:
    """Whether a statement is true in one assignment, without truth tables."""
    form, *parts = statement
    if form in ("telling-truth", "lying"):
        return bool(knights[parts[0]]) == (form == "telling-truth")
    first, *others = (holds(part, knights) for part in parts)
    if form == "not":
        return not first
    (second,) = others
    return {"and": first and second, "or": first or second, "->": second or not first, "<=>": first == second}[form]
