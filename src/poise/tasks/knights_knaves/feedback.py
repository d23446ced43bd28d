"""What is wrong with a response, in words. It follows from the claims and the response alone, not from the solution."""

from __future__ import annotations

from collections.abc import Sequence

from poise.rewards.answers import tag_fault
from poise.tasks.knights_knaves.statements import Statement, holds
from poise.tasks.knights_knaves.verifier import TAGS, answer_of, named_roles, roles_of
from poise.tasks.knights_knaves.wording import listing, role

MOST = 3  # people who are named


def feedback(names: Sequence[str], statements: Sequence[Statement], text: str) -> str:
    """The tags that are wrong, the people left out, or the claims that contradict the answer."""
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
