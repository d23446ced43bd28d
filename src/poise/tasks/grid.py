"""Shared code for games on a grid: boards, the moves in a reply, and turns."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import cycle
from random import Random
from typing import Any, ClassVar

from poise._lib.errors import check_choice, check_whole
from poise.tasks.base import Message, Problem, Score, Split, sizes
from poise.tasks.rewards.answers import conclusion
from poise.tasks.streams import check_split, draw_of_split

Place = tuple[int, int]  # row, column
DIRECTIONS: dict[str, Place] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
RULES = ("told", "withheld")
FEWEST_MOVES = 2  # a map that is solved in one move teaches nothing
WITHHELD = "You play a game on a grid. The rules are not told: find out what leads to success."
ONE = "Each turn, reply with one move: up, down, left or right."
SEVERAL = "Each turn, reply with up to {} moves out of up, down, left and right, such as: up left."
LISTED = 12  # last moves that feedback lists
_MOVE = re.compile(r"\b(up|down|left|right)\b", re.IGNORECASE | re.ASCII)


def moves_in(reply: str, most: int = 1) -> list[str]:
    """Return the last ``most`` moves that a reply names, in order. Ignore the reasoning.

    >>> moves_in("Up is a hole, so I go left.")
    ['left']
    """
    return list(deque((match[0].lower() for match in _MOVE.finditer(conclusion(reply))), maxlen=most))


def neighbour(place: Place, move: str) -> Place:
    """Return the cell one move away from ``place``."""
    down, right = DIRECTIONS[move]
    return place[0] + down, place[1] + right


def find(rows: Sequence[str], symbol: str) -> Place:
    """Return the first cell of a map that has this symbol."""
    return next((row, line.index(symbol)) for row, line in enumerate(rows) if symbol in line)


def where(place: Place) -> str:
    """Describe a cell in words; the top left cell is row 1, column 1."""
    return f"row {place[0] + 1}, column {place[1] + 1}"


class Board(ABC):
    """A map and its state: where the movable things are."""

    symbols: ClassVar[tuple[str, str]]  # a map's symbols if the rules are told, and if they are withheld
    state: Any  # hashable

    def __init__(self, rows: Sequence[str]) -> None:
        self.side = len(rows)

    @abstractmethod
    def after(self, state: Any, move: str) -> Any:
        """Return the state after a move; None if the move is impossible."""

    @abstractmethod
    def won(self, state: Any) -> bool:
        """Whether the game is won."""

    def lost(self, state: Any) -> bool:  # noqa: ARG002
        """Whether the game is lost."""
        return False

    @abstractmethod
    def symbol(self, place: Place) -> str:
        """Return the symbol of a cell, as drawn if the rules are told."""

    def picture(self, rules: str) -> str:
        """Return the text of the map, with spaces between the symbols so that tokenizers do not merge them."""
        cells = range(self.side)
        text = "\n".join(" ".join(self.symbol((row, column)) for column in cells) for row in cells)
        return text if rules == "told" else text.translate(str.maketrans(*self.symbols))

    def solution(self, most: int) -> list[str] | None:
        """Find the shortest list of moves that wins, by breadth-first search; None if it has more than ``most``."""
        seen = {self.state}
        queue: deque[tuple[Any, list[str]]] = deque([(self.state, [])])
        while queue:
            state, path = queue.popleft()
            if self.won(state):
                return path
            for move in DIRECTIONS if len(path) < most else ():
                following = self.after(state, move)
                if following is not None and following not in seen and not self.lost(following):
                    seen.add(following)
                    queue.append((following, [*path, move]))
        return None


@dataclass
class GridTask(ABC):
    """A game on an endless stream of random maps. A map is a list of rows of symbols; no map is in both splits."""

    side: int | str | Sequence[int] = 2
    turns: int = 8
    actions: int = 1
    rules: str = "told"

    name: ClassVar[str]
    board: ClassVar[type[Board]]
    smallest: ClassVar[int]  # the smallest side of a map
    largest: ClassVar[int]
    concurrent: ClassVar[bool] = True
    pure_start: ClassVar[bool] = True

    def __post_init__(self) -> None:
        owner = type(self).__name__
        self.side = self.sides = sizes(owner, "side", self.side, self.smallest, self.largest)
        check_whole(owner, "turns", self.turns, 1, 64)
        check_whole(owner, "actions", self.actions, 1, 32)
        check_choice(owner, "rules", self.rules, RULES)
        if self.turns * self.actions < FEWEST_MOVES:
            raise ValueError(f"{owner}: a map takes at least two moves: raise turns or actions")

    @abstractmethod
    def draw(self, side: int, rng: Random) -> list[str]:
        """Draw a random map, which may have no solution."""

    @abstractmethod
    def rules_text(self) -> str:
        """Return the rules in words."""

    @property
    def most_moves(self) -> int:
        """The largest number of moves that a map's shortest solution may have."""
        return self.turns * self.actions

    def problems(self, split: Split, seed: int) -> Iterator[Problem]:
        """Yield the problems of one split, one map each."""
        check_split(split)
        rng = Random(f"{self.name} {seed}")
        for side in cycle(self.sides):
            yield self._problem(draw_of_split(type(self).__name__, split, partial(self._draw, side, rng), self._suits))

    def _draw(self, side: int, rng: Random) -> tuple[str, list[str]]:
        """Draw a map. Return a text that identifies the map, and the map's rows."""
        rows = self.draw(side, rng)
        return f"{self.name} " + "\n".join(rows), rows

    def _suits(self, rows: list[str]) -> bool:
        """Whether a map can be solved within the turns, and is not too easy."""
        return len(self.board(rows).solution(self.most_moves) or ()) >= FEWEST_MOVES

    def _problem(self, rows: list[str]) -> Problem:
        rules = self.rules_text() if self.rules == "told" else WITHHELD
        how = ONE if self.actions == 1 else SEVERAL.format(self.actions)
        prompt = f"{rules} {how}\n{self.board(rows).picture(self.rules)}\nTurn 1 of {self.turns}. Your move?"
        number = sha256("\n".join(rows).encode()).hexdigest()[:12]
        return Problem(f"{self.name}/{len(rows)}/{number}", prompt, f"{len(rows)}x{len(rows)}", {"map": rows})


