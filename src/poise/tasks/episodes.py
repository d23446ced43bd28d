"""Episodes: begin an attempt at a problem, check the environment's messages, and score the attempt.

A task may be the user's code. If it raises an exception, the error names the task, the problem, the file and the line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from poise._lib.errors import counted, short
from poise._lib.user_code import place_of
from poise.tasks.base import Attempt, Episode, Message, Problem, Score, Task, TaskError
from poise.tasks.rewards.base import GOLD_COLUMNS, RewardError

LONGEST_GOLD = 4000  # characters: in fine-tuning data, the answers are whole solutions
LONGEST_FEEDBACK = 2000  # characters of feedback from a user's task
LARGEST_REWARD = 1e30  # the maximum of float32 is 3e38; the margin is for sums over a batch


@dataclass
class SingleTurn:
    """The episode of a task with only ``score``: the problem's prompt, one reply, and the reply's score."""

    task: Task
    problem: Problem
    reply: str = ""

    def start(self) -> list[Message]:
        """Return the prompt as a user message."""
        return [{"role": "user", "content": self.problem.prompt}]

    def step(self, reply: str) -> list[Message]:
        """Store the reply and end the episode."""
        self.reply = reply
        return []

    def score(self) -> Score:
        """Return the task's score of the reply."""
        return self.task.score(self.problem, self.reply)

    def feedback(self) -> str:
        """Return the result of the task's ``feedback(problem, text)``, or "" if the task has no such method."""
        feedback = getattr(self.task, "feedback", None)
        return feedback(self.problem, self.reply) if feedback else ""  # ``feedback_on`` checks it


def begin(task: Task, problem: Problem) -> Episode:
    """Create an episode of the task."""
    with explained(task, problem, "episode()"):
        episode: Episode = task.episode(problem) if hasattr(task, "episode") else SingleTurn(task, problem)
    return episode


def several_turns(task: Task) -> bool:
    """Whether an episode may have several turns: the task has ``episode`` but not ``one_turn = True``."""
    return hasattr(task, "episode") and not getattr(task, "one_turn", False)


@contextmanager
def explained(task: Task, problem: Problem, what: str = "score()") -> Iterator[None]:
    """Turn an exception in the task's code into an error that names the task, the problem, the file and the line."""
    try:
        yield
    except (RewardError, TaskError):  # their messages already name these
        raise
    except (Exception, SystemExit) as error:
        raised = f"raised {type(error).__name__}: {error}{place_of(error)}"
        cause = None if isinstance(error, StopIteration) else error  # contextlib would raise the StopIteration instead
        raise RewardError(f"{what} of task {task.name!r} {raised} (problem {problem.id})") from cause


def heard(task: Task, problem: Problem, said: Any) -> list[Message]:
    """Check an episode's messages and make the text readable for any tokenizer. Return [] if the episode ends."""
    if not said:
        return []
    if not isinstance(said, list | tuple) or not all(_is_message(each) for each in said):
        raise RewardError(
            f"the messages of an episode of task {task.name!r} must be a list of dicts with text for 'role' and "
            f"'content', got {short(said)} (problem {problem.id})"
        )
    return [{**each, "content": readable(each["content"])} for each in said]


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def readable(text: str) -> str:
    """Replace each lone surrogate with ``?``: file names may contain lone surrogates, and tokenizers reject them."""
    return text.encode("utf-8", "replace").decode()


def judge(task: Task, problem: Problem, episode: Episode) -> Score:
    """Call ``episode.score()`` and return the score with plain Python numbers. Errors name the problem."""
    with explained(task, problem):
        score = episode.score()
    return _checked(task, problem, score)


def judge_all(task: Any, attempts: Sequence[Attempt]) -> list[Score]:
    """Call ``task.score_all`` and apply the checks of ``judge`` to every score."""
    with explained(task, attempts[0].problem, "score_all()"):
        scores = list(task.score_all(attempts))
    if len(scores) != len(attempts):
        raise RewardError(f"task {task.name!r} returned {len(scores)} scores for {len(attempts)} attempts")
    return [_checked(task, attempt.problem, score) for attempt, score in zip(attempts, scores, strict=True)]


