"""The reward: format ±1, then the answer +2 (all right), −1.5 (wrong) or −2 (cannot be read, or the format is broken).

The totals are 3, −0.5, −1 and −3. Format: each of the four tags exactly once and in order; any other text is allowed.
Answer: between the answer tags the words knight and knave occur once per person in all, and "NAME is a ROLE" is found
for everyone; the case of ASCII letters is ignored, and no other letter counts as one of them.

The text is untrusted. Tags are counted, not matched, and the expressions searched for have no repetition in them, so
that the time is linear in the text. Feedback follows from the claims and the response alone, not from the solution.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from poise.rewards.answers import tag_fault
from poise.tasks.base import Score
from poise.tasks.knights_knaves.puzzle import ROLE, listing, role
from poise.tasks.knights_knaves.statements import Statement, holds

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def score(names: Sequence[str], solution: Sequence[bool], text: str) -> Score:
    """Score a response."""
    answer = answer_of(text)
    if answer is None:
        return _score(-1.0, -2.0)
    roles = roles_of(answer, names)
    if roles is None:
        return _score(1.0, -2.0)
    said = ",".join(role(knight) for knight in roles)  # in the order of the puzzle, whatever that of the response
    return _score(1.0, 2.0 if roles == list(solution) else -1.5, said)


def _score(form: float, answer: float, said: str | None = None) -> Score:
    return Score(form + answer, answer > 0, {"format": form, "answer": answer}, said)


def answer_of(text: str) -> str | None:
    """What stands between the answer tags, or None where the format is broken."""
    if any(text.count(tag) != 1 for tag in TAGS):
        return None
    places = [text.index(tag) for tag in TAGS]
    if places != sorted(places):
        return None
    return text[places[2] + len(TAGS[2]) : places[3]]


def roles_of(answer: str, names: Sequence[str]) -> list[bool] | None:
    """Everyone's role according to an answer, knight = True, or None where it does not say exactly that."""
    said = 0
    for _ in ROLE.finditer(answer):
        said += 1
        if said > len(names):
            return None
    if said != len(names):
        return None
    found = named_roles(answer, names)
    return [found[i] for i in range(len(names))] if len(found) == len(names) else None


def named_roles(answer: str, names: Sequence[str]) -> dict[int, bool]:
    """Who is said to be what, by the person's number, knight = True; the last word counts."""
    # Longer names first, so that in "Mary Ann is a knight" nothing is said of Ann.
    order = sorted(range(len(names)), key=lambda i: -len(names[i]))
    anyone = "|".join(f"({re.escape(names[i])})" for i in order)
    found: dict[int, bool] = {}
    for match in re.finditer(rf"(?<!\w)(?ai:(?:{anyone}) is a (knight|knave))\b", answer):
        person = next(i for group, i in enumerate(order, 1) if match[group] is not None)
        found[person] = match[len(names) + 1].lower() == "knight"
    return found


MOST = 3  # people who are named


def feedback(names: Sequence[str], statements: Sequence[Statement], text: str) -> str:
    """What is wrong with a response: tags, people left out, or claims that contradict the answer."""
    answer = answer_of(text)
    if answer is None:
        return tag_fault(text, TAGS) or f"The tags must come in this order: {' '.join(TAGS)}."
    roles = roles_of(answer, names)
    return _left_out(names, answer) if roles is None else _contradictions(names, statements, roles)


def _left_out(names: Sequence[str], answer: str) -> str:
    found = named_roles(answer, names)
    missing = [name for person, name in enumerate(names) if person not in found]
    if not missing:
        return f"The answer must give {len(names)} roles, one for each person, and no more."
    return f'The answer leaves out {_some(missing)}. Write "NAME is a ROLE" once for each person.'


def _contradictions(names: Sequence[str], statements: Sequence[Statement], roles: Sequence[bool]) -> str:
    said = []
    for name, statement, knight in zip(names, statements, roles, strict=True):
        true = holds(statement, roles)
        if true != knight:
            truth = "true" if true else "false"
            said.append(f"{name}'s claim is {truth} under this answer, but you call {name} a {role(knight)}.")
    return " ".join(said[:MOST]) or "No claim contradicts the answer: it is right."


def _some(names: Sequence[str]) -> str:
    return listing(names) if len(names) <= MOST else f"{', '.join(names[:MOST])} and {len(names) - MOST} more"
