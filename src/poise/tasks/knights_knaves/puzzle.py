"""Puzzles with exactly one solution: draw puzzles, read puzzles from files of the public set, and put puzzles into
words.

Statements are drawn for all people together, and discarded unless exactly one assignment satisfies all of them. A claim
has one of six forms with equal probability, as in the public set: plain, ``not``, ``and``, ``or``, ``->``, ``<=>``. The
connectives join claims drawn without replacement from "NAME is a knight" for everyone and "NAME is a knave" for
everyone but the speaker (nobody can say "I am a knave"). So people sometimes talk about themselves, and some claims are
always true or always false. If ``depth`` > 1, which the public set does not have, each operand has one of the five
compound forms with probability 1/2.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from poise._lib.errors import check_choice, check_whole
from poise.tasks.base import Problem
from poise.tasks.data.rows import Row
from poise.tasks.data.sources import read_all
from poise.tasks.knights_knaves.statements import (
    CONNECTIVES,
    LEAVES,
    Statement,
    assignment,
    canonical,
    check,
    consistent,
    solve,
    truth_table,
)

MIN_PEOPLE, MAX_PEOPLE, MAX_DEPTH = 2, 12, 6
_COMPOUND = ("not", *CONNECTIVES)
_FORMS = ("plain", *_COMPOUND)
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
ROLE = re.compile(r"\b(?ai:knight|knave)\b")  # a: without it, i would match "knıght", which is not "knight"


def role(knight: bool) -> str:
    """Return the word for a role."""
    return "knight" if knight else "knave"


def listing(words: Sequence[str]) -> str:
    """Join words: ``A``, ``A and B``, or ``A, B, and C``."""
    if len(words) <= 2:
        return " and ".join(words)
    return ", ".join(words[:-1]) + ", and " + words[-1]


def say(statement: Statement, names: Sequence[str]) -> str:
    """Put a statement into words, for the middle of a sentence. Parentheses make nested statements unambiguous."""
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
    """Return the text of a puzzle. ``varied`` draws phrases with ``rng``; ``plain`` is short and always the same."""
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


@dataclass(frozen=True)
class Puzzle:
    """A puzzle: people, each person's statement, and each person's role."""

    names: tuple[str, ...]
    statements: tuple[Statement, ...]  # one per person, in the order of names
    solution: tuple[bool, ...]  # knight = True
    quiz: str
    id: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "statements", check(self.statements))
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "solution", tuple(self.solution))
        people = len(self.statements)
        if len(self.names) != people or len(self.solution) != people:
            fault = f"the numbers of statements ({people}), names and roles in the solution must be equal"
        elif not all(isinstance(name, str) and name.strip() for name in self.names):
            fault = "names must be non-empty text"
        elif len({name.casefold() for name in self.names}) != people:
            fault = "names must differ"
        elif any(ROLE.search(name) for name in self.names):
            fault = "no one may be called knight or knave"
        elif not all(isinstance(knight, bool) for knight in self.solution):
            fault = "the solution must be booleans"
        else:
            return
        raise ValueError(
            f"puzzle {self.id!r}: {fault}; got the names {self.names!r} and the solution {self.solution!r}"
        )

    @property
    def people(self) -> int:
        """The number of people."""
        return len(self.names)

    def problem(self, instruction: str = "") -> Problem:
        """Convert this puzzle to a problem, whose prompt is the instruction and the quiz."""
        data: dict[str, Any] = {
            "names": list(self.names),
            "statements": _as_lists(self.statements),
            "solution": list(self.solution),
            "quiz": self.quiz,
        }
        prompt = (f"{instruction}\n\n" if instruction else "") + self.quiz
        return Problem(self.id, prompt, str(self.people), data)

    @classmethod
    def of(cls, problem: Problem) -> Puzzle:
        """Convert a problem back to its puzzle."""
        data = problem.data
        return cls(tuple(data["names"]), tuple(data["statements"]), tuple(data["solution"]), data["quiz"], problem.id)


def answer_text(names: tuple[str, ...], knights: tuple[bool, ...] | list[bool]) -> str:
    """Format an answer: ``(1) Ada is a knight (2) …``."""
    roles = zip(names, knights, strict=True)
    return " ".join(f"({i}) {name} is a {role(knight)}" for i, (name, knight) in enumerate(roles, 1))


def _as_lists(value: Any) -> Any:
    return [_as_lists(part) for part in value] if isinstance(value, tuple) else value


# Drawing


def generate(
    people: int, seed: int, *, depth: int = 1, names: Sequence[str] = NAMES, phrasing: str = "varied"
) -> Puzzle:
    """Generate the puzzle for these settings. The same settings always generate the same puzzle.

    The statements depend only on ``people``, ``seed`` and ``depth``. ``names`` (the pool to draw from) and ``phrasing``
    (``varied`` or ``plain``) change only the words.
    """
    check_settings(people, depth, names, phrasing)
    return draw(people, seed, depth).puzzle(names, phrasing)


def check_settings(people: int, depth: int, names: Sequence[str], phrasing: str) -> None:
    """Raise an error unless ``generate`` accepts these settings."""
    check_whole("knights and knaves", "people", people, MIN_PEOPLE, MAX_PEOPLE)
    check_whole("knights and knaves", "depth", depth, 1, MAX_DEPTH)
    check_choice("knights and knaves", "phrasing", phrasing, PHRASINGS)
    if isinstance(names, str) or len(names) < people:
        raise ValueError(
            f"knights and knaves: {people} people need at least {people} names to draw from, got {names!r}"
        )
    if names is not NAMES and len({name.casefold() for name in names}) != len(names):
        raise ValueError(f"knights and knaves: names must differ, got {', '.join(names)}")


class Draft(NamedTuple):
    """Statements with exactly one solution, not yet in words."""

    statements: tuple[Statement, ...]
    solution: tuple[bool, ...]
    seed: int
    depth: int

    @property
    def meaning(self) -> str:
        """A text that is equal for two drafts if and only if the drafts have the same meaning."""
        return canonical(self.statements)

    def puzzle(self, names: Sequence[str], phrasing: str) -> Puzzle:
        """Put the draft into words, about people with names drawn from ``names``."""
        people = len(self.statements)
        rng = Random(f"wording {people} {self.depth} {self.seed}")
        chosen = tuple(rng.sample(list(names), people))
        text = quiz(chosen, self.statements, phrasing, rng)
        return Puzzle(chosen, self.statements, self.solution, text, id=f"kk/{people}/{self.depth}/{self.seed}")


def draw(people: int, seed: int, depth: int = 1) -> Draft:
    """Draw statements with exactly one solution."""
    rng = Random(f"knights-knaves {people} {depth} {seed}")
    # For every speaker, the plain claims about one person.
    plain = [
        [(form, person) for person in range(people) for form in LEAVES if (form, person) != ("lying", speaker)]
        for speaker in range(people)
    ]
    while True:
        statements = tuple(_claim(speaker, plain[speaker], depth, rng) for speaker in range(people))
        fits = consistent([truth_table(statement, people) for statement in statements])
        if fits.bit_count() == 1:
            return Draft(statements, tuple(assignment(fits.bit_length() - 1, people)), seed, depth)


def _claim(speaker: int, plain: list[Statement], depth: int, rng: Random) -> Statement:
    form = rng.choice(_FORMS)
    if form == "plain":
        return rng.choice(plain)
    if form == "not" and depth == 1:  # never "I am not a knave", as in the public set
        return (form, rng.choice([leaf for leaf in plain if leaf[1] != speaker]))
    return _compound(form, plain, depth, rng)


def _compound(form: str, plain: list[Statement], depth: int, rng: Random) -> Statement:
    parts: list[Statement] = rng.sample(plain, 1 if form == "not" else 2)
    if depth > 1:
        parts = [
            part if rng.random() < 0.5 else _compound(rng.choice(_COMPOUND), plain, depth - 1, rng) for part in parts
        ]
    return (form, *parts)


# Files


def read(path: str | PathLike[str]) -> list[Puzzle]:
    """Read the puzzles of a file (``.jsonl``, ``.parquet``, …). Each must have exactly one solution: the file's."""
    return [_puzzle(row, Path(path), number) for number, row in read_all(str(path))]


def _puzzle(row: Row, path: Path, number: int) -> Puzzle:
    where = f"{path}, row {number}"
    if missing := [field for field in ("names", "statements", "solution", "quiz") if field not in row]:
        raise ValueError(f"{where}: no field {missing[0]!r} (there are: {', '.join(row)})")
    statements = row["statements"]
    try:
        if isinstance(statements, str):
            statements = ast.literal_eval(statements)
        puzzle = Puzzle(row["names"], statements, row["solution"], row["quiz"], f"{path.name}:{number}")
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{where}: {error}") from None
    if solve(puzzle.statements) != [list(puzzle.solution)]:
        raise ValueError(f"{where}: the puzzle's solution is wrong, or not the only one")
    return puzzle
