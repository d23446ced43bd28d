"""A puzzle, the way between it and a ``Problem``, and puzzles of the public set, from its files."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from poise.tasks.base import Problem
from poise.tasks.data.rows import Row, read_all
from poise.tasks.knights_knaves.statements import Statement, check
from poise.tasks.knights_knaves.wording import ROLE, role


@dataclass(frozen=True)
class Puzzle:
    """People, what each of them says, and who they are."""

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
            raise ValueError(
                f"puzzle {self.id!r}: {people} statements, {len(self.names)} names and "
                f"{len(self.solution)} roles in the solution; there must be as many of each"
            )
        if not all(isinstance(name, str) and name.strip() for name in self.names):
            raise ValueError(f"puzzle {self.id!r}: names must be non-empty text, got {self.names!r}")
        if len({name.casefold() for name in self.names}) != people:
            raise ValueError(f"puzzle {self.id!r}: names must differ, got {', '.join(self.names)}")
        if any(ROLE.search(name) for name in self.names):
            raise ValueError(f"puzzle {self.id!r}: no one may be called knight or knave, got {', '.join(self.names)}")
        if not all(isinstance(knight, bool) for knight in self.solution):
            raise ValueError(f"puzzle {self.id!r}: the solution must be booleans, got {self.solution!r}")

    @property
    def people(self) -> int:
        """How many people there are."""
        return len(self.names)

    @property
    def answer(self) -> str:
        """The right answer, as it should stand between the answer tags."""
        return answer_text(self.names, self.solution)

    def problem(self, instruction: str = "") -> Problem:
        """This puzzle as a problem: the prompt is the instruction and the quiz."""
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
        """The puzzle that a problem was made from."""
        data = problem.data
        return cls(tuple(data["names"]), tuple(data["statements"]), tuple(data["solution"]), data["quiz"], problem.id)


def answer_text(names: tuple[str, ...], knights: tuple[bool, ...] | list[bool]) -> str:
    """``(1) Ada is a knight (2) …``."""
    roles = zip(names, knights, strict=True)
    return " ".join(f"({i}) {name} is a {role(knight)}" for i, (name, knight) in enumerate(roles, 1))


def _as_lists(value: Any) -> Any:
    return [_as_lists(part) for part in value] if isinstance(value, tuple) else value


def read(path: str | PathLike[str]) -> list[Puzzle]:
    """The puzzles of a file (``.jsonl``, ``.parquet``, …), in file order, their quiz texts as they are."""
    return [_puzzle(row, Path(path), number) for number, row in read_all(str(path))]


def _puzzle(row: Row, path: Path, number: int) -> Puzzle:
    where = f"{path}, row {number}"
    missing = [field for field in ("names", "statements", "solution", "quiz") if field not in row]
    if missing:
        raise ValueError(f"{where}: no field {missing[0]!r} (there are: {', '.join(row)})")
    statements = row["statements"]
    try:
        if isinstance(statements, str):
            statements = ast.literal_eval(statements)
        return Puzzle(tuple(row["names"]), statements, tuple(row["solution"]), row["quiz"], f"{path.name}:{number}")
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{where}: {error}") from None
