"""A solution in sentences, in the manner of the public set: a depth-first search told step by step.

Assume that someone is a knight, failing that a knave; if that contradicts what someone already judged has said, say so;
when neither role is left, go back. After someone has been judged, those they speak of are next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from paraphrases import BACK, FOUND, GIVE_UP, HEAD, IMPOSSIBLE, POSSIBLE, Choose, Wording

from poise.tasks.knights_knaves.puzzle import Puzzle, listing, role, say
from poise.tasks.knights_knaves.statements import LEAVES, Statement, truth_table, variables

Misread = Callable[[], bool]


def mentioned(statement: Statement) -> Iterator[int]:
    """The people a statement speaks of, in the order they are named, repeats included."""
    if statement[0] in LEAVES:
        yield statement[1]
    else:
        for part in statement[1:]:
            yield from mentioned(part)


@dataclass(frozen=True)
class _Judged:
    person: int
    knight: bool
    forgiven: frozenset[int] = field(default_factory=frozenset)  # whose claims were misread as not contradicted


def sentences(puzzle: Puzzle, misread: Misread, wording: Wording) -> tuple[str, list[bool]]:
    """The steps, and the roles they end with. ``misread`` is asked once per step whether to flip its verdict."""
    names, claims = puzzle.names, [say(statement, puzzle.names) for statement in puzzle.statements]
    tables = [truth_table(statement, puzzle.people) for statement in puzzle.statements]
    lines = [wording.step()(HEAD)]
    judged: list[_Judged] = []
    person, knight = 0, True
    while True:
        forgiven = judged[-1].forgiven if judged else frozenset()
        tried = [*judged, _Judged(person, knight)]
        against = _against(tables, tried, forgiven)
        if misread():
            against, forgiven = ([], forgiven | set(against)) if against else ([person], forgiven)
        if not against:
            judged.append(_Judged(person, knight, forgiven))
            false = "" if knight else "false "
            form = wording.step()(POSSIBLE)
            lines.append(form.format(name=names[person], role=role(knight), false=false, claim=claims[person]))
            if len(judged) == puzzle.people:
                lines.append(wording.step()(FOUND))
                break
            person, knight = _next(puzzle, judged), True
            continue
        lines.append(_cannot(wording.step(), names, claims, judged, person, knight, against[0]))
        if knight:
            knight = False
            continue
        exhausted = [person]
        while judged and not judged[-1].knight:
            exhausted.append(judged.pop().person)
        if not judged:
            lines.append(wording.step()(GIVE_UP))
            break
        person, knight = judged.pop().person, False
        whom = listing([names[i] for i in exhausted])
        lines.append(wording.step()(BACK).format(whom=whom, name=names[person]))
    return "\n".join(lines), _roles(puzzle.people, tried)


def _against(tables: Sequence[int], judged: Sequence[_Judged], forgiven: frozenset[int]) -> list[int]:
    """Whose claims cannot agree with what has been assumed, however the others turn out; in speaking order."""
    knights = variables(len(tables))
    possible = (1 << (1 << len(tables))) - 1
    for one in judged:
        possible &= knights[one.person] if one.knight else ~knights[one.person]
    found = []
    for one in sorted(judged, key=lambda one: one.person):
        table = tables[one.person]
        if one.person not in forgiven and not possible & (table if one.knight else ~table):
            found.append(one.person)
    return found


def _next(puzzle: Puzzle, judged: Sequence[_Judged]) -> int:
    """Someone of whom the latest speaker spoke, else the one before, and so on; else the first in order."""
    done = {one.person for one in judged}
    for one in reversed(judged):
        for person in mentioned(puzzle.statements[one.person]):
            if person not in done:
                return person
    return next(person for person in range(puzzle.people) if person not in done)


def _cannot(
    choose: Choose,
    names: Sequence[str],
    claims: Sequence[str],
    judged: Sequence[_Judged],
    person: int,
    knight: bool,
    speaker: int,
) -> str:
    truthful = knight if speaker == person else next(one.knight for one in judged if one.person == speaker)
    return choose(IMPOSSIBLE).format(
        name=names[person],
        role=role(knight),
        false="" if truthful else "false ",
        owner="their own" if speaker == person else names[speaker],
        claim=claims[speaker],
    )


def _roles(people: int, judged: Sequence[_Judged]) -> list[bool]:
    """Roles in speaking order; whoever was never reached counts as the knight they would have been tried as first."""
    roles = [True] * people
    for one in judged:
        roles[one.person] = one.knight
    return roles
