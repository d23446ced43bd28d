"""What games on a grid share: moves read out of a reply, turns, and a search for the shortest solution."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from poise.rewards.answers import conclusion
from poise.tasks.base import Message, Problem, Score

Place = tuple[int, int]  # row, column
DIRECTIONS: dict[str, Place] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
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


class GridEpisode(ABC):
    """An episode of a game on a grid: each reply names a move, or up to ``actions`` of them, for ``turns`` turns.

    A reply without a move costs its turn, and the model is told so.
    """

    def __init__(self, problem: Problem, turns: int, actions: int, told: bool) -> None:
        self.problem, self.turns, self.actions, self.told = problem, turns, actions, told
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
