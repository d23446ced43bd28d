"""Knights and Knaves as a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import count
from random import Random
from typing import Any, ClassVar

from poise._lib.files import expand
from poise.tasks.base import Problem, Score, Split, TaskError, check_split
from poise.tasks.data.rows import fingerprint
from poise.tasks.knights_knaves.generator import check_settings, draw, tell
from poise.tasks.knights_knaves.puzzle import NAMES, Puzzle, answer_text, read
from poise.tasks.knights_knaves.statements import canonical, solve, split_of
from poise.tasks.knights_knaves.verifier import feedback, score
from poise.tasks.streams import draw_of_split, sizes

INSTRUCTION = (
    "Think first, then say who is what, in this form: "
    "<think>your reasoning</think><answer>(1) NAME is a knight (2) NAME is a knave ...</answer>"
)
_GENERATED = ("depth", "phrasing", "names")  # settings of puzzles that are generated


@dataclass(frozen=True)
class KnightsKnaves:
    """Knights & Knaves: logic puzzles without end, or those of a file, split into train and test by their meaning.

    ``people`` is a number, several, or a range such as ``"3-7"``, which is the default; the numbers take turns. With
    ``file`` the puzzles are those of a file in the public format (``.jsonl``, ``.jsonl.gz``, ``.parquet``), all of them
    unless ``people`` says which. ``depth`` is how deep statements nest, ``instruction`` the text before a puzzle,
    ``phrasing`` varied or plain, and ``names`` are those of the people.
    """

    people: int | str | Sequence[int] | None = None
    depth: int = 1
    instruction: str = INSTRUCTION
    phrasing: str = "varied"
    names: Sequence[str] = NAMES
    file: str | None = None

    # Only where the puzzles are those of a file: the order of a split's puzzles in one epoch.
    epoch: Callable[[Split, int, int], Sequence[Problem]] = field(init=False, repr=False, compare=False)
    of_file: dict[str, list[Problem]] = field(init=False, repr=False, compare=False)  # by split
    fingerprint: str = field(init=False, repr=False, compare=False)  # another one: the puzzles are others

    name: ClassVar[str] = "kk"
    concurrent: ClassVar[bool] = True  # may be asked for scores from another thread

    def __post_init__(self) -> None:
        if self.file is None:
            object.__setattr__(self, "people", _counts("3-7" if self.people is None else self.people))
        else:
            self._read_file()
        if not isinstance(self.names, str):
            object.__setattr__(self, "names", tuple(self.names))
        for people in self.counts if self.file is None else ():
            check_settings(people, self.depth, self.names, self.phrasing)

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of people, however they were given."""
        return _counts(self.people or ())

    def problems(self, split: Split, seed: int) -> Iterator[Problem]:
        """Problems of one split; no meaning is in both. Those of a file come again, in another order."""
        check_split(split)
        if self.file is not None:
            for number in count():
                yield from self.epoch(split, seed, number)
        rng = Random(f"problems {seed}")
        for turn in count():
            people = self.counts[turn % len(self.counts)]
            yield self._puzzle(people, split, rng).problem(self.instruction)

    def _puzzle(self, people: int, split: Split, rng: Random) -> Puzzle:
        def drawn(rng: Random) -> tuple[str, tuple[Any, ...]]:
            seed = rng.getrandbits(48)
            statements, solution = draw(people, seed, self.depth)
            return canonical(statements), (statements, solution, seed)

        found = draw_of_split(f"KnightsKnaves with {people} people", split, rng, drawn)
        return tell(*found, depth=self.depth, names=self.names, phrasing=self.phrasing)

    def _read_file(self) -> None:
        for name in _GENERATED:
            if getattr(self, name) != next(own.default for own in fields(self) if own.name == name):
                raise ValueError(f"KnightsKnaves: {name} is of generated puzzles, and these come from file {self.file}")
        wanted = None if self.people is None else _counts(self.people)
        puzzles = [puzzle for puzzle in _read(str(self.file)) if wanted is None or puzzle.people in wanted]
        if not puzzles:
            whom = "" if wanted is None else f" with {', '.join(map(str, wanted))} people"
            raise ValueError(f"KnightsKnaves: file {self.file} has no puzzle{whom}")
        parts: dict[str, list[Problem]] = {"train": [], "test": []}
        for puzzle in puzzles:
            parts[split_of(puzzle.statements)].append(puzzle.problem(self.instruction))
        object.__setattr__(self, "people", tuple(sorted({puzzle.people for puzzle in puzzles})))
        object.__setattr__(self, "of_file", parts)
        object.__setattr__(self, "fingerprint", fingerprint(parts))
        object.__setattr__(self, "epoch", self._epoch)

    def _epoch(self, split: Split, seed: int, number: int) -> list[Problem]:
        check_split(split)
        order = list(self.of_file[split])
        if not order:
            raise TaskError(
                f"KnightsKnaves: file {self.file} has no {split} puzzle: about a tenth of all meanings are for "
                "testing, and the others for training; take a file with more puzzles"
            )
        Random(f"epoch {seed} {number}").shuffle(order)
        return order

    def score(self, problem: Problem, text: str) -> Score:
        """Format ±1 and answer +2, −1.5 or −2: see ``verifier``."""
        return score(problem.data["names"], problem.data["solution"], text)

    def feedback(self, problem: Problem, text: str) -> str:
        """What is wrong with a response: tags, people left out, or claims that contradict the answer."""
        return feedback(problem.data["names"], problem.data["statements"], text)

    def gold(self, problem: Problem) -> str:
        """The right answer, as it should stand between the answer tags."""
        return answer_text(problem.data["names"], problem.data["solution"])


def _read(file: str) -> list[Puzzle]:
    """The puzzles of a file, each with one solution, which is the one it says."""
    puzzles = read(expand(file))
    for puzzle in puzzles:
        if solve(puzzle.statements) != [list(puzzle.solution)]:
            raise ValueError(f"KnightsKnaves: file {file}: {puzzle.id} has another solution than it says, or several")
    return puzzles


def _counts(people: int | str | Sequence[int]) -> tuple[int, ...]:
    return sizes("KnightsKnaves", "people", people, 0, 999)  # check_settings has the range
