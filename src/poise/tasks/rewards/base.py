"""Code that rewards share: reading completions and gold answers, feedback on wrong answers, and the grade."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isnan
from typing import Any

from poise._lib.errors import UserError, quote
from poise.tasks.rewards import answers

GOLD_COLUMNS = ("answer", "solution", "ground_truth")  # tried in this order


class RewardError(UserError, RuntimeError):
    """A reward or verifier raised, or did not return one finite number (or None) per completion."""


@dataclass(frozen=True)
class Grade:
    """The result of all rewards for one completion.

    ``reward`` is the weighted sum of the rewards that apply, ``parts`` their values by name, without weights.
    ``correct`` is True if the first reward that applies reaches its ``correct_at`` (default 1.0).
    ``answer`` is the completion's answer in a normal form, so that equal answers are equal texts; None if it has none.
    ``failed`` says why there is no grade: ``reward`` is then 0.0, and training must skip the row.
    ``applies`` is False if every reward returned None: ``reward`` is then 0.0 (NaN in TRL), and training must skip the
    row, but this is not an error.
    ``extra`` holds what the rewards recorded about this row with ``log_extra``.
    """

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    correct: bool = False
    answer: str | None = None
    failed: str | None = None
    applies: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class TrainerState:
    """The argument ``trainer_state`` of a reward: the fields of transformers' class that have a meaning here."""

    global_step: int = 0  # finished steps: 0 while the first step samples
    max_steps: int = 0
    epoch: float = 0.0  # passes through the data so far; 0 if problems have no end


def text_of(completion: Any) -> str:
    """The completion itself if it is a text, else the content of the assistant's last message.

    In a dialogue with tools the earlier turns are calls and the tools' answers; only the final reply counts.
    """
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message.get("role", "assistant") == "assistant":
            return _content(message.get("content"))
    return ""


def _content(content: Any) -> str:
    if isinstance(content, list):  # parts, as vision models use them
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def wrong_answer_feedback(answer: str | None, text: str, form: str) -> str:
    """Feedback on a wrong reply: the answer that was read, or the form that an answer must have.

    ``answer`` is None if none could be read. The feedback does not reveal the right answer.
    """
    if answer is not None:
        return f"Your answer was read as {quote(answer)}, and it is wrong."
    if "<think>" in text.rpartition("</think>")[2]:
        return f"No answer could be read: <think> is never closed. {form}"
    unread = answers.final_answer(text)
    return f"No answer could be read{f' in {quote(unread)}' if unread else ''}. {form}"


def gold_of(owner: str, columns: Mapping[str, Any], column: str | None, count: int) -> list[list[str]]:
    """The gold answers of each row: empty if the data has none, several if it has a list."""
    name = column or next((name for name in GOLD_COLUMNS if name in columns), None)
    if name is None or name not in columns:
        have = ", ".join(key for key, value in columns.items() if isinstance(value, list | tuple)) or "none"
        lacks = f"column {name!r}" if name else f"any of the columns {', '.join(GOLD_COLUMNS)}"
        raise RewardError(
            f"reward {owner!r} compares with the right answer, but the data lacks {lacks} (its columns: {have}); "
            f"name the column: {owner}(column='…')"
        )
    values = columns[name]
    if len(values) != count:
        raise RewardError(f"reward {owner!r}: column {name!r} has {len(values)} rows for {count} completions")
    return [gold_texts(value) for value in values]


def gold_texts(value: Any) -> list[str]:
    """The right answers in a cell of the data: none if it is empty, blank or NaN (pandas writes NaN for no value)."""
    values = value if isinstance(value, list | tuple) else [value]
    known = [each for each in values if each is not None and not (isinstance(each, float) and isnan(each))]
    return [str(each) for each in known if str(each).strip()]
