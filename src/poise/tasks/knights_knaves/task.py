"""Knights and Knaves as a task."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import ClassVar

from poise._lib.errors import check_choice, check_range
from poise.tasks.base import Problem, Score, Split, check_split
from poise.tasks.knights_knaves.generator import check_settings, draw, tell
from poise.tasks.knights_knaves.meaning import split_of
from poise.tasks.knights_knaves.puzzle import Puzzle
from poise.tasks.knights_knaves.verifier import TAGS, score
from poise.tasks.knights_knaves.wording import NAMES
from poise.tasks.knights_knaves.worked import STYLES, worked

INSTRUCTION = (
    "Think first, then say who is what, in this form: "
    "<think>your reasoning</think><answer>(1) NAME is a knight (2) NAME is a knave ...</answer>"
)
_PATIENCE = 20_000  # draws in a row that belong to the other split


@dataclass(frozen=True)
class KnightsKnaves:
    """Knights & Knaves: logic puzzles without end, split into train and test by their meaning.

    ``people`` is a number, several, or a range such as ``"3-7"``; the numbers take turns. ``style``, ``noise`` and
    ``wording`` are those of the demonstrations (see ``worked``). With ``open_think`` the prompt itself ends with
    ``<think>``, which responses and demonstrations then lack.
    """

    people: int | str | Sequence[int] = (3, 4, 5, 6, 7)
    depth: int = 1
    instruction: str = INSTRUCTION
    open_think: bool = False
    phrasing: str = "varied"
    names: Sequence[str] = NAMES
    style: str = "sentences"
    noise: float = 0.0
    wording: float = 0.0

    name: ClassVar[str] = "kk"
    concurrent: ClassVar[bool] = True  # may be asked for scores from another thread

    def __post_init__(self) -> None:
        object.__setattr__(self, "people", _counts(self.people))
        if not isinstance(self.names, str):
            object.__setattr__(self, "names", tuple(self.names))
        for people in self.counts:
            check_settings(people, self.depth, self.names, self.phrasing)
        check_choice("KnightsKnaves", "style", self.style, STYLES)
        check_range("KnightsKnaves", "noise", self.noise, 0.0, 1.0)
        check_range("KnightsKnaves", "wording", self.wording, 0.0, 1.0)

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of people, however they were given."""
        return _counts(self.people)

    def problems(self, split: Split, seed: int) -> Iterator[Problem]:
        """Problems of one split; no meaning is in both."""
        check_split(split)
        rng = Random(f"problems {seed}")
        ending = "\n" + TAGS[0] if self.open_think else ""
        for turn in count():
            people = self.counts[turn % len(self.counts)]
            yield self._puzzle(people, split, rng).problem(self.instruction, ending)

    def _puzzle(self, people: int, split: Split, rng: Random) -> Puzzle:
        for _ in range(_PATIENCE):
            seed = rng.getrandbits(48)
            statements, solution = draw(people, seed, self.depth)
            if split_of(statements) == split:
                return tell(statements, solution, seed, depth=self.depth, names=self.names, phrasing=self.phrasing)
        raise RuntimeError(f"KnightsKnaves: no {split} puzzle with {people} people among {_PATIENCE} draws")

    def score(self, problem: Problem, text: str) -> Score:
        """Format ±1 and answer +2, −1.5 or −2: see ``verifier``."""
        return score(problem.data["names"], problem.data["solution"], text, opened_think=self.open_think)

    def demonstration(self, problem: Problem, seed: int = 0, noise: float | None = None) -> str:
        """A worked solution in the style of the task."""
        noise = self.noise if noise is None else noise
        text = worked(Puzzle.of(problem), style=self.style, noise=noise, seed=seed, wording=self.wording)
        return text.removeprefix(TAGS[0]) if self.open_think else text


def _counts(people: int | str | Sequence[int]) -> tuple[int, ...]:
    if isinstance(people, int):
        return (people,)
    if not isinstance(people, str):
        counts = tuple(people)
    elif match := re.fullmatch(r"\s*(\d{1,3})\s*(?:-\s*(\d{1,3})\s*)?", people):
        counts = tuple(range(int(match[1]), int(match[2] or match[1]) + 1))
    else:
        raise ValueError(f"KnightsKnaves: people must be like 5, (3, 4) or '3-7', got {people!r}")
    if not counts:
        raise ValueError(f"KnightsKnaves: people = {people!r} is empty; in a range the smaller number comes first")
    return counts
