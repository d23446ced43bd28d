"""Tasks: an endless, seeded stream of problems, and a verifier that scores any text as a response.

This module has the types and protocols, and checks of a task's settings. ``streams.py`` draws problems, ``episodes.py``
runs and scores attempts at them.
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
NO_REWARD = "no reward applies to it"  # a value of ``Score.failed`` that does not mean an error


@dataclass(frozen=True)
class Problem:
    """One question. ``data`` has all that the verifier needs, in values that JSON can represent."""

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
    failed: str | None = None  # why there is no score, in words; training then skips the attempt


Message = dict[str, str]  # {"role": …, "content": …}, as chat templates take them


class Episode(Protocol):
    """One attempt at one problem, in one turn or several.

    An episode may have ``feedback() -> str``, which describes the result in words: see ``episodes.feedback_on``.
    """

    def start(self) -> list[Message]:
        """The first messages that the model reads."""
        ...

    def step(self, reply: str) -> list[Message]:
        """The environment's messages after a reply; an empty list ends the episode. ``reply`` is untrusted."""
        ...

    def score(self) -> Score:
        """The score of the episode. poise calls this once, after the episode has ended or has been cut off."""
        ...


@dataclass(frozen=True)
class Attempt:
    """A finished episode, as reward functions see it."""

    problem: Problem
    episode: Episode
    prompt: list[Message]  # the first messages that the model read
    completion: list[Message]  # its replies, and the environment's messages between them
    completion_ids: list[int]  # the tokens of the completion
    progress: TrainerState = field(default_factory=TrainerState)  # the run's progress
    reported: dict[str, list[float]] = field(default_factory=dict)  # collects the rewards' reported values, by name


class Task(Protocol):
    """What every task must have. If a task has ``concurrent = True``, poise may score responses while it samples.

    A task of several turns has ``episode(problem) -> Episode`` instead of ``score`` (with ``one_turn = True`` if the
    first reply always ends the episode). A task that scores many attempts in one call has ``score_all`` (see
    ``ScoresTogether``), and a task with a fixed set of problems has ``epoch`` (see ``Finite``). If a task has
    ``pure_start = True``, poise may start episodes just to measure their prompts.
    """

    @property
    def name(self) -> str:
        """The task's name in the table of tasks and in metrics."""
        ...

    def problems(self, split: Split, seed: int) -> Iterator[Problem]:
        """An endless stream of problems. It depends only on split and seed; no problem is in both splits."""
        ...

    def score(self, problem: Problem, text: str) -> Score:
        """Score a response. ``text`` is untrusted: any text gets a score, in time linear in its length."""
        ...


@runtime_checkable
class ScoresTogether(Protocol):
    """A task that scores all finished attempts in one call, because its reward functions take batches."""

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
    """The whole numbers in a setting such as ``5``, ``(3, 4)`` or ``"3-7"``, each from ``low`` to ``high``."""
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
    """Whether a value is a boolean, Python's or numpy's, or 1 or 0, as in old YAML files."""
    return not hasattr(value, "__len__") and value in (0, 1)


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "str": (lambda value: isinstance(value, str | PathLike), "text"),
    "bool": (_switch, "true or false"),
    "None": (lambda value: value is None, "null"),
    "Sequence[str]": (_texts, "a list of texts"),
    "Mapping[str, Any]": (lambda value: isinstance(value, Mapping), "a group of settings, {key: value}"),
}


def check_kinds(name: str, maker: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """Raise if a setting that takes text, a boolean or a list of texts has a value of another type.

    Otherwise the task would fail in the middle of a run, or treat ``slippery=no-thanks`` as true. The task itself
    checks numbers, because it knows their range, and settings with any other annotation.
    """
    parameters = signature(maker).parameters
    for key, value in settings.items():
        written = str(parameters[key].annotation) if key in parameters else ""
        kinds = [_KINDS.get(part.strip()) for part in written.split("|")]
        known = [kind for kind in kinds if kind is not None]
        if len(known) == len(kinds) and not any(fits(value) for fits, _ in known):
            raise TypeError(f"{name}: {key} must be {' or '.join(words for _, words in known)}, got {short(value)}")
