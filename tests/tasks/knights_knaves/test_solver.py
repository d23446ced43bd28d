"""The solver: all solutions of a puzzle, and what it says of malformed statements."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given

from poise.tasks.knights_knaves import solve
from support.puzzles import holds, puzzles, quick


@quick
@given(puzzles())
def test_solver_agrees_with_brute_force(statements: Any) -> None:
    people = len(statements)
    expected = [
        list(knights)
        for knights in product((False, True), repeat=people)
        if all(holds(statement, knights) == knights[i] for i, statement in enumerate(statements))
    ]
    assert sorted(solve(statements)) == sorted(expected)


def test_solver_by_hand() -> None:
    assert solve([("lying", 1), ("and", ("lying", 0), ("lying", 1))]) == [[True, False]]
    assert solve([("telling-truth", 0)]) == [[False], [True]]
    assert solve([("lying", 0)]) == []
    assert solve([["not", ["lying", 1]], ["<=>", ["lying", 0], ["telling-truth", 1]]]) == [[False, False]]


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        ([("telling-truht", 0)], "did you mean 'telling-truth'"),
        ([("lying", 1)], "person must be 0 to 0"),
        ([("lying", True)], "person must be"),
        ([("and", ("lying", 0))], "takes 2 argument"),
        ([()], "expected a tuple"),
        ("lying", "expected a tuple"),
        ([], "one per person"),
    ],
)
def test_malformed_statements_are_named(statements: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        solve(list(statements) if isinstance(statements, str) else statements)
