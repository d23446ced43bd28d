"""Shared code for rewards: read completions and gold answers, write feedback on wrong answers, and define the grade."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isnan
from typing import Any

from poise._lib.errors import UserError, quote
from poise.tasks.rewards import answers

GOLD_COLUMNS = ("answer", "solution", "ground_truth")  # tried in this order


class RewardError(UserError, RuntimeError):
    """A reward or verifier raised an exception, or did not return one finite number (or None) per completion."""


@dataclass(frozen=True)
class Grade:
    """The result of all rewards for one completion.

    ``reward`` is the weighted sum of the rewards that apply. ``parts`` holds their unweighted values by name.
    ``correct`` is True if the first reward that applies reaches its ``correct_at`` (default 1.0).
    ``answer`` is the completion's answer in a normal form, so that equal answers have equal texts; None without an
    answer.
    ``failed`` is the reason if there is no grade. ``reward`` is then 0.0, and training must skip the row.
    ``applies`` is False if every reward returned None. ``reward`` is then 0.0 (NaN in TRL), and training must skip the
    row, but this is not an error.
    ``extra`` holds the values that the rewards recorded for this row with ``log_extra``.
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
    """The argument ``trainer_state`` of a reward: the fields of transformers' ``TrainerState`` that poise supports."""

    global_step: int = 0  # finished steps: 0 while the first step is sampling
    max_steps: int = 0
    epoch: float = 0.0  # passes through the data so far; 0 for an endless task


def text_of(completion: Any) -> str:
    """Return the completion if it is text, else the content of the assistant's last message.

    In a dialogue with tools, the earlier turns are tool calls and results; only the final reply counts.
    """
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message.get("role", "assistant") == "assistant":
            return _content(message.get("content"))
    return ""


def _content(content: Any) -> str:
    if isinstance(content, list):  # a list of parts, as for vision models
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def wrong_answer_feedback(answer: str | None, text: str, form: str) -> str:
    """Write feedback on a wrong reply: the answer that was read, or the required form of an answer.

    ``answer`` is None if no answer could be read. The feedback does not reveal the right answer.
    """
    if answer is not None:
        return f"Your answer was read as {quote(answer)}, and it is wrong."
    if "<think>" in text.rpartition("</think>")[2]:
        return f"No answer could be read: <think> is never closed. {form}"
    unread = answers.final_answer(text)
    return f"No answer could be read{f' in {quote(unread)}' if unread else ''}. {form}"


def gold_of(owner: str, columns: Mapping[str, Any], column: str | None, count: int) -> list[list[str]]:
    """Return the gold answers of each row: none if the cell is empty, several if the cell is a list."""
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
    """Return the right answers in a cell: none if the cell is empty, blank or NaN (pandas' missing value)."""
    values = value if isinstance(value, list | tuple) else [value]
    known = [each for each in values if each is not None and not (isinstance(each, float) and isnan(each))]
    return [str(each) for each in known if str(each).strip()]
