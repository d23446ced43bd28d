"""Frozen Lake: walk over ice to a goal and avoid the holes, one move a turn.

The rules are gymnasium's: a move beyond the edge does nothing, and a hole ends the game. On a slippery lake a move goes
in the chosen direction or to one of the two sides, each with probability 1/3. As in ERL (arXiv 2602.13949), maps have 2
to 9 cells on each side and 60 to 85 % ice. The rules may be withheld; the symbols are then letters without a meaning.
**Ours:** start and goal are random. Every map can be solved within the turns and needs at least two moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from poise._lib.errors import check_range
from poise.tasks.base import Problem
from poise.tasks.grid import DIRECTIONS, GridEpisode, GridTask, Place, draw_map, find, neighbour, shortest, where

SYMBOLS = {"told": "P_OG", "withheld": "ABCD"}  # you, ice, a hole, the goal

TOLD = (
    "You walk on a frozen lake. P is you, _ is ice, O is a hole, G is the goal. Get to G without falling into a hole. "
    "At the edge you stay where you are."
)
SLIPPERY = " The ice is slippery: a move may take you to the side of where you wanted to go."


@dataclass
class FrozenLake(GridTask):
    """Frozen Lake: cross the ice to the goal in several turns, on an endless stream of random maps.

    ``side`` is the length of a side in cells: a number, several numbers or a range; maps cycle through these numbers.
    ``ice`` is the smallest and the largest share of cells without a hole. ``actions`` is the maximum number of moves
    per reply, ``turns`` the maximum number of replies per episode. ``rules`` is ``told`` or ``withheld``. If
    ``slippery`` is true, a move may go to one of the two sides instead.
    """

    side: int | str | Sequence[int] = "2-9"
    slippery: bool = False
    ice: Sequence[float] = (0.6, 0.85)

    name: ClassVar[str] = "frozenlake"
    smallest: ClassVar[int] = 2
    largest: ClassVar[int] = 9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.ice, Sequence) or isinstance(self.ice, str) or len(self.ice) != 2:
            raise ValueError(
                f"FrozenLake: ice must be two numbers, the smallest and the largest share of ice, got {self.ice!r}"
            )
        self.ice = tuple(self.ice)
        check_range("FrozenLake", "ice[0]", self.ice[0], 0.3, 1.0)
        check_range("FrozenLake", "ice[1]", self.ice[1], self.ice[0], 1.0)

    def draw(self, side: int, rng: Random) -> list[str]:
        """Draw a random map: rows of P, _, O and G. Two of the 8 maps with side 2 belong to the test split."""
        cells = [(row, column) for row in range(side) for column in range(side)]
        start, goal, *free = rng.sample(cells, len(cells))
        holes = round(side * side * (1 - rng.uniform(*self.ice)))
        kind = dict.fromkeys(free[:holes], "O") | {start: "P", goal: "G"}
        return ["".join(kind.get((row, column), "_") for column in range(side)) for row in range(side)]

    def solution(self, rows: list[str]) -> list[str] | None:
        """Return the shortest path over the ice; None if the path has too many moves."""
        return _path(rows, find(rows, "P"), self.turns * self.actions)

    def rules_text(self) -> str:
        """Return the rules in words."""
        return TOLD + (SLIPPERY if self.slippery else "")

    def picture(self, rows: Sequence[str]) -> str:
        """Return the text of a map, in the symbols that the model sees."""
        return draw_map(row.translate(str.maketrans(SYMBOLS["told"], SYMBOLS[self.rules])) for row in rows)

    def episode(self, problem: Problem) -> FrozenLakeEpisode:
        """Start a game on the problem's map."""
        return FrozenLakeEpisode(problem, self)


class FrozenLakeEpisode(GridEpisode):
    """One game on one map."""

    def __init__(self, problem: Problem, task: FrozenLake) -> None:
        super().__init__(problem, task)
        self.task = task
        rows: list[str] = problem.data["map"]
        self.place = find(rows, "P")
        self.rows = [row.replace("P", "_") for row in rows]

    @property
    def here(self) -> str:
        """The symbol under the player."""
        return self.rows[self.place[0]][self.place[1]]

    @property
    def won(self) -> bool:
        """Whether the player is on the goal."""
        return self.here == "G"

    @property
    def over(self) -> bool:
        """Whether the player is on the goal or in a hole."""
        return self.here in "GO"

    def move(self, direction: str) -> str:
        """Move the player one cell; on a slippery lake the direction may change."""
        actual = self._slip(direction) if self.task.slippery else direction
        there = neighbour(self.place, actual)
        slipped = "" if actual == direction else f" and slipped {actual}"
        if not _inside(self.rows, there):
            self.idle += 1
            return f"You went {direction}{slipped}, and the edge stopped you."
        self.place = there
        return f"You went {direction}{slipped}."

    def _slip(self, direction: str) -> str:
        """Return ``direction`` or, at random, the direction to one of its sides.

        The choice depends on the map and all replies so far, so an episode can be replayed and different attempts slip
        differently.
        """
        rng = Random(repr((self.problem.id, self.replies, len(self.moves))))
        down, _ = DIRECTIONS[direction]
        return rng.choice([direction, *(("left", "right") if down else ("up", "down"))])

    def picture(self) -> str:
        """Return the text of the map with the player."""
        row, column = self.place
        rows = list(self.rows)
        rows[row] = rows[row][:column] + "P" + rows[row][column + 1 :]
        return self.task.picture(rows)

    def solution(self) -> list[str] | None:
        """Return the shortest path over the ice from the player's cell; None if there is no path."""
        return _path(self.rows, self.place, len(self.rows) ** 2)

    def ending(self) -> str:
        """Describe the state of the game in a sentence."""
        if self.task.rules == "withheld":
            you, _, hole, goal = tuple(SYMBOLS["withheld"])
            if not self.over:
                return f"{you} ended at {where(self.place)}."
            return f"{you} moved onto {goal if self.won else hole} at {where(self.place)}, and the game was over."
        if self.won:
            return "You reached the goal."
        if self.over:
            return f"You fell into a hole at {where(self.place)}."
        return f"You did not reach the goal in time: you ended at {where(self.place)}."


def _inside(rows: Sequence[str], place: Place) -> bool:
    return 0 <= place[0] < len(rows) and 0 <= place[1] < len(rows)


def _path(rows: Sequence[str], start: Place, most: int) -> list[str] | None:
    """Return the shortest path from ``start`` to the goal around the holes; None if it has more than ``most`` moves."""

    def after(place: Place, move: str) -> Place | None:
        there = neighbour(place, move)
        return there if _inside(rows, there) and rows[there[0]][there[1]] != "O" else None

    goal = find(rows, "G")
    return shortest(start, after, lambda place: place == goal, most)
