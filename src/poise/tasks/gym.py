"""Gymnasium's environments with a text rendering and a few actions: ``task.name=gym/Taxi-v4``.

The model sees what ``render`` returns with ``render_mode="ansi"``, and names an action; what is highlighted by colours
is put in [brackets]. Problems differ in the seed of ``reset``; training and testing never share one. An environment
that begins alike for every seed (FrozenLake-v1, CliffWalking-v1) has a single problem, for both: ``frozenlake`` has
maps without end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random
from typing import Any, ClassVar

from poise._lib.errors import check_range, how_to_install, unknown
from poise.tasks.base import Message, Problem, Score, Split, check_split
from poise.tasks.replies import spoken
from poise.tasks.streams import check_whole, draw_of_split
from poise.tasks.time_limit import HungError, Worker

ACTIONS = {  # by the beginning of the id, in gymnasium's order
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
}
_COLOURED = re.compile(r"\x1b\[[\d;]{1,8}m(.{0,8}?)\x1b\[0m")


def gym(name: str) -> Callable[..., Gym]:
    """Environments of gymnasium with a text rendering; NAME is the id.

    Returns what builds the task.
    """
    try:
        from gymnasium import registry
    except ImportError as error:
        raise ValueError(f"tasks named gym/… need gymnasium ({error}); {how_to_install('games')}") from error
    if name not in registry:
        raise ValueError(unknown("environment of gymnasium", name, registry))
    return partial(Gym, name)


@dataclass(frozen=True)
class Gym:
    """A gymnasium environment with discrete actions and a text rendering.

    ``actions`` are the words for its actions, in their order; by default those of gymnasium's toy-text environments,
    else numbers. ``make`` are keyword arguments of ``gymnasium.make``. The reward is the sum of the environment's; an
    attempt is correct if it reaches ``correct_at``. ``intro`` is told before the first picture.
    """

    id: str
    actions: Sequence[str] = ()
    make: Mapping[str, Any] = field(default_factory=dict)
    intro: str = ""
    correct_at: float = 1.0
    turns: int = 32  # most replies of an episode
    timeout: float = 10.0  # seconds that one call may take
    _worker: Worker = field(init=False, repr=False, compare=False)

    concurrent: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole(self.name, "turns", self.turns, 1, 64)
        check_range(self.name, "correct_at", self.correct_at)
        check_range(self.name, "timeout", self.timeout, 0.01)
        object.__setattr__(self, "_worker", Worker())
        number, picture = self._try()
        if not isinstance(picture, str):
            raise ValueError(f"{self.name} has no text rendering (render_mode='ansi')")
        if number is None:
            raise ValueError(f"{self.name} has actions other than a few numbered ones, which a word cannot name")
        known = next((words for prefix, words in ACTIONS.items() if self.id.startswith(prefix)), ())
        words = tuple(self.actions) or known or tuple(map(str, range(number)))
        if len(words) != number or len({word.lower() for word in words}) != number:
            raise ValueError(f"{self.name}: actions must be {number} different words, got {', '.join(words)}")
        object.__setattr__(self, "actions", words)

    def _try(self) -> tuple[int | None, Any]:
        """How many actions it has, and a picture of it."""
        try:
            world = self.begin()
            self.call(world.reset, seed=0)
            number = getattr(world.action_space, "n", None)
            return None if number is None else int(number), self.call(world.render)
        except Exception as error:
            raise ValueError(f"{self.name} does not run: {type(error).__name__}: {error}") from error

    @property
    def name(self) -> str:
        """``gym/`` and the environment's id."""
        return f"gym/{self.id}"

    def begin(self) -> Any:
        """A new environment."""
        import gymnasium

        return self.call(gymnasium.make, self.id, render_mode="ansi", **self.make)

    def call(self, function: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        """A call into the environment, within the time limit."""
        return self._worker.run(self.timeout, function, *args, **settings)

    def problems(self, split: Split, seed: int) -> Iterator[Problem]:
        """Seeds for ``reset``; none is in both splits."""
        check_split(split)
        rng = Random(f"{self.name} {seed}")
        for _ in count():
            number = draw_of_split(self.name, split, rng, _draw_seed)
            yield Problem(f"{self.name}/{number}", self.intro, "all", {"seed": number})

    def episode(self, problem: Problem) -> GymEpisode:
        """One game."""
        return GymEpisode(problem, self)


def _draw_seed(rng: Random) -> tuple[str, int]:
    number = rng.getrandbits(31)
    return f"gym {number}", number


class GymEpisode:
    """One game in one environment; where that raises or hangs, the episode is lost."""

    def __init__(self, problem: Problem, task: Gym) -> None:
        self.problem, self.task = problem, task
        self.world: Any = None
        self.replies = 0
        self.made: list[str] = []
        self.reward = 0.0
        self.failed: str | None = None
        self.over = False

    def start(self) -> list[Message]:
        """The environment after ``reset``."""
        picture = self._guarded(self._reset)
        return [{"role": "user", "content": f"{self.task.intro}\n{picture}\n{self._question()}".strip()}]

    def step(self, reply: str) -> list[Message]:
        """Take the action that a reply names last."""
        self.replies += 1
        words = [word.lower() for word in self.task.actions]
        named = re.findall(rf"(?<!\w)({'|'.join(map(re.escape, words))})(?!\w)", spoken(reply).lower())
        said = "Your reply names no action."
        if named and self.failed is None:
            self.made.append(named[-1])
            said = self._guarded(self._act, words.index(named[-1]))
        if self.over or self.failed is not None or self.replies >= self.task.turns:
            return []
        return [{"role": "user", "content": f"{said}\n{self._question()}"}]

    def score(self) -> Score:
        """The sum of the environment's rewards."""
        if self.failed is not None:
            return Score(0.0, False, failed=self.failed)
        return Score(self.reward, self.reward >= self.task.correct_at, answer=" ".join(self.made) or None)

    def feedback(self) -> str:
        """How it ended."""
        ended = "The episode ended" if self.over else "The episode did not end"
        silent = self.replies - len(self.made)
        said = f" Replies without an action: {silent}." if silent else ""
        return f"{ended} after {len(self.made)} actions.{said} Reward: {self.reward:g}."

    def _question(self) -> str:
        words = ", ".join(self.task.actions)
        return f"Turn {self.replies + 1} of {self.task.turns}. Reply with one action: {words}."

    def _reset(self) -> str:
        self.world = self.task.begin()
        self.task.call(self.world.reset, seed=self.problem.data["seed"])
        return self._picture()

    def _act(self, action: int) -> str:
        _, reward, terminated, truncated, _ = self.task.call(self.world.step, action)
        self.reward += float(reward)
        self.over = bool(terminated or truncated)
        return self._picture()

    def _picture(self) -> str:
        return _COLOURED.sub(r"[\1]", str(self.task.call(self.world.render))).strip("\n")

    def _guarded(self, function: Callable[..., str], *args: Any) -> str:
        try:
            return function(*args)
        except Exception as error:
            what = str(error) if isinstance(error, HungError) else f"raised {type(error).__name__}: {error}"
            self.failed = f"{self.task.name} {what}"
            return ""
