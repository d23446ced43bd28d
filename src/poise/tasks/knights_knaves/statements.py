"""Statements and their solutions.

A statement is a nested tuple, as in the public set: ``("telling-truth", i)``, ``("lying", i)``, ``("not", s)`` and
``("and" | "or" | "->" | "<=>", s, s)``. A puzzle has one statement per person, in speaking order.

All functions work on truth tables. With n people there are 2ⁿ assignments; bit i of the number a is 1 if person i is a
knight in assignment a. A truth table is one Python integer: bit a is the truth value in assignment a. A connective is
then one integer operation, whatever n is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from poise._lib.errors import short, unknown
from poise.tasks import streams
from poise.tasks.base import Split

Statement = tuple[Any, ...]
_Colours = list[int]  # one per person
_Between = list[list[tuple[int, int, int, int]]]

LEAVES = ("telling-truth", "lying")
CONNECTIVES = ("and", "or", "->", "<=>")
FORMS = (*LEAVES, "not", *CONNECTIVES)
MAX_PEOPLE = 16


@cache
def variables(people: int) -> tuple[int, ...]:
    """Return the truth table of "person i is a knight" for every i."""
    if not 1 <= people <= MAX_PEOPLE:
        raise ValueError(f"knights and knaves: between 1 and {MAX_PEOPLE} people, got {people}")
    everything = (1 << (1 << people)) - 1
    # From the lowest bit up, person i's table repeats 2^i zeros and 2^i ones. 11…1 // (2^(2^i) + 1) begins with the
    # ones, so it is shifted by 2^i bits.
    return tuple(everything // ((1 << (1 << i)) + 1) << (1 << i) for i in range(people))


def truth_table(statement: Statement, people: int) -> int:
    """Return the truth table of a statement in a puzzle with ``people`` people."""
    return _table(statement, variables(people), (1 << (1 << people)) - 1)


def _table(statement: Statement, people: tuple[int, ...], everything: int) -> int:
    form = statement[0]
    if form == "telling-truth":
        return people[statement[1]]
    if form == "lying":
        return everything ^ people[statement[1]]
    left = _table(statement[1], people, everything)
    if form == "not":
        return everything ^ left
    right = _table(statement[2], people, everything)
    if form == "and":
        return left & right
    if form == "or":
        return left | right
    if form == "->":
        return everything ^ left | right
    return everything ^ left ^ right


def consistent(tables: Sequence[int]) -> int:
    """Return the assignments, as bits, in which each statement is true if and only if its speaker is a knight."""
    fits = (1 << (1 << len(tables))) - 1
    for knight, table in zip(variables(len(tables)), tables, strict=True):
        fits &= ~(knight ^ table)
    return fits


def assignment(number: int, people: int) -> list[bool]:
    """Return the roles in assignment ``number``, knight = True, in speaking order."""
    return [bool(number >> i & 1) for i in range(people)]


def solve(statements: Sequence[Statement]) -> list[list[bool]]:
    """Return every assignment that satisfies the statements: knight = True, in speaking order."""
    statements = check(statements)
    people = len(statements)
    fits = consistent([truth_table(statement, people) for statement in statements])
    solutions = []
    while fits:
        lowest = fits & -fits
        solutions.append(assignment(lowest.bit_length() - 1, people))
        fits ^= lowest
    return solutions


def holds(statement: Statement, knights: Sequence[bool]) -> bool:
    """Whether a statement is true in one assignment."""
    number = sum(knight << i for i, knight in enumerate(knights))
    return bool(truth_table(statement, len(knights)) >> number & 1)


def check(statements: Sequence[Any]) -> tuple[Statement, ...]:
    """Convert statements to nested tuples (JSON lists are accepted). Raise ``ValueError`` for a malformed statement."""
    if not isinstance(statements, list | tuple) or not 1 <= len(statements) <= MAX_PEOPLE:
        raise ValueError(f"statements: one per person, for 1 to {MAX_PEOPLE} people, got {short(statements)}")
    return tuple(_checked(statement, len(statements)) for statement in statements)


def _checked(statement: Any, people: int) -> Statement:
    if not isinstance(statement, list | tuple) or not statement:
        raise ValueError(f"statement: expected a tuple such as ('lying', 0), got {short(statement)}")
    form, *rest = statement
    if form not in FORMS:
        raise ValueError("statement: " + unknown("form", str(form), FORMS))
    arguments = 2 if form in CONNECTIVES else 1
    if len(rest) != arguments:
        raise ValueError(f"statement: {form!r} takes {arguments} argument(s), got {len(rest)} in {short(statement)}")
    if form not in LEAVES:
        return (form, *(_checked(part, people) for part in rest))
    if type(rest[0]) is not int or not 0 <= rest[0] < people:
        raise ValueError(f"statement: person must be 0 to {people - 1}, got {short(rest[0])} in {short(statement)}")
    return (form, rest[0])


def canonical(statements: Sequence[Statement]) -> str:
    """Return a text that is equal for two puzzles if and only if the puzzles have the same meaning.

    Two puzzles have the same meaning if renaming and reordering the people of one puzzle yields the other, up to
    logically equivalent statements. The text lists the statements' truth tables in a canonical order of the people. A
    search finds this order; every step of the search depends only on properties that renaming does not change.

    The search is graph canonicalization. Colour the people by these properties, and refine each person's colour by the
    colours of the other people until no colour changes. If several people still have the same colour, try each of them
    as the first and keep the smallest result. For people who are interchangeable, one try is enough.
    """
    statements = check(statements)
    people = len(statements)
    tables = [truth_table(statement, people) for statement in statements]
    between = _between(tables)
    colours = _refine(_ranks([(between[i][i],) for i in range(people)]), between)
    form = _smallest(tables, between, colours)
    return f"{people}:" + ",".join(f"{table:x}" for table in form)


def split_of(statements: Sequence[Statement]) -> Split:
    """Assign a puzzle to a split by its meaning; about a tenth of all meanings belong to the test split."""
    return streams.split_of(canonical(statements))


def _between(tables: list[int]) -> _Between:
    """Describe how i's statement depends on j, for all i and j, by numbers that renaming does not change."""
    knights = variables(len(tables))
    rows = []
    for i, table in enumerate(tables):
        own = table & knights[i]
        row = []
        for j, knight in enumerate(knights):
            # The number of assignments in which j changes the statement's truth: 0 if the statement ignores j.
            hangs = ((table ^ table >> (1 << j)) & (knight >> (1 << j))).bit_count()
            row.append((int(i == j), hangs, (table & knight).bit_count(), (own & knight).bit_count()))
        rows.append(row)
    return rows


