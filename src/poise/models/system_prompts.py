"""A system prompt for a dialogue that has begun without one, or with another, for any chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from poise.tasks import Message

_PROBE = "TextOfProbe."
_KNOWN: dict[str, bool] = {}  # by template


def with_system(tokenizer: Any, messages: Sequence[Message], text: str) -> list[Message]:
    """The opening messages with ``text`` as their system prompt, instead of the one they have.

    If the chat template has no system role, the text stands in front of the first message.
    """
    rest = [message for message in messages if message["role"] != "system"]
    if not rest or knows_system(tokenizer):
        return [{"role": "system", "content": text}, *rest]
    first, *others = rest
    return [{**first, "content": f"{text}\n\n{first['content']}"}, *others]


def knows_system(tokenizer: Any) -> bool:
    """Whether the chat template has a system role: tried once per template.

    A template without it raises, leaves the text out, or shows it as it shows any role that it does not know.
    """
    template = str(tokenizer.chat_template)
    if template not in _KNOWN:
        shown = _shown(tokenizer, "system")
        _KNOWN[template] = _PROBE in shown and shown != _shown(tokenizer, "RoleOfProbe")
    return not tokenizer.chat_template or _KNOWN[template]


def _shown(tokenizer: Any, role: str) -> str:
    dialogue = [{"role": role, "content": _PROBE}, {"role": "user", "content": "x"}]
    try:
        return str(tokenizer.apply_chat_template(dialogue, tokenize=False, add_generation_prompt=True))
    except Exception:  # a chat template is third-party code and may raise anything
        return ""
