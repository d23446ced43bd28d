"""Puzzles in words: the names of the people and the ways in which they speak."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

from poise.tasks.knights_knaves.statements import LEAVES, Statement

NAMES = tuple(
    """
    Ada Albert Alice Amara Anton Astrid Basil Beatrice Bruno Carla Cedric Clara Cyrus Dana Dorian Edith Elias Elena
    Farah Felix Fiona Frank Gideon Greta Hana Harold Hector Hilda Ida Igor Ines Ivan Jasper Jonas Judith Kamal Karen
    Klaus Laura Leo Lena Louis Magnus Maria Marco Miriam Nadia Nina Oscar Olga Otto Paula Petra Quentin Rosa Rufus
    Sami Selma Simon Stella Tessa Theo Ursula Vera Victor Walter Wilma Xenia Yara Yusuf Zelda Zane
    """.split()  # noqa: SIM905
)

_OPENINGS = (
    "On a certain island everyone is either a knight or a knave. Knights always tell the truth and knaves always lie.",
    "You land on an island of knights, who only ever tell the truth, and knaves, who only ever lie.",
    "Every inhabitant of an island is a knight or a knave: what a knight says is true, what a knave says is false.",
    "There is an island where knights live, whose every word is true, and knaves, whose every word is false.",
)
_MEETINGS = (
    "You meet {count} of them: {people}.",
    "{count} inhabitants come up to you: {people}.",
    "You are greeted by {count} islanders: {people}.",
    "Before you stand {count} people: {people}.",
)
_SPEECHES = (
    '{name} says, "{Claim}."',
    '{name} tells you, "{Claim}."',
    '{name} announces: "{Claim}."',
    '{name} whispers, "{Claim}."',
    '{name} replies, "{Claim}."',
    '{name} is quick to add, "{Claim}."',
    '"{Claim}," says {name}.',
    '"{Claim}," {name} explains.',
    '"{Claim}," {name} calls out.',
    '"{Claim}," you hear from {name}.',
    'When asked, {name} answers: "{Claim}."',
    'The words of {name} are: "{Claim}."',
    "{name} insists that {claim}.",
    "{name} maintains that {claim}.",
    "{name} lets you know that {claim}.",
    "{name} would have you believe that {claim}.",
    "{name}'s story is that {claim}.",
)
_QUESTIONS = (
    "Who is a knight and who is a knave?",
    "What is each of them, a knight or a knave?",
    "Can you tell the knights from the knaves?",
)
PHRASINGS = ("varied", "plain")
ROLE = re.compile(r"\b(?ai:knight|knave)\b")  # a: else i would take "knıght" for a role that is not "knight"


def role(knight: bool) -> str:
    """The word for a role."""
    return "knight" if knight else "knave"


def listing(words: Sequence[str]) -> str:
    """``A``, ``A and B``, or ``A, B, and C``."""
    if len(words) <= 2:
        return " and ".join(words)
    return ", ".join(words[:-1]) + ", and " + words[-1]


def say(statement: Statement, names: Sequence[str]) -> str:
    """A statement in words, to stand in the middle of a sentence. Brackets keep nested ones unambiguous."""
    form = statement[0]
    if form in LEAVES:
        return f"{names[statement[1]]} is a {role(form == 'telling-truth')}"
    if form == "not":
        inner = statement[1]
        if inner[0] in LEAVES:
            return f"{names[inner[1]]} is not a {role(inner[0] == 'telling-truth')}"
        return f"it is not the case that {_part(inner, names)}"
    left, right = _part(statement[1], names), _part(statement[2], names)
    if form == "->":
        return f"if {left} then {right}"
    return f"{left} {'if and only if' if form == '<=>' else form} {right}"


def _part(statement: Statement, names: Sequence[str]) -> str:
    simple = statement[0] in LEAVES or (statement[0] == "not" and statement[1][0] in LEAVES)
    return say(statement, names) if simple else f"({say(statement, names)})"


def quiz(names: Sequence[str], statements: Sequence[Statement], phrasing: str, rng: Random) -> str:
    """The text of a puzzle. ``varied`` draws its turns of phrase from ``rng``; ``plain`` is short and has only one."""
    claims = [say(statement, names) for statement in statements]
    if phrasing == "plain":
        spoken = [f"{name} says: {claim}." for name, claim in zip(names, claims, strict=True)]
        rule = "Knights always tell the truth and knaves always lie."
        return " ".join([rule, f"People: {', '.join(names)}.", *spoken])
    spoken = [
        rng.choice(_SPEECHES).format(name=name, claim=claim, Claim=claim[:1].upper() + claim[1:])
        for name, claim in zip(names, claims, strict=True)
    ]
    meeting = rng.choice(_MEETINGS).format(count=len(names), people=listing(names))
    return " ".join([rng.choice(_OPENINGS), meeting, *spoken, rng.choice(_QUESTIONS)])