def _ranks(keys: Sequence[tuple[Any, ...]]) -> _Colours:
    ranks = {key: rank for rank, key in enumerate(sorted(set(keys)))}
    return [ranks[key] for key in keys]


def _refine(colours: _Colours, between: _Between) -> _Colours:
    people = range(len(colours))
    count = len(set(colours))
    while count < len(colours):
        keys = [(colours[i], sorted((colours[j], between[i][j], between[j][i]) for j in people)) for i in people]
        colours = _ranks([(colour, tuple(seen)) for colour, seen in keys])
        if len(set(colours)) == count:
            break
        count = len(set(colours))
    return colours


def _smallest(tables: list[int], between: _Between, colours: _Colours) -> list[int]:
    """Return the smallest list of tables over all orders of the people that agree with the colours."""
    alike: dict[int, list[int]] = {}
    for person, colour in enumerate(colours):
        alike.setdefault(colour, []).append(person)
    if len(alike) == len(colours):
        return _reorder(tables, sorted(range(len(colours)), key=colours.__getitem__))
    colour = min(colour for colour, people in alike.items() if len(people) > 1)
    best: list[int] | None = None
    tried: list[int] = []
    for person in alike[colour]:
        if any(_swap_people(tables, person, other) == tables for other in tried):
            continue
        tried.append(person)
        singled_out = _ranks([(c, int(c == colour and i != person)) for i, c in enumerate(colours)])
        candidate = _smallest(tables, between, _refine(singled_out, between))
        best = candidate if best is None or candidate < best else best
    assert best is not None
    return best


def _reorder(tables: list[int], order: list[int]) -> list[int]:
    """Return the tables after person ``order[k]`` becomes person k."""
    where = list(range(len(tables)))  # where[k]: the original person who is now at k
    for k, person in enumerate(order):
        now = where.index(person)
        if now != k:
            tables = _swap_people(tables, k, now)
            where[k], where[now] = where[now], where[k]
    return tables


def _swap_people(tables: list[int], i: int, j: int) -> list[int]:
    """Return the tables after swapping persons i and j, as speakers and in all statements."""
    i, j = min(i, j), max(i, j)
    knights = variables(len(tables))
    only_i, only_j = knights[i] & ~knights[j], knights[j] & ~knights[i]
    rest, shift = ~(only_i | only_j), (1 << j) - (1 << i)
    swapped = [(t & rest) | (t & only_i) << shift | (t & only_j) >> shift for t in tables]
    swapped[i], swapped[j] = swapped[j], swapped[i]
    return swapped
