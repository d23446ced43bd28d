"""Tasks: an endless, seeded stream of problems, and a verifier that scores any text as a response.

This module defines the types and protocols, and checks a task's settings. ``streams.py`` draws problems;
``episodes.py`` runs and scores attempts at them.
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
    """One question. ``data`` holds everything that the verifier needs, as JSON-serializable values."""

    id: str
    prompt: str
    difficulty: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Score:
    """The verifier's score of one response. Training uses ``reward``, evaluation counts ``correct``.

    ``answer`` is the response's answer in a canonical form, so that equal answers can be counted. It is None if the
    response has no readable answer.
    """

    reward: float
    correct: bool
    parts: Mapping[str, float] = field(default_factory=dict)  # the terms that add up to the reward
    answer: str | None = None
    failed: str | None = None  # the reason if there is no score; training then skips the attempt


Message = dict[str, str]  # {"role": …, "content": …}, as chat templates expect it


class Episode(Protocol):
    """One attempt at one problem, in one or more turns.

    An episode may define ``feedback() -> str``, which describes the result in words; see ``episodes.feedback_on``.
    """

    def start(self) -> list[Message]:
        """Return the first messages that the model reads."""
        ...

    def step(self, reply: str) -> list[Message]:
        """Return the environment's messages after a reply; an empty list ends the episode. ``reply`` is untrusted."""
        ...

    def score(self) -> Score:
        """Return the score of the episode. poise calls this once, after the episode has ended or has been cut off."""
        ...


@dataclass(frozen=True)
class Attempt:
    """A finished episode, as reward functions see it."""

    problem: Problem
    episode: Episode
    prompt: list[Message]  # the first messages that the model read
    completion: list[Message]  # the model's replies, and the environment's messages between replies
    completion_ids: list[int]  # the tokens of the completion
    progress: TrainerState = field(default_factory=TrainerState)  # the run's progress
    reported: dict[str, list[float]] = field(default_factory=dict)  # collects the rewards' reported values, by name


class Task(Protocol):
    """The interface of a task. If a task has ``concurrent = True``, poise may score responses during sampling.

    A task with several turns defines ``episode(problem) -> Episode`` instead of ``score``, and sets ``one_turn = True``
    if the first reply always ends the episode. A task that scores many attempts in one call defines ``score_all`` (see
    ``ScoresTogether``). A task with a fixed set of problems defines ``epoch`` (see ``Finite``). If a task has
    ``pure_start = True``, poise may start episodes only to measure their prompts.
    """

    @property
    def name(self) -> str:
        """The task's name in the table of tasks and in metrics."""
        ...

    def problems(self, split: Split, seed: int) -> Iterator[Problem]:
        """Yield problems without end. They depend only on ``split`` and ``seed``; no problem is in both splits."""
        ...

    def score(self, problem: Problem, text: str) -> Score:
        """Score a response. ``text`` is untrusted: score any text, in time linear in its length."""
        ...


@runtime_checkable
class ScoresTogether(Protocol):
    """A task that scores all finished attempts in one call, because its reward functions take batches."""

    def score_all(self, attempts: Sequence[Attempt]) -> Sequence[Score]:
        """Return one score per attempt, in the order of ``attempts``."""
        ...


@runtime_checkable
class Finite(Protocol):
    """A task with a fixed set of problems."""

    def epoch(self, split: Split, seed: int, number: int) -> Sequence[Problem]:
        """Return all problems of a split, in the order of one epoch. The same arguments return the same order."""
        ...


class TaskError(UserError, RuntimeError):
    """A task violates the contract of ``Task``."""


# Settings


def sizes(owner: str, name: str, value: int | str | Sequence[int], low: int, high: int) -> tuple[int, ...]:
    """Parse a setting such as ``5``, ``(3, 4)`` or ``"3-7"`` into whole numbers, each from ``low`` to ``high``."""
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
    """Whether a value is a Python or numpy boolean, or 1 or 0, as in old YAML files."""
    return not hasattr(value, "__len__") and value in (0, 1)


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "str": (lambda value: isinstance(value, str | PathLike), "text"),
    "bool": (_switch, "true or false"),
    "None": (lambda value: value is None, "null"),
    "Sequence[str]": (_texts, "a list of texts"),
    "Mapping[str, Any]": (lambda value: isinstance(value, Mapping), "a group of settings, {key: value}"),
}


def check_kinds(name: str, maker: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """Raise an error if a setting for text, a boolean or a list of texts has a value of another type.

    Without this check, the task would fail in the middle of a run, or treat ``slippery=no-thanks`` as true. The task
    itself checks numbers (it knows their ranges) and settings with other annotations.
    """
    parameters = signature(maker).parameters
    for key, value in settings.items():
        written = str(parameters[key].annotation) if key in parameters else ""
        kinds = [_KINDS.get(part.strip()) for part in written.split("|")]
        known = [kind for kind in kinds if kind is not None]
        if len(known) == len(kinds) and not any(fits(value) for fits, _ in known):
            raise TypeError(f"{name}: {key} must be {' or '.join(words for _, words in known)}, got {short(value)}")
