"""What a task is: an endless, seeded stream of problems, and a verifier that scores any text offered as a response."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from poise._errors import check_choice

Split = Literal["train", "test"]
SPLITS: tuple[str, ...] = get_args(Split)
LARGEST_REWARD = 1e30  # training computes in float32, which ends at 3e38: this leaves room for sums over a batch


@dataclass(frozen=True)
class Problem:
    """One question. ``data`` is all that the verifier needs, and survives a trip through JSON."""

    id: str
    prompt: str
    difficulty: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Score:
    """The verifier's word on one response. ``reward`` is what training sees, ``correct`` what evaluation counts.

    ``answer`` is what the response says, in a form in which equal answers are equal texts, so that they can be counted;
    None where it cannot be read.
    """

    reward: float
    correct: bool
    parts: Mapping[str, float] = field(default_factory=dict)  # what the reward is the sum of
    answer: str | None = None


class Task(Protocol):
    """The least a task must offer. One with ``concurrent = True`` is asked for scores while sampling goes on."""

    @property
    def name(self) -> str:
        """The name it goes by in the table of tasks and in metrics."""
        ...

    def problems(self, split: Split, seed: int) -> Iterator[Problem]:
        """Problems without end. The same split and seed give the same ones; no problem is in both splits."""
        ...

    def score(self, problem: Problem, text: str) -> Score:
        """Score a response. ``text`` is untrusted: any text gets a score, in time linear in its length."""
        ...


@runtime_checkable
class Demonstrates(Protocol):
    """A task that can also show how it is done, for a warm start."""

    def demonstration(self, problem: Problem, seed: int = 0, noise: float | None = None) -> str:
        """A complete response; with ``noise`` > 0 an imperfect one. ``None`` means the task's own setting."""
        ...


class RewardError(RuntimeError):
    """A verifier that raised, or whose reward is not a finite number."""


def judge(task: Task, problem: Problem, text: str) -> Score:
    """``task.score``, with an error that says on which problem it went wrong."""
    try:
        score = task.score(problem, text)
    except Exception as error:
        raise RewardError(
            f"the reward of task {task.name!r} raised {type(error).__name__}: {error} (problem {problem.id})"
        ) from error
    if not abs(score.reward) <= LARGEST_REWARD:
        raise RewardError(
            f"the reward of task {task.name!r} is {score.reward} (problem {problem.id}): "
            f"rewards must be finite, and between {-LARGEST_REWARD:g} and {LARGEST_REWARD:g}"
        )
    return score


def check_split(split: str) -> None:
    """Raise unless ``split`` is one there is."""
    check_choice("problems", "split", split, SPLITS)
