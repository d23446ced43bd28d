"""Knights and Knaves as a task: problems, the reward for a reply, and feedback on a reply.

The reward is the sum of ±1 for the format and +2 (right), −1.5 (wrong) or −2 (unreadable, or wrong format) for the
answer. The possible totals are 3, −0.5, −1 and −3. The format is right if each of the four tags occurs exactly once and
in order; any other text is allowed. The answer is readable if the total number of the words knight and knave between
the answer tags equals the number of people, and "NAME is a ROLE" occurs for each person. The case of ASCII letters is
ignored; other letters never match.

The reply is untrusted. Tags are counted, not matched, and no regular expression in this file has a repetition, so the
time is linear in the length of the text. Feedback uses only the claims and the reply, not the solution.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, cycle, islice
from random import Random
from typing import ClassVar

from poise.tasks.base import Problem, Score, Split, sizes
from poise.tasks.data.rows import fingerprint
from poise.tasks.knights_knaves.puzzle import (
    NAMES,
    ROLE,
    Draft,
    Puzzle,
    answer_text,
    check_settings,
    draw,
    listing,
    read,
    role,
)
from poise.tasks.knights_knaves.statements import Statement, holds, split_of
from poise.tasks.rewards.answers import tag_fault
from poise.tasks.streams import check_split, draw_of_split

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
MOST = 3  # the maximum number of people that feedback names
INSTRUCTION = (
    "Think first, then say who is what, in this form: "
    "<think>your reasoning</think><answer>(1) NAME is a knight (2) NAME is a knave ...</answer>"
)
_GENERATED = ("depth", "phrasing", "names")  # settings of puzzles that are generated


@dataclass
class KnightsKnaves:
    """Knights & Knaves: an endless stream of logic puzzles, or the puzzles in a file, split by meaning into train and
    test.

    ``people`` is the number of people per puzzle: a number, several numbers, or a range such as ``"3-7"`` (the
    default); puzzles cycle through these numbers. With ``file``, the puzzles come from a file in the public format
    (``.jsonl``, ``.jsonl.gz``, ``.parquet``); if ``people`` is set, poise uses only puzzles with these numbers of
    people. ``depth`` is the nesting depth of statements, ``instruction`` the text before a puzzle. ``phrasing`` is
    ``varied`` or ``plain``. ``names`` are the names to draw from.
    """

    people: int | str | Sequence[int] | None = None
    depth: int = 1
    instruction: str = INSTRUCTION
    phrasing: str = "varied"
    names: Sequence[str] = NAMES
    file: str | None = None

    name: ClassVar[str] = "kk"
    concurrent: ClassVar[bool] = True  # another thread may call ``score``

    def __post_init__(self) -> None:
        if not isinstance(self.names, str):
            self.names = tuple(self.names)
        if self.file is not None:
            self._read_file(self.file)
            return
        self.people = self.counts = _counts("3-7" if self.people is None else self.people)
        for people in self.counts:
            check_settings(people, self.depth, self.names, self.phrasing)

    def problems(self, split: Split, seed: int) -> Iterator[Problem]:
        """Yield the problems of one split; no meaning is in both splits. A file's puzzles repeat, reordered in each
        epoch."""
        check_split(split)
        if self.file is not None:
            for number in count() if self.of_file[split] else ():
                yield from self.epoch(split, seed, number)
        rng = Random(f"problems {seed}")
        for people in cycle(self.counts):
            yield self._puzzle(people, split, rng).problem(self.instruction)

    def _puzzle(self, people: int, split: Split, rng: Random) -> Puzzle:
        def candidate() -> tuple[str, Draft]:
            draft = draw(people, rng.getrandbits(48), self.depth)
            return draft.meaning, draft

        draft = draw_of_split(f"KnightsKnaves with {people} people", split, candidate)
        return draft.puzzle(self.names, self.phrasing)

    def _read_file(self, file: str) -> None:
        for name in _GENERATED:
            if getattr(self, name) != getattr(KnightsKnaves, name):  # its default
                raise ValueError(f"KnightsKnaves: {name} is a setting of generated puzzles, not of file {file}")
        wanted = None if self.people is None else _counts(self.people)
        puzzles = [puzzle for puzzle in read(str(file)) if wanted is None or puzzle.people in wanted]
        if not puzzles:
            whom = "" if wanted is None else f" with {', '.join(map(str, wanted))} people"
            raise ValueError(f"KnightsKnaves: file {file} has no puzzle{whom}")
        self.of_file: dict[str, list[Problem]] = {"train": [], "test": []}
        for puzzle in puzzles:
            self.of_file[split_of(puzzle.statements)].append(puzzle.problem(self.instruction))
        self.people = self.counts = tuple(sorted({puzzle.people for puzzle in puzzles}))
        self.fingerprint = fingerprint(self.of_file)
        self.epoch = self._epoch  # only with a file: generated puzzles have no epochs

    def _epoch(self, split: Split, seed: int, number: int) -> list[Problem]:
        check_split(split)
        order = list(self.of_file[split])
        Random(f"epoch {seed} {number}").shuffle(order)
        return order

    def score(self, problem: Problem, text: str) -> Score:
        """Score a reply with the reward described at the top of this file."""
        return score_reply(problem.data["names"], problem.data["solution"], text)

    def feedback(self, problem: Problem, text: str) -> str:
        """Return what is wrong with a reply: its tags, missing people, or claims that contradict the answer."""
        return feedback_on_reply(problem.data["names"], problem.data["statements"], text)

    def gold(self, problem: Problem) -> str:
        """Return the right answer, in the form required between the answer tags."""
        return answer_text(problem.data["names"], problem.data["solution"])


def _counts(people: int | str | Sequence[int]) -> tuple[int, ...]:
    return sizes("KnightsKnaves", "people", people, 0, 999)  # check_settings checks the real range


# The reward


def score_reply(names: Sequence[str], solution: Sequence[bool], text: str) -> Score:
    """Score a response, with the reward described at the top of this file."""
    answer = answer_of(text)
    if answer is None:
        return _score(-1.0, -2.0)
    roles = roles_of(answer, names)
    if roles is None:
        return _score(1.0, -2.0)
    canonical = ",".join(role(knight) for knight in roles)  # in the order of the puzzle, not of the reply
    return _score(1.0, 2.0 if roles == list(solution) else -1.5, canonical)


def _score(form: float, answer: float, text: str | None = None) -> Score:
    return Score(form + answer, answer > 0, {"format": form, "answer": answer}, text)


def answer_of(text: str) -> str | None:
    """Return the text between the answer tags; None if the format is wrong."""
    if any(text.count(tag) != 1 for tag in TAGS):
        return None
    places = [text.index(tag) for tag in TAGS]
    if places != sorted(places):
        return None
    return text[places[2] + len(TAGS[2]) : places[3]]


def roles_of(answer: str, names: Sequence[str]) -> list[bool] | None:
    """Read each person's role from an answer, knight = True; None unless each person has exactly one role."""
    words = sum(1 for _ in islice(ROLE.finditer(answer), len(names) + 1))
    if words != len(names):
        return None
    roles = named_roles(answer, names)
    return [roles[i] for i in range(len(names))] if len(roles) == len(names) else None


