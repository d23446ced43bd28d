"""The generator: one solution each, reproducible, in the public set's proportions."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from poise.tasks.knights_knaves import generate, solve
from poise.tasks.knights_knaves.statements import FORMS
from support.puzzles import mentioned


@pytest.mark.parametrize("people", range(2, 9))
@pytest.mark.parametrize("depth", [1, 3])
def test_generated_puzzles_have_one_solution(people: int, depth: int) -> None:
    for seed in range(30):
        puzzle = generate(people, seed, depth=depth)
        assert solve(puzzle.statements) == [list(puzzle.solution)]
        assert puzzle.people == people == len(set(puzzle.names))
        assert all(name in puzzle.quiz for name in puzzle.names)


def test_generated_puzzles_are_reproducible() -> None:
    assert generate(5, 7) == generate(5, 7)
    assert generate(5, 7) != generate(5, 8)
    plain = generate(5, 7, phrasing="plain", names=("A", "B", "C", "D", "E"))
    assert plain.statements == generate(5, 7).statements  # the words never change what is said
    assert set(plain.names) == set("ABCDE")


def test_a_seed_means_the_same_puzzle_everywhere() -> None:
    assert generate(3, 1).statements == (
        ("or", ("telling-truth", 2), ("telling-truth", 1)),
        ("and", ("telling-truth", 1), ("telling-truth", 2)),
        ("or", ("lying", 1), ("lying", 0)),
    )


def test_forms_come_in_the_proportions_of_the_public_set() -> None:
    forms: Counter[str] = Counter()
    for seed in range(600):
        puzzle = generate(3 + seed % 5, seed)
        for speaker, statement in enumerate(puzzle.statements):
            forms[statement[0]] += 1
            forms["self"] += speaker in mentioned(statement)
    total = sum(forms[form] for form in FORMS)
    public = {
        "telling-truth": 0.084,
        "lying": 0.077,
        "not": 0.154,
        "and": 0.170,
        "or": 0.171,
        "->": 0.178,
        "<=>": 0.167,
    }
    for form, share in (public | {"self": 0.125}).items():
        assert forms[form] / total == pytest.approx(share, abs=0.03), form


def test_quizzes_vary_and_nest_without_ambiguity() -> None:
    openings = {generate(3, seed).quiz.split(".")[0] for seed in range(40)}
    assert len(openings) > 3
    deep = [generate(4, seed, depth=3) for seed in range(40)]
    assert any("(" in puzzle.quiz for puzzle in deep)
    assert all(puzzle.quiz.count("(") == puzzle.quiz.count(")") for puzzle in deep)


@pytest.mark.parametrize(
    "wrong",
    [
        {"people": 1},
        {"people": 13},
        {"people": 2.5},
        {"depth": 0},
        {"names": ("Ada",)},
        {"names": ("Ada", "ada", "Bo")},
        {"phrasing": "plian"},
    ],
)
def test_generator_refuses_what_it_cannot_do(wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=r"people|depth|names|did you mean 'plain'"):
        generate(**({"people": 3, "seed": 0} | wrong))


def test_no_one_may_be_called_knight() -> None:
    with pytest.raises(ValueError, match="called knight"):
        generate(2, 0, names=("Black Knight", "Ada"))
