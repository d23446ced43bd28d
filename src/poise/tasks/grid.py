"""Shared code for games on a grid: maps, the moves in a reply, turns, and a search for the shortest solution."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import count
from random import Random
from typing import ClassVar, TypeVar

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

State = TypeVar("State", bound=Hashable)


def moves_in(reply: str, most: int = 1) -> list[str]:
    """Return the last ``most`` moves that a reply names, in order. Ignore the reasoning.

    >>> moves_in("Up is a hole, so I go left.")
    ['left']
    """
    return list(deque((match[0].lower() for match in _MOVE.finditer(conclusion(reply))), maxlen=most))


def shortest(
    start: State, after: Callable[[State, str], State | None], won: Callable[[State], bool], most: int
) -> list[str] | None:
    """Find the shortest list of moves that wins, by breadth-first search; None if it has more than ``most`` moves.

    ``after`` returns the state after a move, or None if the move is impossible or loses the game.
    """
    seen = {start}
    queue: deque[tuple[State, list[str]]] = deque([(start, [])])
    while queue:
        state, path = queue.popleft()
        if won(state):
            return path
        for move in DIRECTIONS if len(path) < most else ():
            following = after(state, move)
            if following is not None and following not in seen:
                seen.add(following)
                queue.append((following, [*path, move]))
    return None


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


def draw_map(rows: Iterable[Iterable[str]]) -> str:
    """Format a map as text, with spaces between the symbols so that tokenizers do not merge symbols."""
    return "\n".join(" ".join(row) for row in rows)


@dataclass
class GridTask(ABC):
    """A game on an endless stream of random maps. A map is a list of rows of symbols; no map is in both splits."""

    side: int | str | Sequence[int] = 2
    turns: int = 8
    actions: int = 1
    rules: str = "told"

    name: ClassVar[str]
    smallest: ClassVar[int]  # the smallest side of a map
    largest: ClassVar[int]
    concurrent: ClassVar[bool] = True
    pure_start: ClassVar[bool] = True

    def __post_init__(self) -> None:
        owner = type(self).__name__
        self.side = sizes(owner, "side", self.side, self.smallest, self.largest)
        check_whole(owner, "turns", self.turns, 1, 64)
        check_whole(owner, "actions", self.actions, 1, 32)
        check_choice(owner, "rules", self.rules, RULES)
        if self.turns * self.actions < FEWEST_MOVES:
            raise ValueError(f"{owner}: a map takes at least two moves: raise turns or actions")

    @abstractmethod
    def draw(self, side: int, rng: Random) -> list[str]:
        """Draw a random map, which may have no solution."""

    @abstractmethod
    def solution(self, rows: list[str]) -> list[str] | None:
        """Return the shortest solution of a map; None if the map needs too many moves."""

    @abstractmethod
    def rules_text(self) -> str:
        """Return the rules in words."""

    @abstractmethod
    def picture(self, rows: list[str]) -> str:
        """Return the text that shows a map to the model at the start of the game."""

    def problems(self, split: Split, seed: int) -> Iterator[Problem]:
        """Yield the problems of one split, one map each."""
        check_split(split)
        rng = Random(f"{self.name} {seed}")
        sides = sizes(type(self).__name__, "side", self.side, self.smallest, self.largest)

        def suits(rows: list[str]) -> bool:  # solvable within the turns, and not too easy
            return len(self.solution(rows) or ()) >= FEWEST_MOVES

        for turn in count():
            draw = partial(self._draw, sides[turn % len(sides)])
            yield self._problem(draw_of_split(type(self).__name__, split, rng, draw, suits))

    def _draw(self, side: int, rng: Random) -> tuple[str, list[str]]:
        """Draw a map. Return a text that identifies the map, and the map's rows."""
        rows = self.draw(side, rng)
        return f"{self.name} " + "\n".join(rows), rows

    def _problem(self, rows: list[str]) -> Problem:
        rules = self.rules_text() if self.rules == "told" else WITHHELD
        how = ONE if self.actions == 1 else SEVERAL.format(self.actions)
        prompt = f"{rules} {how}\n{self.picture(rows)}\nTurn 1 of {self.turns}. Your move?"
        number = sha256("\n".join(rows).encode()).hexdigest()[:12]
        return Problem(f"{self.name}/{len(rows)}/{number}", prompt, f"{len(rows)}x{len(rows)}", {"map": rows})


class GridEpisode(ABC):
    """A game on a grid, with up to ``turns`` replies and up to ``actions`` moves per reply.

    A reply without a move uses up a turn, and the next message says so.
    """

    def __init__(self, problem: Problem, task: GridTask) -> None:
        self.problem, self.turns, self.actions = problem, task.turns, task.actions
        self.rules_told = task.rules == "told"
        self.replies: list[str] = []
        self.moves: list[str] = []
        self.idle = 0  # moves that changed nothing

    @property
    @abstractmethod
    def won(self) -> bool:
        """Whether the game is won."""

    @property
    def over(self) -> bool:
        """Whether the game is won or lost."""
        return self.won

    @abstractmethod
    def move(self, direction: str) -> str:
        """Make a move, and describe in a sentence what happened. Increase ``idle`` if the move changes nothing."""

    @abstractmethod
    def picture(self) -> str:
        """Return the text of the current map."""

    @abstractmethod
    def solution(self) -> list[str] | None:
        """Return the shortest solution from the current state."""

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
        elif not self.rules_told:
            events = []
        lines = [*events, self.picture(), f"Turn {len(self.replies) + 1} of {self.turns}. Your move?"]
        return [{"role": "user", "content": "\n".join(lines)}]

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
