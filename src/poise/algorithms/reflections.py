"""The words of ERL: the question that asks for a reflection, and the advice that is read from the reply."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import TYPE_CHECKING

from poise._lib.errors import short, unknown
from poise.algorithms.base import Sample
from poise.engines.limits import most_tokens
from poise.models.tool_prompts import Tools
from poise.tasks import Message, Problem, Score, Split, Task
from poise.tasks.base import feedback_on

if TYPE_CHECKING:
    from poise.algorithms.sampler import Sampler

ASK = (
    "You tried a task and failed. Find out why, and write advice for the next attempt.\n\n"
    "The task:\n{task}\n\nYour attempt:\n{attempt}\n\nThe result:\n{feedback}\n\n{memory}"
    "Say in one or two sentences what went wrong. Then write a short system prompt for the next attempt at this task, "
    "between <prompt> and </prompt>: how the task works, and what to do differently."
)
RECALL = "Advice that led to success before:\n{advice}\n\n"
CUT_OFF = "The attempt was cut off at the length limit."
GAP = "\n[… left out …]\n"
SPEAKERS = {"assistant": "You", "system": "System", "user": "User"}  # everyone else is the environment


def check_text(name: str, text: str, fields: Sequence[str]) -> None:
    """Refuse a setting that is no text, or has other fields in curly brackets than those that can be filled."""
    if not isinstance(text, str):
        raise TypeError(f"erl: {name} must be text, got {short(text)}")
    try:
        found = [(field, spec, how) for _, field, spec, how in Formatter().parse(text) if field is not None]
    except ValueError as error:
        raise ValueError(f"erl: {name} cannot be read: {error}; write {{{{ and }}}} for curly brackets") from None
    for field, spec, how in found:
        if field not in fields:
            raise ValueError(f"erl: {name}: " + unknown("field", field, fields))
        if spec or how:
            raise ValueError(f"erl: {name}: write {{{field}}} alone, without a format behind it")


def read_advice(text: str) -> str | None:
    """What stands between the last pair of ``<prompt>`` tags that has no such tag inside; None if there is nothing."""
    parts = re.split(r"(?i)(</?prompt>)", text)  # text and tags take turns
    for at in range(len(parts) - 2, 1, -2):
        if parts[at].startswith("</") and not parts[at - 2].startswith("</"):
            return parts[at - 1].strip() or None
    return None


def result_of(task: Task, sample: Sample) -> str:
    """What the episode says of an attempt, and whether it was cut off."""
    assert sample.episode is not None
    turns = sum(message["role"] == "assistant" for message in sample.messages)
    text = feedback_on(task, sample.problem, sample.episode, sample.score, turns)
    return text if sample.finished else f"{text} {CUT_OFF}"


def task_of(opening: Sequence[Message]) -> str:
    """What the model was shown first."""
    return opening[0]["content"] if len(opening) == 1 else _dialogue(opening, SPEAKERS)


def attempt_of(sample: Sample) -> str:
    """What the model wrote, and what the environment said in between, as text that tells them apart."""
    if len(sample.messages) <= 1:
        return sample.text
    return _dialogue(sample.messages, {"assistant": "You"})


def _dialogue(messages: Sequence[Message], speakers: dict[str, str]) -> str:
    return "\n".join(f"{speakers.get(message['role'], 'Environment')}: {message['content']}" for message in messages)


def shorten(text: str, build: Callable[[str], str], fits: Callable[[str], bool]) -> str | None:
    """``build(text)``, with as much left out of the middle of the text as it takes to fit; None if nothing helps."""
    keep = len(text)
    while not fits(built := build(_without_middle(text, keep))):
        if not keep:
            return None
        keep = keep * 2 // 3
    return built


def _without_middle(text: str, keep: int) -> str:
    if len(text) <= keep:
        return text
    end = keep // 2
    return text[: keep - end] + GAP + text[len(text) - end :]


def fits(sampler: Sampler, messages: Sequence[Message], tools: Tools = ()) -> bool:
    """Whether the model can read these messages and reply to them, as ``sampler`` would ask it."""
    try:
        size = len(sampler.policy.encode(messages, tools))
    except Exception:  # a control token that cannot be encoded as text; and a chat template may raise anything
        return False
    return size + sampler.max_tokens <= most_tokens(sampler.policy)


@dataclass(frozen=True)
class Reflecting:
    """Reflections as a task: the problem's prompt is the question. The score comes later, from the next attempt."""

    name: str = "reflection"

    def problems(self, split: Split, seed: int) -> Iterator[Problem]:  # noqa: ARG002 (there are none of its own)
        """None: they are questions about attempts."""
        return iter(())

    def score(self, problem: Problem, text: str) -> Score:  # noqa: ARG002
        """No reward yet."""
        return Score(0.0, correct=False)
