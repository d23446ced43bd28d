"""What rewards have in common: their signature, how they read a completion and the right answer, and their verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from poise._lib.errors import quote
from poise.rewards import answers

GOLD_COLUMNS = ("answer", "solution", "ground_truth")  # looked for in this order


class RewardError(RuntimeError):
    """A reward or verifier that raised, or whose values are not finite numbers, one (or None) per completion."""


class Reward(Protocol):
    """TRL's signature. ``None`` for a completion means that the reward does not apply to it."""

    def __call__(self, **columns: Any) -> Sequence[float | None]:
        """One value per completion, from ``prompts``, ``completions``, ``completion_ids`` and the data's columns."""
        ...


@dataclass(frozen=True)
class Verdict:
    """What the rewards say about one completion.

    ``reward`` is the weighted sum of the rewards that apply, ``parts`` their values by name, without weights.
    ``correct``: the first reward that applies is at least its ``correct_at`` (1.0 unless it says otherwise).
    ``answer`` is what the completion says, in a form in which equal answers are equal texts; None where there is none.
    ``failed`` says why there is no verdict: the row must take no part in training, and ``reward`` is 0.0.
    ``applies`` is False where every reward returned None: ``reward`` is 0.0 (TRL's is NaN), and the row must take no
    part in training either; but nothing went wrong.
    ``extra`` has what the rewards recorded about this row with ``log_extra``.
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
    """What a reward gets as ``trainer_state``: those fields of transformers' class that mean something here."""

    global_step: int = 0  # steps taken: 0 while the first one samples
    max_steps: int = 0
    epoch: float = 0.0  # how often the steps taken have been through the data; 0 where problems have no end


def text_of(completion: Any) -> str:
    """What the model said last: the text itself, or the content of the last message of the assistant.

    In a dialogue with tools the earlier turns are calls and the tools' answers; what counts is the final reply.
    """
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message.get("role", "assistant") == "assistant":
            return _content(message.get("content"))
    return ""


def _content(content: Any) -> str:
    if isinstance(content, list):  # parts, as models that see images have them
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def wrong(said: str | None, text: str, form: str) -> str:
    """What to say of a reply that is wrong: what was read as its answer, or what form the answer should have.

    ``said`` is the answer as it was read, None where it could not be. The right answer is not known here.
    """
    if said is not None:
        return f"Your answer was read as {quote(said)}, and it is wrong."
    if "<think>" in text.rpartition("</think>")[2]:
        return f"No answer could be read: <think> is never closed. {form}"
    stated = answers.stated(text)
    return f"No answer could be read{f' in {quote(stated)}' if stated else ''}. {form}"


def gold_of(owner: str, columns: Mapping[str, Any], column: str | None, count: int) -> list[list[str]]:
    """Per row the texts that are right: none where the data has no answer, several where it has a list of them."""
    name = column or next((name for name in GOLD_COLUMNS if name in columns), None)
    if name is None or name not in columns:
        have = ", ".join(key for key, value in columns.items() if isinstance(value, list | tuple)) or "none"
        lacks = f"column {name!r}" if name else f"any of the columns {', '.join(GOLD_COLUMNS)}"
        raise RewardError(
            f"reward {owner!r} compares with the right answer, and the data lacks {lacks} (its columns: {have}); "
            f"name the column: {owner}(column='…')"
        )
    values = columns[name]
    if len(values) != count:
        raise RewardError(f"reward {owner!r}: column {name!r} has {len(values)} rows for {count} completions")
    return [_texts(value) for value in values]


def _texts(value: Any) -> list[str]:
    values = value if isinstance(value, list | tuple) else [value]
    return [str(each) for each in values if each is not None and str(each).strip()]
