"""What the small model of erl.py is shown before it learns by itself: games, reflections, second attempts.

    python experiments/embedded-model/make_model.py OUT task.name=experiments/erl/erl_tasks.py:Lessons
    poise tasks show experiments/erl/erl_tasks.py:Lessons seed=3

The game is FrozenLake with the rules withheld. An expert plays it; or it writes a reflection on an attempt that failed,
in the form that ERL asks for; or it plays with such advice before the map. A reflection only repeats what the feedback
says: the moves that failed. It does not know the way to the goal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar, cast

from poise.sampling.erl import attempt_of, task_of
from poise.tasks import Episode, Message, Problem, Score, Split
from poise.tasks.frozenlake import FrozenLake, FrozenLakeEpisode
from poise.tasks.grid import DIRECTIONS

ASK = "{task}\n{attempt}\n{feedback}\n{memory}What failed?"
RECALL = "This helped before: {advice}\n"
MEASURED = 1 << 40  # a warm start measures its accuracy on problems of this seed or a larger one
PATIENCE = 20  # attempts until one fails


@dataclass
class Lessons(FrozenLake):
    """FrozenLake as an expert shows it. ``reflections`` and ``seconds`` are shares of the lessons; the rest are games.

    Failed attempts choose each reply at random with chance ``noise``, and as the expert would otherwise. ``recalled``
    is the share of reflections that read of earlier advice. What a warm start measures is half plain games, half
    reflections: with ``stop_at=0.6`` it ends when 0.2 of the games are won and every reflection is right.
    """

    side: int | str | Sequence[int] = 4
    turns: int = 3
    actions: int = 3
    rules: str = "withheld"
    reflections: float = 0.6
    seconds: float = 0.2
    noise: float = 0.6
    recalled: float = 0.25

    name: ClassVar[str] = "lessons"

    def problems(self, split: Split, seed: int) -> Iterator[Problem]:
        """Maps with what is shown on them."""
        rng = Random(f"lessons {seed}")
        shares = [0.5, 0.0] if seed >= MEASURED else [self.reflections, self.seconds]
        for problem in super().problems(split, seed):
            (kind,) = rng.choices(["reflection", "second", "game"], [*shares, 1 - sum(shares)])
            replies = None if kind == "game" else self._failure(problem, rng)
            if replies is None:
                yield problem
                continue
            remembered = _random_moves(rng, 6) if rng.random() < self.recalled else None
            yield replace(problem, data={**problem.data, "lesson": kind, "replies": replies, "memory": remembered})

    def _failure(self, problem: Problem, rng: Random) -> list[str] | None:
        """The replies of an attempt that failed."""
        for _ in range(PATIENCE):
            episode = super().episode(problem)
            said = episode.start()
            while said:
                said = episode.step(_random_moves(rng, self.actions) if rng.random() < self.noise else episode.expert())
            if not episode.won:
                return episode.replies
        return None

    def episode(self, problem: Problem) -> Any:
        """A game, a reflection, or a game with advice."""
        kind = problem.data.get("lesson")
        if kind is None:
            return super().episode(problem)
        failed, messages = played(super().episode(problem), problem.data["replies"])
        if kind == "second":
            return Second(problem, self, advice(failed))
        return Reflection(problem, question(failed, messages, problem.data["memory"]), advice(failed))


def _random_moves(rng: Random, most: int) -> str:
    return " ".join(rng.choices([*DIRECTIONS], k=rng.randint(1, most)))


def played(episode: FrozenLakeEpisode, replies: Sequence[str]) -> tuple[FrozenLakeEpisode, list[Message]]:
    """The episode after these replies, and all that was said after its opening."""
    episode.start()
    messages: list[Message] = []
    for reply in replies:
        messages += [{"role": "assistant", "content": reply}, *episode.step(reply)]
    return episode, messages


def advice(failed: FrozenLakeEpisode) -> str:
    """What not to do."""
    return f"Not {' '.join(failed.moves)}."


def question(failed: FrozenLakeEpisode, messages: list[Message], memory: str | None) -> str:
    """What ERL asks about a failed attempt."""
    sample = SimpleNamespace(messages=messages, text="\n".join(failed.replies))
    return ASK.format(
        task=task_of(failed.start()), attempt=attempt_of(cast("Any", sample)), feedback=failed.feedback(),
        memory=RECALL.format(advice=f"Not {memory}.") if memory else "",
    )  # fmt: skip


@dataclass
class Reflection(Episode):
    """One turn: a question about a failed attempt, and the advice that answers it."""

    problem: Problem
    asked: str
    advice: str
    reply: str = ""

    def start(self) -> list[Message]:
        """The question."""
        return [{"role": "user", "content": self.asked}]

    def step(self, reply: str) -> list[Message]:
        """Any reply ends it."""
        self.reply = reply
        return []

    def score(self) -> Score:
        """Whether the advice is the expert's."""
        right = self.reply == self.expert()
        return Score(float(right), right)

    def expert(self) -> str:
        """The advice in the form that ERL reads."""
        return f"<prompt>{self.advice}</prompt>"


class Second(FrozenLakeEpisode):
    """A game with advice in front of the map, as ERL shows it where the chat template has no system prompt."""

    def __init__(self, problem: Problem, task: FrozenLake, text: str) -> None:
        super().__init__(problem, task)
        self.advice = text

    def start(self) -> list[Message]:
        """The advice and the map."""
        return [{"role": "user", "content": f"{self.advice}\n\n{self.problem.prompt}"}]
