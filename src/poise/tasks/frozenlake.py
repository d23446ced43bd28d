"""Frozen Lake: walk over ice to a goal and avoid the holes, one move a turn.

The rules are gymnasium's: a move beyond the edge does nothing, a hole ends the game, and on a slippery lake a move goes
in the chosen direction or to one of the two sides, each with probability 1/3. As in ERL (arXiv 2602.13949), maps have
sides 2 to 9 and 60 to 85 % ice, and the rules may be withheld: then the symbols are letters without a meaning.
**Ours:** start and goal are random, and every map can be solved within the turns and takes at least two moves.
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
    """Frozen Lake: cross the ice to the goal in several turns, on endless random maps.

    ``side`` is a number, several numbers, or a range; maps cycle through them. ``ice`` is the smallest and the largest
    share of cells without a hole. ``actions`` limits the moves of a reply, ``turns`` the replies of an episode.
    ``rules`` are told or withheld. If ``slippery``, a move may go to one of the two sides instead.
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
            raise ValueError(f"FrozenLake: ice must be the smallest and the largest share, got {self.ice!r}")
        self.ice = tuple(self.ice)
        check_range("FrozenLake", "ice[0]", self.ice[0], 0.3, 1.0)
        check_range("FrozenLake", "ice[1]", self.ice[1], self.ice[0], 1.0)

    def draw(self, side: int, rng: Random) -> list[str]:
        """Rows of P, _, O and G. Of the 8 maps with side 2, two are for testing."""
        cells = [(row, column) for row in range(side) for column in range(side)]
        start, goal, *free = rng.sample(cells, len(cells))
        holes = round(side * side * (1 - rng.uniform(*self.ice)))
        kind = dict.fromkeys(free[:holes], "O") | {start: "P", goal: "G"}
        return ["".join(kind.get((row, column), "_") for column in range(side)) for row in range(side)]

    def solution(self, rows: list[str]) -> list[str] | None:
        """The shortest path over ice."""
        return _path(rows, find(rows, "P"), self.turns * self.actions)

    def rules_text(self) -> str:
        """The rules in words."""
        return TOLD + (SLIPPERY if self.slippery else "")

    def picture(self, rows: Sequence[str]) -> str:
        """A map in the symbols that the model sees."""
        return draw_map(row.translate(str.maketrans(SYMBOLS["told"], SYMBOLS[self.rules])) for row in rows)

    def episode(self, problem: Problem) -> FrozenLakeEpisode:
        """One game."""
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
        """Whether the player stands on the goal."""
        return self.here == "G"

    @property
    def over(self) -> bool:
        """Whether the player stands on the goal or in a hole."""
        return self.here in "GO"

    def move(self, direction: str) -> str:
        """Walk, or slip."""
        actual = self._slip(direction) if self.task.slippery else direction
        there = neighbour(self.place, actual)
        slipped = "" if actual == direction else f" and slipped {actual}"
        if not _inside(self.rows, there):
            self.idle += 1
            return f"You went {direction}{slipped}, and the edge stopped you."
        self.place = there
        return f"You went {direction}{slipped}."

    def _slip(self, direction: str) -> str:
        """The move itself, or a move to one of its sides. The choice depends on the map and all replies so far, so an
        episode can be replayed and different attempts slip differently."""
        rng = Random(repr((self.problem.id, self.replies, len(self.moves))))
        down, _ = DIRECTIONS[direction]
        return rng.choice([direction, *(("left", "right") if down else ("up", "down"))])

    def picture(self) -> str:
        """The map with the player on it."""
        row, column = self.place
        rows = list(self.rows)
        rows[row] = rows[row][:column] + "P" + rows[row][column + 1 :]
        return self.task.picture(rows)

    def solution(self) -> list[str] | None:
        """The shortest path over ice."""
        return _path(self.rows, self.place, len(self.rows) ** 2)

    def ending(self) -> str:
        """The state of the game in a sentence."""
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
    """The shortest path from ``start`` to the goal around the holes."""

    def after(place: Place, move: str) -> Place | None:
        there = neighbour(place, move)
        return there if _inside(rows, there) and rows[there[0]][there[1]] != "O" else None

    goal = find(rows, "G")
    return shortest(start, after, lambda place: place == goal, most)
