"""What games on a grid share: maps, moves read out of a reply, turns, and a search for the shortest solution."""

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
from poise.rewards.answers import conclusion
from poise.tasks.base import Message, Problem, Score, Split, check_split
from poise.tasks.streams import draw_of_split, sizes

Place = tuple[int, int]  # row, column
DIRECTIONS: dict[str, Place] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
RULES = ("told", "withheld")
FEWEST_MOVES = 2  # a map that takes one move teaches nothing
WITHHELD = "You play a game on a grid. The rules are not told: find out what leads to success."
ONE = "Each turn, reply with one move: up, down, left or right."
SEVERAL = "Each turn, reply with up to {} moves out of up, down, left and right, such as: up left."
LISTED = 12  # moves that feedback names, the last ones
_MOVE = re.compile(r"\b(up|down|left|right)\b", re.IGNORECASE | re.ASCII)

State = TypeVar("State", bound=Hashable)


def moves_in(reply: str, most: int = 1) -> list[str]:
    """The last ``most`` moves that a reply names, in their order. Reasoning does not count.

    >>> moves_in("Up is a hole, so I go left.")
    ['left']
    """
    return list(deque((match[0].lower() for match in _MOVE.finditer(conclusion(reply))), maxlen=most))


def shortest(
    start: State, after: Callable[[State, str], State | None], won: Callable[[State], bool], most: int
) -> list[str] | None:
    """The shortest list of moves that wins, by breadth-first search; None if it takes more than ``most``.

    ``after`` is the state after a move, None where the move is lost or not possible.
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
    """The place beside another."""
    down, right = DIRECTIONS[move]
    return place[0] + down, place[1] + right


def where(place: Place) -> str:
    """A place in words, counted from the top left."""
    return f"row {place[0] + 1}, column {place[1] + 1}"


def draw_map(rows: Iterable[Iterable[str]]) -> str:
    """A map as text, with spaces between the symbols so that tokenizers keep them apart."""
    return "\n".join(" ".join(row) for row in rows)


@dataclass(frozen=True)
class GridTask(ABC):
    """A game on maps without end. A map is rows of symbols; no map is in both splits."""

    side: int | str | Sequence[int] = 2
    turns: int = 8
    actions: int = 1
    rules: str = "told"

    name: ClassVar[str]
    smallest: ClassVar[int]  # side
    largest: ClassVar[int]
    concurrent: ClassVar[bool] = True

    def __post_init__(self) -> None:
        owner = type(self).__name__
        object.__setattr__(self, "side", sizes(owner, "side", self.side, self.smallest, self.largest))
        check_whole(owner, "turns", self.turns, 1, 64)
        check_whole(owner, "actions", self.actions, 1, 32)
        check_choice(owner, "rules", self.rules, RULES)
        if self.turns * self.actions < FEWEST_MOVES:
            raise ValueError(f"{owner}: a map takes two moves at least: raise turns or actions")

    @abstractmethod
    def draw(self, side: int, rng: Random) -> list[str]:
        """Any map."""

    @abstractmethod
    def solution(self, rows: list[str]) -> list[str] | None:
        """The shortest solution of a map; None if it takes too many moves."""

    @abstractmethod
    def told(self) -> str:
        """The rules in words."""

    @abstractmethod
    def picture(self, rows: list[str]) -> str:
        """A map as the player sees it at the start."""

    def problems(self, split: Split, seed: int) -> Iterator[Problem]:
        """Maps of one split."""
        check_split(split)
        rng = Random(f"{self.name} {seed}")
        sides = sizes(type(self).__name__, "side", self.side, self.smallest, self.largest)
        for turn in count():
            draw = partial(self._draw, sides[turn % len(sides)])
            yield self._problem(draw_of_split(type(self).__name__, split, rng, draw, self._suits))

    def _draw(self, side: int, rng: Random) -> tuple[str, list[str]]:
        """The meaning of a map, and its rows."""
        rows = self.draw(side, rng)
        return f"{self.name} " + "\n".join(rows), rows

    def _suits(self, rows: list[str]) -> bool:
        """Whether a map can be solved in time, and not too easily."""
        path = self.solution(rows)
        return path is not None and len(path) >= FEWEST_MOVES

    def _problem(self, rows: list[str]) -> Problem:
        rules = self.told() if self.rules == "told" else WITHHELD
        how = ONE if self.actions == 1 else SEVERAL.format(self.actions)
        prompt = f"{rules} {how}\n{self.picture(rows)}\nTurn 1 of {self.turns}. Your move?"
        number = sha256("\n".join(rows).encode()).hexdigest()[:12]
        return Problem(f"{self.name}/{len(rows)}/{number}", prompt, f"{len(rows)}x{len(rows)}", {"map": rows})


class GridEpisode(ABC):
    """An episode of a game on a grid: each reply names a move, or up to ``actions`` of them, for ``turns`` turns.

    A reply without a move costs its turn, and the model is told so.
    """

    def __init__(self, problem: Problem, task: GridTask) -> None:
        self.problem, self.turns, self.actions, self.told = problem, task.turns, task.actions, task.rules == "told"
        self.replies: list[str] = []
        self.moves: list[str] = []
        self.idle = 0  # moves that changed nothing

    @property
    @abstractmethod
    def won(self) -> bool:
        """Whether the goal is reached."""

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether nothing more can happen: the game is won or lost."""

    @abstractmethod
    def move(self, direction: str) -> str:
        """Make a move, and count it in ``idle`` if it changes nothing; returns what happened, in a sentence."""

    @abstractmethod
    def picture(self) -> str:
        """The map as it is now."""

    @abstractmethod
    def solution(self) -> list[str] | None:
        """The shortest way to the goal from here."""

    @abstractmethod
    def ending(self) -> str:
        """How the game stands, in a sentence or two. Where the rules are withheld, it speaks of symbols, not of what
        they mean."""

    def start(self) -> list[Message]:
        """The rules, as far as they are told, and the map."""
        return [{"role": "user", "content": self.problem.prompt}]

    def step(self, reply: str) -> list[Message]:
        """Make the moves that the reply names and show the map."""
        self.replies.append(reply)
        asked = moves_in(reply, self.actions)
        happened = []
        for direction in asked:
            if not self.over:
                self.moves.append(direction)
                happened.append(self.move(direction))
        if self.over or len(self.replies) >= self.turns:
            return []
        if not asked:
            happened = ["Your reply names no move. Write up, down, left or right."]
        elif not self.told:
            happened = []
        lines = [*happened, self.picture(), f"Turn {len(self.replies) + 1} of {self.turns}. Your move?"]
        return [{"role": "user", "content": "\n".join(lines)}]

    def score(self) -> Score:
        """1 if the goal is reached, else 0. The answer is the moves made."""
        return Score(float(self.won), self.won, answer=" ".join(self.moves) or None)

    def feedback(self) -> str:
        """How it ended, for methods that let the model learn from text."""
        said = [self.ending()]
        if not self.over and len(self.replies) >= self.turns:
            said.append(f"All {self.turns} turns are used up.")
        if silent := sum(not moves_in(reply) for reply in self.replies):
            said.append(f"Replies without a move: {silent}.")
        if self.idle:
            said.append(f"Moves that changed nothing: {self.idle}.")
        listed = " ".join(["...", *self.moves[-LISTED:]] if len(self.moves) > LISTED else self.moves) or "none"
        return " ".join([*said, f"Moves made: {len(self.moves)} ({listed}). Reward: {float(self.won):g}."])

    def expert(self) -> str:
        """What a solver replies now: the moves of the shortest solution, as many as one turn allows."""
        return " ".join((self.solution() or ["up"])[: self.actions])
