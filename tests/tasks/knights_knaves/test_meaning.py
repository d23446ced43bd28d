"""The canonical form of a puzzle, and the split by it."""

from __future__ import annotations

from collections import Counter
from itertools import islice, permutations, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poise.tasks.knights_knaves import KnightsKnaves, Puzzle, canonical, generate, split_of
from poise.tasks.knights_knaves import statements as statements_module
from support.puzzles import holds, permuted, puzzles, quick


@quick
@given(puzzles(6), st.data())
def test_canonical_form_ignores_the_order_of_the_people(statements: Any, data: st.DataObject) -> None:
    to = data.draw(st.permutations(range(len(statements))))
    assert canonical(permuted(statements, to)) == canonical(statements)


@quick
@given(st.integers(0, 10**6), st.integers(2, 8), st.integers(1, 3), st.randoms())
def test_canonical_form_of_generated_puzzles_ignores_order(seed: int, people: int, depth: int, rng: Any) -> None:
    statements = generate(people, seed, depth=depth).statements
    to = list(range(people))
    rng.shuffle(to)
    assert canonical(permuted(statements, to)) == canonical(statements)


def test_canonical_form_separates_exactly_what_differs() -> None:
    """Against the definition: same form if and only if some permutation makes all truth tables equal."""
    seen = [generate(3, seed).statements for seed in range(60)]

    def meaning(statements: Any) -> tuple[Any, ...]:
        worlds = list(product((False, True), repeat=3))
        return tuple(tuple(holds(s, world) for world in worlds) for s in statements)

    for a in seen:
        for b in seen:
            same = any(meaning(permuted(a, to)) == meaning(b) for to in permutations(range(3)))
            assert (canonical(a) == canonical(b)) == same


def test_canonical_form_merges_equivalent_wordings() -> None:
    base = (("telling-truth", 1), ("and", ("lying", 0), ("telling-truth", 1)))
    other = (("not", ("lying", 1)), ("and", ("telling-truth", 1), ("not", ("telling-truth", 0))))
    assert canonical(base) == canonical(other)
    assert canonical(base) != canonical((("lying", 1), base[1]))


def test_highly_symmetric_puzzles_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    search, calls = statements_module._smallest, []
    monkeypatch.setattr(statements_module, "_smallest", lambda *args: calls.append(1) or search(*args))
    everyone = ("telling-truth", 0)
    for i in range(1, 8):
        everyone = ("and", everyone, ("telling-truth", i))
    hard = [
        tuple(("telling-truth", i) for i in range(8)),  # everyone speaks of themselves
        tuple(("lying", (i + 1) % 8) for i in range(8)),  # a ring
        tuple(("lying", i ^ 1) for i in range(8)),  # pairs
        (everyone,) * 8,
    ]
    for statements in hard:
        calls.clear()
        assert canonical(statements) == canonical(permuted(statements, [3, 1, 4, 7, 5, 0, 2, 6]))
        assert len(calls) < 1000  # of 2 · 8! orders


def test_splits_are_disjoint_by_meaning_and_a_tenth_is_test() -> None:
    task = KnightsKnaves(people="2-6")
    train = list(islice(task.problems("train", 0), 1500))
    test = list(islice(task.problems("test", 0), 300))
    forms = [{canonical(Puzzle.of(problem).statements) for problem in part} for part in (train, test)]
    assert not forms[0] & forms[1]
    share = Counter(split_of(generate(5, seed).statements) for seed in range(1500))["test"] / 1500
    assert share == pytest.approx(0.1, abs=0.03)


def test_the_split_never_moves() -> None:
    """A golden list: were it to change, yesterday's test puzzles would be in tomorrow's training set."""
    assert [seed for seed in range(40) if split_of(generate(4, seed).statements) == "test"] == [1, 10, 19, 22, 25]
