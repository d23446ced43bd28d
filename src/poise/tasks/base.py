"""What a task is: an endless, seeded stream of problems, and a verifier that scores any text offered as a response.

Here are the types and protocols, and checks of a task's settings. ``streams.py`` draws problems, ``episodes.py`` plays
and judges attempts at them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from os import PathLike
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from poise._lib.errors import UserError, check_whole, short
from poise.tasks.rewards.base import TrainerState

Split = Literal["train", "test"]
SPLITS: tuple[str, ...] = get_args(Split)
NO_REWARD = "no reward applies to it"  # a value of ``Score.failed`` that is not an error


@dataclass(frozen=True)
class Problem:
    """One question. ``data`` is all that the verifier needs, and survives a trip through JSON."""

    id: str
    prompt: str
    difficulty: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Score:
    """The verifier's score of one response. Training uses ``reward``, evaluation counts ``correct``.

    ``answer`` is the answer in a canonical form, so that equal answers can be counted; None if it cannot be read.
    """

    reward: float
    correct: bool
    parts: Mapping[str, float] = field(default_factory=dict)  # the terms that add up to the reward
    answer: str | None = None
    failed: str | None = None  # why there is no score, in words; the attempt is then not trained on


Message = dict[str, str]  # {"role": …, "content": …}, as chat templates take them


class Episode(Protocol):
    """One attempt at one problem, in one turn or several.

    An episode may have ``feedback() -> str``, which says how it went: see ``episodes.feedback_on``.
    """

    def start(self) -> list[Message]:
        """What the model is shown first."""
        ...

    def step(self, reply: str) -> list[Message]:
        """What the environment says to a reply; an empty list ends the episode. ``reply`` is untrusted."""
        ...

    def score(self) -> Score:
        """The score of the episode. It is asked for once, after the episode has ended or been cut off."""
        ...


@dataclass(frozen=True)
class Attempt:
    """An episode that has ended, as reward functions see it."""

    problem: Problem
    episode: Episode
    prompt: list[Message]  # what the model was shown first
    completion: list[Message]  # its replies, and what the environment said in between
    completion_ids: list[int]  # the tokens of the completion
    progress: TrainerState = field(default_factory=TrainerState)  # how far the run is
    reported: dict[str, list[float]] = field(default_factory=dict)  # gets what rewards report, by name


class Task(Protocol):
    """What every task must have. A task with ``concurrent = True`` may be asked for scores during sampling.

    A task of several turns has ``episode(problem) -> Episode`` in place of ``score`` (with ``one_turn = True`` if the
    first reply always ends it). A task that scores many attempts in one call has ``score_all`` (see
    ``ScoresTogether``), and a task with a fixed set of problems has ``epoch`` (see ``Finite``). If it has ``pure_start
    = True``, poise may begin its episodes only to measure their prompts.
    """

    @property
    def name(self) -> str:
        """Its name in the table of tasks and in metrics."""
        ...

    def problems(self, split: Split, seed: int) -> Iterator[Problem]:
        """Problems without end. The same split and seed give the same problems; no problem is in both splits."""
        ...

    def score(self, problem: Problem, text: str) -> Score:
        """Score a response. ``text`` is untrusted: any text gets a score, in time linear in its length."""
        ...


@runtime_checkable
class ScoresTogether(Protocol):
    """A task that scores all attempts that have ended in one call, because its reward functions take batches."""

    def score_all(self, attempts: Sequence[Attempt]) -> Sequence[Score]:
        """A score for each attempt, in their order."""
        ...


@runtime_checkable
class Finite(Protocol):
    """A task with a fixed set of problems."""

    def epoch(self, split: Split, seed: int, number: int) -> Sequence[Problem]:
        """All problems of a split in the order of one epoch. The same arguments give the same order."""
        ...


class TaskError(UserError, RuntimeError):
    """A task breaks the contract of ``Task``."""


# Settings


def sizes(owner: str, name: str, value: int | str | Sequence[int], low: int, high: int) -> tuple[int, ...]:
    """The whole numbers that a setting such as ``5``, ``(3, 4)`` or ``"3-7"`` means, each from ``low`` to ``high``."""
    numbers: int | Sequence[int]
    if not isinstance(value, str):
        numbers = value
    elif match := re.fullmatch(r"\s*(\d{1,3})\s*(?:-\s*(\d{1,3})\s*)?", value):
        numbers = range(int(match[1]), int(match[2] or match[1]) + 1)
    else:
        raise ValueError(f"{owner}: {name} must be like 5, (3, 4) or '3-7', got {value!r}")
    chosen = tuple(numbers) if isinstance(numbers, Sequence) else (numbers,)
    if not chosen:
        raise ValueError(f"{owner}: {name} = {value!r} is empty; in a range the smaller number comes first")
    for number in chosen:
        check_whole(owner, name, number, low, high)
    return chosen


def _texts(value: Any) -> bool:
    one = isinstance(value, str | bytes | Mapping) or not isinstance(value, Collection)
    return not one and all(isinstance(each, str) for each in value)


def _switch(value: Any) -> bool:
    """True, false, numpy's booleans, and 1 and 0, as old YAML files have them."""
    return not hasattr(value, "__len__") and value in (0, 1)


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "str": (lambda value: isinstance(value, str | PathLike), "text"),
    "bool": (_switch, "true or false"),
    "None": (lambda value: value is None, "null"),
    "Sequence[str]": (_texts, "a list of texts"),
    "Mapping[str, Any]": (lambda value: isinstance(value, Mapping), "a group of settings, {key: value}"),
}


def check_kinds(name: str, maker: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """Raise if a setting of the task takes text, a boolean or a list of texts, and its value is of another kind.

    Otherwise the task would fail in the middle of a run, or take ``slippery=no-thanks`` for true. The task itself
    checks numbers, whose range it knows, and settings with any other annotation.
    """
    parameters = signature(maker).parameters
    for key, value in settings.items():
        written = str(parameters[key].annotation) if key in parameters else ""
        kinds = [_KINDS.get(part.strip()) for part in written.split("|")]
        known = [kind for kind in kinds if kind is not None]
        if len(known) == len(kinds) and not any(fits(value) for fits, _ in known):
            raise TypeError(f"{name}: {key} must be {' or '.join(words for _, words in known)}, got {short(value)}")
