"""A solution in as few words as will do, for models of a million parameters.

Every assignment is tried in a fixed order, all knights first, the last person changing fastest, and everyone's claim is
checked against it in speaking order, up to the first contradiction. Nothing has to be remembered or decided that is not
written down:

    Ada knight Bruno knight
    Ada true ok Bruno false no
    Bruno knave
    Ada false no
    …

- Only the roles that change are written, so that a person's role is the latest one that follows their name.
- A check is the speaker, whether their claim is true in this assignment, and ``ok`` if that suits the speaker's role,
  ``no`` if not. After ``no`` comes the next assignment, after ``ok`` the next speaker, after the last one the answer.
- ``values`` first writes the truth of each part of a claim that has several, and what joins them: "Ada true or false
  true ok". That leaves one look-up or one small truth table per word, for about a quarter more words.
- With other ``wording`` an assignment may begin with a word such as ``try``, and verdicts have synonyms: see
  ``paraphrases``.
"""

from __future__ import annotations

from itertools import product

from paraphrases import CLASH, FALSE, FITS, TRUE, TRY, Choose, Wording
from sentences import Misread

from poise.tasks.knights_knaves.puzzle import Puzzle, role
from poise.tasks.knights_knaves.statements import CONNECTIVES, Statement, holds

_JOINED = {"and": "and", "or": "or", "->": "then", "<=>": "iff"}


def compact(puzzle: Puzzle, misread: Misread, wording: Wording, *, values: bool = False) -> tuple[str, list[bool]]:
    """The steps, and the roles they end with. ``misread`` is asked once per check whether to flip its verdict."""
    lines: list[str] = []
    before: list[bool] = []
    for roles in product((True, False), repeat=puzzle.people):
        knights = list(roles)
        same = next((i for i, knight in enumerate(before) if knight != knights[i]), 0)
        changed = " ".join(f"{puzzle.names[i]} {role(knights[i])}" for i in range(same, puzzle.people))
        lines.append(wording.step()(TRY).format(roles=changed))
        words, fits = _check(puzzle, knights, misread, wording, values)
        lines.append(" ".join(words))
        before = knights
        if fits:
            break
    return "\n".join(lines), before


def _check(
    puzzle: Puzzle, knights: list[bool], misread: Misread, wording: Wording, values: bool
) -> tuple[list[str], bool]:
    words: list[str] = []
    for name, statement, knight in zip(puzzle.names, puzzle.statements, knights, strict=True):
        verdict = holds(statement, knights) != misread()
        choose = wording.step()
        words += [
            name,
            *(_values(statement, knights, choose) if values else ()),
            _truth(verdict, choose),
            choose(FITS if verdict == knight else CLASH),
        ]
        if verdict != knight:
            return words, False
    return words, True


def _values(statement: Statement, knights: list[bool], choose: Choose) -> list[str]:
    if statement[0] not in CONNECTIVES:
        return []
    form, left, right = statement
    return [_truth(holds(left, knights), choose), _JOINED[form], _truth(holds(right, knights), choose)]


def _truth(value: bool, choose: Choose) -> str:
    return choose(TRUE if value else FALSE)