def named_roles(answer: str, names: Sequence[str]) -> dict[int, bool]:
    """Map each person's index to the role in an answer, knight = True. The last claim about a person counts."""
    # Longer names first, so that "Mary Ann is a knight" is not a claim about Ann.
    order = sorted(range(len(names)), key=lambda i: -len(names[i]))
    anyone = "|".join(f"({re.escape(names[i])})" for i in order)
    roles: dict[int, bool] = {}
    for match in re.finditer(rf"(?<!\w)(?ai:(?:{anyone}) is a (knight|knave))\b", answer):
        person = next(i for group, i in enumerate(order, 1) if match[group] is not None)
        roles[person] = match[len(names) + 1].lower() == "knight"
    return roles


# Feedback


def feedback_on_reply(names: Sequence[str], statements: Sequence[Statement], text: str) -> str:
    """Return what is wrong with a response: its tags, missing people, or claims that contradict the answer."""
    answer = answer_of(text)
    if answer is None:
        return tag_fault(text, TAGS) or f"The tags must come in this order: {' '.join(TAGS)}."
    roles = roles_of(answer, names)
    return _left_out(names, answer) if roles is None else _contradictions(names, statements, roles)


def _left_out(names: Sequence[str], answer: str) -> str:
    roles = named_roles(answer, names)
    missing = [name for person, name in enumerate(names) if person not in roles]
    if not missing:
        return f"The answer must give {len(names)} roles, one for each person, and no more."
    return f'The answer leaves out {_some(missing)}. Write "NAME is a ROLE" once for each person.'


def _contradictions(names: Sequence[str], statements: Sequence[Statement], roles: Sequence[bool]) -> str:
    sentences = []
    for name, statement, knight in zip(names, statements, roles, strict=True):
        true = holds(statement, roles)
        if true != knight:
            truth = "true" if true else "false"
            sentences.append(f"{name}'s claim is {truth} under this answer, but you call {name} a {role(knight)}.")
    return " ".join(sentences[:MOST]) or "No claim contradicts the answer: it is right."


def _some(names: Sequence[str]) -> str:
    return listing(names) if len(names) <= MOST else f"{', '.join(names[:MOST])} and {len(names) - MOST} more"
