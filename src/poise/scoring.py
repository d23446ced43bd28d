"""Scores of responses, begun while others are still being sampled."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from poise.policy import Policy
from poise.rollout.base import Rollouts
from poise.tasks import Problem, Score, Task, judge


class Scoring:
    """The texts and scores of a batch of responses; ``problems`` has one for each.

    An engine hands responses to ``take`` as they end. A task that says it may be asked from another thread
    (``concurrent = True``) is asked at once, in one thread; any other after all, in the thread that trains: a verifier
    with a time limit by signals works nowhere else.
    """

    def __init__(self, policy: Policy, task: Task, problems: Sequence[Problem]) -> None:
        self.policy, self.task, self.problems = policy, task, problems
        self.begun: dict[int, Future[tuple[str, Score]]] = {}
        self.pool = ThreadPoolExecutor(1) if getattr(task, "concurrent", False) else None

    def __enter__(self) -> Scoring:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    def take(self, i: int, tokens: list[int]) -> None:
        """Response i has ended."""
        if self.pool is not None:
            self.begun[i] = self.pool.submit(self._one, i, tokens)

    def finish(self, rollouts: Rollouts) -> tuple[list[str], list[Score]]:
        """All texts and scores, those too that nobody has begun."""
        rows = zip(rollouts.tokens.tolist(), rollouts.lengths, strict=True)
        found = [
            self.begun[i].result() if i in self.begun else self._one(i, row[:length])
            for i, (row, length) in enumerate(rows)
        ]
        return [text for text, _ in found], [score for _, score in found]

    def _one(self, i: int, tokens: list[int]) -> tuple[str, Score]:
        text = self.policy.decode(tokens)
        return text, judge(self.task, self.problems[i], text)
