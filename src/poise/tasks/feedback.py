"""How an attempt went, in words: what a model that may try again is told. The right answer is not."""

from __future__ import annotations

from poise._lib.errors import short
from poise.rewards.base import RewardError
from poise.tasks.base import Episode, Problem, Score, Task, explained, readable

LONGEST = 2000  # characters of what a task of a user's own may say


def feedback_on(task: Task, problem: Problem, episode: Episode, score: Score, turns: int) -> str:
    """What the episode says of itself, or a plain sentence where it says nothing. ``turns``: replies that were made.

    ``episode.feedback`` is optional. It is called after the episode has been scored.
    """
    said = ""
    if hasattr(episode, "feedback"):
        with explained(task, problem, "the feedback"):
            said = episode.feedback()
        if not isinstance(said, str):
            raise RewardError(
                f"the feedback of task {task.name!r} must be text, got {short(said)} (problem {problem.id})"
            )
    return readable(said.strip()[:LONGEST]) or plain(score, turns)


def plain(score: Score, turns: int) -> str:
    """What can be said of any attempt."""
    how = "succeeded" if score.correct else "failed"
    return f"The attempt {how}: reward {score.reward:.2f} after {turns} turn{'' if turns == 1 else 's'}."
