"""The meaning of a puzzle: its canonical form, and the split that follows from it.

Two puzzles mean the same if the people of one can be renamed and reordered into the people of the other so that each
says something logically equivalent. The canonical form is the list of the statements' truth tables under the one order
of the people that a search picks; every step of the search looks only at things that renaming cannot change, so that
puzzles with the same meaning always get the same form, and different meanings always get different ones.

The search is that of graph canonisation: colour the people by what distinguishes them, refine the colours by the
colours of the people around them until nothing changes, and where some still look alike, try each of them as the first
and keep the smallest outcome. People who can simply trade places need only one try.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from poise.tasks import streams
from poise.tasks.base import Split
from poise.tasks.knights_knaves.statements import Statement, check, truth_table, variables

_Colours = list[int]
_Between = list[list[tuple[int, int, int, int]]]


def canonical(statements: Sequence[Statement]) -> str:
    """A text that is equal for two puzzles exactly if they mean the same."""
    statements = check(statements)
    people = len(statements)
    tables = [truth_table(statement, people) for statement in statements]
    between = _between(tables)
    colours = _refine(_ranks([(between[i][i],) for i in range(people)]), between)
    form = _smallest(tables, between, colours)
    return f"{people}:" + ",".join(f"{table:x}" for table in form)


def split_of(statements: Sequence[Statement]) -> Split:
    """Where a puzzle belongs, by its meaning alone: about a tenth of all meanings are for testing."""
    return streams.split_of(canonical(statements))


def _between(tables: list[int]) -> _Between:
    """What i's statement has to do with j, in numbers that renaming does not change."""
    knights = variables(len(tables))
    rows = []
    for i, table in enumerate(tables):
        own = table & knights[i]
        row = []
        for j, knight in enumerate(knights):
            # How often the truth of the statement hangs on j alone: 0 exactly if j does not matter to it.
            hangs = ((table ^ table >> (1 << j)) & (knight >> (1 << j))).bit_count()
            row.append((int(i == j), hangs, (table & knight).bit_count(), (own & knight).bit_count()))
        rows.append(row)
    return rows


def _ranks(keys: Sequence[tuple[Any, ...]]) -> _Colours:
    place = {key: rank for rank, key in enumerate(sorted(set(keys)))}
    return [place[key] for key in keys]


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
    """The smallest list of tables among the orders of the people that agree with the colours."""
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
        found = _smallest(tables, between, _refine(singled_out, between))
        best = found if best is None or found < best else best
    assert best is not None
    return best


def _reorder(tables: list[int], order: list[int]) -> list[int]:
    """The tables when person ``order[k]`` becomes person k."""
    where = list(range(len(tables)))  # where[k]: which of the original people now stands at k
    for k, person in enumerate(order):
        now = where.index(person)
        if now != k:
            tables = _swap_people(tables, k, now)
            where[k], where[now] = where[now], where[k]
    return tables


def _swap_people(tables: list[int], i: int, j: int) -> list[int]:
    """The tables when i and j trade places: as speakers, and in what everyone says."""
    i, j = min(i, j), max(i, j)
    knights = variables(len(tables))
    only_i, only_j = knights[i] & ~knights[j], knights[j] & ~knights[i]
    rest, shift = ~(only_i | only_j), (1 << j) - (1 << i)
    swapped = [(t & rest) | (t & only_i) << shift | (t & only_j) >> shift for t in tables]
    swapped[i], swapped[j] = swapped[j], swapped[i]
    return swapped
