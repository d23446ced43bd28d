"""Sokoban: push a box onto its goal, one move a turn.

As in ERL (arXiv 2602.13949), a map has one box, 6 to 8 cells on each side including the outer wall, and a shortest
solution of at most 8 moves. **Ours:** maps are random, and breadth-first search over the positions of player and box
solves each map. A map that cannot be solved within the turns, or needs fewer than two moves, is discarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from poise._lib.errors import check_range, check_whole
from poise.tasks.base import Problem
from poise.tasks.grid import FEWEST_MOVES, Board, GridEpisode, GridTask, Place, find, neighbour, where

TOLD = (
    "You push a box onto a goal. # is a wall, _ is floor, P is you, X is the box, O is the goal, + is you on the goal. "
    "Walking into the box pushes it one step, unless a wall is behind it. You cannot pull."
)

State = tuple[Place, Place]  # the positions of player and box


class Warehouse(Board):
    """A map with fixed walls and goal; the state has the places of the player and the box."""

    symbols = ("#_PXO*+", "ABCDEFG")  # wall, floor, you, the box, the goal, box on goal, you on goal

    def __init__(self, rows: Sequence[str]) -> None:
        super().__init__(rows)
        self.walls = {(row, column) for row, line in enumerate(rows) for column, sign in enumerate(line) if sign == "#"}
        self.goal = find(rows, "O")
        self.state: State = (find(rows, "P"), find(rows, "X"))

    def after(self, state: State, move: str) -> State | None:
        """Return the state after a move; None if the move is impossible."""
        you, box = neighbour(state[0], move), state[1]
        if you == box:
            box = neighbour(box, move)
        return None if you in self.walls or box in self.walls else (you, box)

    def won(self, state: State) -> bool:
        """Whether the box is on the goal."""
        return state[1] == self.goal

    def symbol(self, place: Place) -> str:
        """Return the symbol of a cell."""
        you, box = self.state
        if place in self.walls:
            return "#"
        if place == box:
            return "*" if place == self.goal else "X"
        if place == you:
            return "+" if place == self.goal else "P"
        return "O" if place == self.goal else "_"


@dataclass
class Sokoban(GridTask):
    """Sokoban: push one box onto its goal in several turns, on an endless stream of random maps.

    ``side`` is the length of a side in cells, including the outer walls: a number, several numbers or a range; maps
    cycle through these numbers. ``optimum`` is the maximum number of moves of the shortest solution. ``walls`` is the
    share of walls among the inner cells. ``actions`` is the maximum number of moves per reply, ``turns`` the maximum
    number of replies per episode. ``rules`` is ``told`` or ``withheld``.
    """

    side: int | str | Sequence[int] = "6-8"
    turns: int = 12
    optimum: int = 8
    walls: float = 0.15

    name: ClassVar[str] = "sokoban"
    board: ClassVar[type[Board]] = Warehouse
    smallest: ClassVar[int] = 5
    largest: ClassVar[int] = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("Sokoban", "optimum", self.optimum, FEWEST_MOVES, 30)
        check_range("Sokoban", "walls", self.walls, 0.0, 0.5)

    def draw(self, side: int, rng: Random) -> list[str]:
        """Draw a random map: rows of #, _, P, X and O."""
        inner = [(row, column) for row in range(1, side - 1) for column in range(1, side - 1)]
        you, box, goal, *free = rng.sample(inner, len(inner))
        kind = dict.fromkeys(free[: round(self.walls * len(inner))], "#") | {you: "P", box: "X", goal: "O"}
        kind |= {place: kind.get(place, "_") for place in inner}
        return ["".join(kind.get((row, column), "#") for column in range(side)) for row in range(side)]

    @property
    def most_moves(self) -> int:
        """The largest number of moves that a map's shortest solution may have."""
        return min(self.optimum, super().most_moves)

    def rules_text(self) -> str:
        """Return the rules in words."""
        return TOLD

    def episode(self, problem: Problem) -> SokobanEpisode:
        """Start a game on the problem's map."""
        return SokobanEpisode(problem, self)


class SokobanEpisode(GridEpisode):
    """One game on one map. A box stuck in a corner does not end the game."""

    task: Sokoban
    board: Warehouse

    def move(self, direction: str) -> str:
        """Move the player one cell, and push the box if the box is in the way."""
        following = self.board.after(self.board.state, direction)
        if following is None:
            self.idle += 1
            return f"You cannot go {direction}."
        pushed = following[1] != self.board.state[1]
        self.board.state = following
        return f"You went {direction}{' and pushed the box' if pushed else ''}."

    def ending(self) -> str:
        """Describe the state of the game and the position of the box."""
        box, stuck = self.board.state[1], not self.won and self.solution() is None
        if self.task.rules == "withheld":
            symbol = self.board.symbol(box).translate(str.maketrans(*Warehouse.symbols))
            end = " No move leads to success from there." if stuck else ""
            return f"{symbol} ended at {where(box)}.{end}"
        if self.won:
            return "The box is on the goal."
        could = "and it cannot get there any more" if stuck else "but it still could get there"
        return f"The box is at {where(box)}, the goal at {where(self.board.goal)}: it is not on the goal, {could}."