class GridEpisode(ABC):
    """A game on a grid, with up to ``turns`` replies and up to ``actions`` moves per reply.

    A reply without a move uses up a turn, and the next message says so.
    """

    def __init__(self, problem: Problem, task: GridTask) -> None:
        self.problem, self.task, self.turns, self.actions = problem, task, task.turns, task.actions
        self.board = task.board(problem.data["map"])
        self.replies: list[str] = []
        self.moves: list[str] = []
        self.idle = 0  # moves that changed nothing

    @property
    def won(self) -> bool:
        """Whether the game is won."""
        return self.board.won(self.board.state)

    @property
    def over(self) -> bool:
        """Whether the game is won or lost."""
        return self.won or self.board.lost(self.board.state)

    def solution(self) -> list[str] | None:
        """Return the shortest solution from the current state; None if there is none."""
        return self.board.solution(4 * self.board.side**2)

    @abstractmethod
    def move(self, direction: str) -> str:
        """Make a move, and describe in a sentence what happened. Increase ``idle`` if the move changes nothing."""

    @abstractmethod
    def ending(self) -> str:
        """Describe the state of the game. If the rules are withheld, name symbols, not their meanings."""

    def start(self) -> list[Message]:
        """Return the message with the map and, unless they are withheld, the rules."""
        return [{"role": "user", "content": self.problem.prompt}]

    def step(self, reply: str) -> list[Message]:
        """Make the reply's moves, and return a message with the new map."""
        self.replies.append(reply)
        directions = moves_in(reply, self.actions)
        events = []
        for direction in directions:
            if not self.over:
                self.moves.append(direction)
                events.append(self.move(direction))
        if self.over or len(self.replies) >= self.turns:
            return []
        if not directions:
            events = ["Your reply names no move. Write up, down, left or right."]
        elif self.task.rules == "withheld":
            events = []
        turn = f"Turn {len(self.replies) + 1} of {self.turns}. Your move?"
        return [{"role": "user", "content": "\n".join([*events, self.board.picture(self.task.rules), turn])}]

    def score(self) -> Score:
        """Score 1 if the game is won, else 0. The answer is the list of moves."""
        return Score(float(self.won), self.won, answer=" ".join(self.moves) or None)

    def feedback(self) -> str:
        """Describe how the episode ended, for methods that learn from text."""
        sentences = [self.ending()]
        if not self.over and len(self.replies) >= self.turns:
            sentences.append(f"All {self.turns} turns are used up.")
        if silent := sum(not moves_in(reply) for reply in self.replies):
            sentences.append(f"Replies without a move: {silent}.")
        if self.idle:
            sentences.append(f"Moves that changed nothing: {self.idle}.")
        listed = " ".join(["...", *self.moves[-LISTED:]] if len(self.moves) > LISTED else self.moves) or "none"
        return " ".join([*sentences, f"Moves made: {len(self.moves)} ({listed}). Reward: {float(self.won):g}."])

    def expert(self) -> str:
        """Return a solver's reply: the first ``actions`` moves of the shortest solution."""
        return " ".join((self.solution() or ["up"])[: self.actions])