def _checked(task: Task, problem: Problem, result: Any) -> Score:
    try:
        score = _plain(result)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RewardError(f"the score of task {task.name!r} (problem {problem.id}): {error}") from error
    if not abs(score.reward) <= LARGEST_REWARD:
        raise RewardError(
            f"the reward of task {task.name!r} is {score.reward} (problem {problem.id}): "
            f"rewards must be finite, and between {-LARGEST_REWARD:g} and {LARGEST_REWARD:g}"
        )
    return score


def _plain(score: Any) -> Score:
    """Convert a score's numbers to Python numbers: JSON cannot represent a verifier's numpy or torch numbers."""
    if not isinstance(score, Score):
        score = _score_of_truth(score)
    if _number_or_none(score.correct) not in (0.0, 1.0):
        raise TypeError(f"correct must be True or False, got {short(score.correct)}")
    if not isinstance(score.parts, Mapping):
        raise TypeError(f"parts must be a dict of numbers, got {short(score.parts)}")
    try:
        hash(score.answer)  # equal answers are counted
    except Exception:  # a user's __hash__ may raise anything
        raise TypeError(f"answer must be text or None, got {short(score.answer)}") from None
    if score.failed is not None and not isinstance(score.failed, str):
        raise TypeError(f"failed must be the reason as text, or None, got {short(score.failed)}")
    parts = {str(name): _number(f"parts[{name!r}]", value) for name, value in score.parts.items()}
    correct = bool(score.correct) and score.failed is None
    return Score(_number("reward", score.reward), correct, parts, score.answer, score.failed)


def _score_of_truth(value: Any) -> Score:
    """Convert a Python, numpy or torch boolean to a score. Reject numbers: they do not say what is correct."""
    truth = isinstance(value, bool) or str(getattr(value, "dtype", "")).removeprefix("torch.") == "bool"
    number = _number_or_none(value) if truth else None
    if number is None:
        raise TypeError(f"must be a poise.tasks.Score(reward, correct), True or False, got {short(value)}")
    return Score(number, bool(number))


def _number(name: str, value: Any) -> float:
    number = _number_or_none(value)
    if number is None:
        raise TypeError(f"{name} must be a number, got {short(value)}")
    return number


def _number_or_none(value: Any) -> float | None:
    """Convert a Python, numpy or torch number to a float; None if the value is not a number."""
    try:
        return None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def gold_answer(task: Task, problem: Problem) -> str | None:
    """Return the right answer as text for people, not for the model; None if unknown.

    A task may define ``gold(problem)``. Without this method, the answer is the first text or number named ``answer``,
    ``solution`` or ``ground_truth`` in ``problem.data``, or in ``problem.data["row"]``.
    """
    if callable(own := getattr(task, "gold", None)):  # ``gold`` may also be a setting, such as a column's name
        with explained(task, problem, "the gold answer"):
            answer = own(problem)
    else:
        data: Any = problem.data
        tables = [data, data.get("row")] if isinstance(data, Mapping) else []
        values = [table.get(key) for table in tables if isinstance(table, Mapping) for key in GOLD_COLUMNS]
        answer = next(filter(_is_plain, values), None)
    return readable(str(answer).strip())[:LONGEST_GOLD] or None if _is_plain(answer) else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, int):
        return bool(abs(value) < 10**LONGEST_GOLD)  # Python refuses to convert longer integers to text
    return isinstance(value, str | float)


def feedback_on(task: Task, problem: Problem, episode: Episode, score: Score, turns: int) -> str:
    """Return the episode's feedback, or a general sentence if the feedback is missing or empty.

    ``turns`` is the number of replies. ``episode.feedback`` is optional; poise calls it after scoring the episode.
    """
    feedback = ""
    if hasattr(episode, "feedback"):
        with explained(task, problem, "the feedback"):
            feedback = episode.feedback()
        if not isinstance(feedback, str):
            raise RewardError(
                f"the feedback of task {task.name!r} must be text, got {short(feedback)} (problem {problem.id})"
            )
    return readable(feedback.strip()[:LONGEST_FEEDBACK]) or plain(score, turns)


def plain(score: Score, turns: int) -> str:
    """Return general feedback that applies to any attempt."""
    how = "succeeded" if score.correct else "failed"
    return f"The attempt {how}: reward {score.reward:.2f} after {counted(turns, 'turn')}."
