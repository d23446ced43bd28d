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
from poise.tasks.grid import DIRECTIONS, Board, GridEpisode, GridTask, Place, find, neighbour, where

TOLD = (
    "You walk on a frozen lake. P is you, _ is ice, O is a hole, G is the goal. Get to G without falling into a hole. "
    "At the edge you stay where you are."
)
SLIPPERY = " The ice is slippery: a move may take you to the side of where you wanted to go."


class Lake(Board):
    """A lake; the state is the player's place."""

    symbols = ("P_OG", "ABCD")  # you, ice, a hole, the goal

    def __init__(self, rows: Sequence[str]) -> None:
        super().__init__(rows)
        self.state = find(rows, "P")
        self.cells = [row.replace("P", "_") for row in rows]

    def under(self, place: Place) -> str:
        """Return the symbol of a cell without the player."""
        return self.cells[place[0]][place[1]]

    def after(self, state: Place, move: str) -> Place | None:
        """Return the player's place after a move; None at the edge."""
        there = neighbour(state, move)
        return there if 0 <= there[0] < self.side and 0 <= there[1] < self.side else None

    def won(self, state: Place) -> bool:
        """Whether the player is on the goal."""
        return self.under(state) == "G"

    def lost(self, state: Place) -> bool:
        """Whether the player is in a hole."""
        return self.under(state) == "O"

    def symbol(self, place: Place) -> str:
        """Return the symbol of a cell."""
        return "P" if place == self.state else self.under(place)


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
    board: ClassVar[type[Board]] = Lake
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

    def rules_text(self) -> str:
        """Return the rules in words."""
        return TOLD + (SLIPPERY if self.slippery else "")

    def episode(self, problem: Problem) -> FrozenLakeEpisode:
        """Start a game on the problem's map."""
        return FrozenLakeEpisode(problem, self)


class FrozenLakeEpisode(GridEpisode):
    """One game on one map."""

    task: FrozenLake

    def move(self, direction: str) -> str:
        """Move the player one cell; on a slippery lake the direction may change."""
        actual = self._slip(direction) if self.task.slippery else direction
        slipped = "" if actual == direction else f" and slipped {actual}"
        there = self.board.after(self.board.state, actual)
        if there is None:
            self.idle += 1
            return f"You went {direction}{slipped}, and the edge stopped you."
        self.board.state = there
        return f"You went {direction}{slipped}."

    def _slip(self, direction: str) -> str:
        """Return ``direction`` or, at random, the direction to one of its sides.

        The choice depends only on the map, the replies and the number of moves, so an episode can be replayed.
        """
        rng = Random(repr((self.problem.id, self.replies, len(self.moves))))
        down, _ = DIRECTIONS[direction]
        return rng.choice([direction, *(("left", "right") if down else ("up", "down"))])

    def ending(self) -> str:
        """Describe the state of the game in a sentence."""
        here = where(self.board.state)
        if self.task.rules == "withheld":
            you, _, hole, goal = tuple(Lake.symbols[1])
            if not self.over:
                return f"{you} ended at {here}."
            return f"{you} moved onto {goal if self.won else hole} at {here}, and the game was over."
        if self.won:
            return "You reached the goal."
        if self.over:
            return f"You fell into a hole at {here}."
        return f"You did not reach the goal in time: you ended at {here}."
