"""An endless supply of puzzles with exactly one solution.

A puzzle is drawn whole and thrown away unless one assignment alone fits it. One claim has six forms of equal chance, as
in the public set: a plain one, ``not``, ``and``, ``or``, ``->``, ``<=>``. What the connectives join is drawn without
replacement from "NAME is a knight" for everyone and "NAME is a knave" for everyone but the speaker (who could not say
it plainly), so that people sometimes speak of themselves, and sometimes say what cannot be false or cannot be true.
Deeper than the public set: with ``depth`` > 1 each part is, half of the time, itself one of the five compound forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from poise._lib.errors import check_choice, check_whole
from poise.tasks.knights_knaves.puzzle import NAMES, PHRASINGS, Puzzle, quiz
from poise.tasks.knights_knaves.statements import (
    CONNECTIVES,
    LEAVES,
    Statement,
    assignment,
    consistent,
    truth_table,
)

MIN_PEOPLE, MAX_PEOPLE, MAX_DEPTH = 2, 12, 6

_COMPOUND = ("not", *CONNECTIVES)
_FORMS = ("plain", *_COMPOUND)


def generate(
    people: int,
    seed: int,
    *,
    depth: int = 1,
    names: Sequence[str] = NAMES,
    phrasing: str = "varied",
) -> Puzzle:
    """The puzzle that belongs to these settings: the same ones always give the same puzzle.

    What is said depends on ``people``, ``seed`` and ``depth`` alone; ``names`` (the pool to draw from) and ``phrasing``
    (``varied`` or ``plain``) only on top of it decide the words.
    """
    check_settings(people, depth, names, phrasing)
    statements, solution = draw(people, seed, depth)
    return tell(statements, solution, seed, depth=depth, names=names, phrasing=phrasing)


def check_settings(people: int, depth: int, names: Sequence[str], phrasing: str) -> None:
    """Raise unless ``generate`` can work with these."""
    check_whole("knights and knaves", "people", people, MIN_PEOPLE, MAX_PEOPLE)
    check_whole("knights and knaves", "depth", depth, 1, MAX_DEPTH)
    check_choice("knights and knaves", "phrasing", phrasing, PHRASINGS)
    if isinstance(names, str) or len(names) < people:
        raise ValueError(f"knights and knaves: {people} people need as many names to draw from, got {names!r}")
    if names is not NAMES and len({name.casefold() for name in names}) != len(names):
        raise ValueError(f"knights and knaves: names must differ, got {', '.join(names)}")


def draw(people: int, seed: int, depth: int = 1) -> tuple[tuple[Statement, ...], tuple[bool, ...]]:
    """Statements with exactly one solution, and that solution."""
    rng = Random(f"knights-knaves {people} {depth} {seed}")
    # For every speaker, what can be said of one person.
    plain = [
        [(form, person) for person in range(people) for form in LEAVES if (form, person) != ("lying", speaker)]
        for speaker in range(people)
    ]
    while True:
        statements = tuple(_claim(speaker, plain[speaker], depth, rng) for speaker in range(people))
        fits = consistent([truth_table(statement, people) for statement in statements])
        if fits.bit_count() == 1:
            return statements, tuple(assignment(fits.bit_length() - 1, people))


def _claim(speaker: int, plain: list[Statement], depth: int, rng: Random) -> Statement:
    form = rng.choice(_FORMS)
    if form == "plain":
        return rng.choice(plain)
    if form == "not" and depth == 1:  # "I am not a knave" is left out, as in the public set
        return (form, rng.choice([leaf for leaf in plain if leaf[1] != speaker]))
    return _compound(form, plain, depth, rng)


def _compound(form: str, plain: list[Statement], depth: int, rng: Random) -> Statement:
    parts: list[Statement] = rng.sample(plain, 1 if form == "not" else 2)
    if depth > 1:
        parts = [
            part if rng.random() < 0.5 else _compound(rng.choice(_COMPOUND), plain, depth - 1, rng) for part in parts
        ]
    return (form, *parts)


def tell(
    statements: tuple[Statement, ...],
    solution: tuple[bool, ...],
    seed: int,
    *,
    depth: int,
    names: Sequence[str],
    phrasing: str,
) -> Puzzle:
    """Put drawn statements into words."""
    people = len(statements)
    rng = Random(f"wording {people} {depth} {seed}")
    chosen = tuple(rng.sample(list(names), people))
    text = quiz(chosen, statements, phrasing, rng)
    return Puzzle(chosen, statements, solution, text, id=f"kk/{people}/{depth}/{seed}")
