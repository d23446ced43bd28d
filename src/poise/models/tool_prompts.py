"""Tools in a prompt: through the chat template if it supports them, else as text in the format of Hermes models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from itertools import groupby
from typing import Any

from poise.tasks import Message, TaskError

Tools = Sequence[dict[str, Any]]  # JSON schemas

INSTRUCTION = (
    "You can call these tools, described by JSON schemas:\n{}\nTo call one, write its name and its arguments as JSON "
    'between tags:\n<tool_call>\n{{"name": "NAME", "arguments": {{…}}}}\n</tool_call>'
)
_PROBE = "ResultOfProbe."
_KNOWN: dict[str, bool] = {}  # by template
_DATE = [datetime.now()]  # in all prompts of a process, or of a run: it does not change at midnight


def schemas_of(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """JSON schemas of tools: each is one already, or a function or method with type hints and a docstring."""
    return [tool if isinstance(tool, dict) else _schema(tool) for tool in tools]


def tools_of(episode: Any) -> Tools:
    """The schemas of an episode's tools, if it has any."""
    return schemas_of(episode.tools()) if hasattr(episode, "tools") else ()


@cache
def _schema(function: Any) -> dict[str, Any]:
    """By transformers, as in TRL."""
    from transformers.utils import get_json_schema

    try:
        found: dict[str, Any] = get_json_schema(function)
    except Exception as error:  # of hints and docstrings that it cannot read
        raise TaskError(f"no tool can be made of {getattr(function, '__qualname__', function)}: {error}") from error
    return found


def template_arguments(tokenizer: Any, tools: Tools) -> dict[str, Any]:
    """The chat template's arguments besides the messages. If the template prints the date, it is held here."""
    arguments = {"tools": list(tools)} if tools and knows_tools(tokenizer) else {}
    if "strftime_now" in str(tokenizer.chat_template):
        _hold_date(tokenizer.get_chat_template(tools=arguments.get("tools")))
    return arguments


def _hold_date(template: str) -> None:
    """Let the template print the date of ``_DATE``. Arguments cannot: transformers turns functions into strings."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    _compile_jinja_template(template).globals["strftime_now"] = _DATE[0].strftime  # compiled templates are cached


def fix_date(date: datetime) -> None:
    """Let chat templates show this date from now on: that of a run's beginning, so that its prompts stay the same."""
    _DATE[0] = date


def announce(tokenizer: Any, messages: Sequence[Message], tools: Tools) -> list[Message]:
    """The opening messages, with the tools described in the first one unless the chat template shows them."""
    if not tools or knows_tools(tokenizer):
        return list(messages)
    first, *others = messages
    instruction = INSTRUCTION.format("\n".join(json.dumps(tool["function"]) for tool in tools))
    parts = (first["content"], instruction) if first["role"] == "system" else (instruction, first["content"])
    return [{**first, "content": "\n\n".join(parts)}, *others]


def knows_tools(tokenizer: Any) -> bool:
    """Whether the chat template shows schemas and renders a tool's result after a reply: tried once per template."""
    template = str(tokenizer.chat_template)
    if template not in _KNOWN:
        _KNOWN[template] = "tools" in template and _renders(tokenizer)
    return _KNOWN[template]


def _renders(tokenizer: Any) -> bool:
    parameters = {"type": "object", "properties": {"text": {"type": "string", "description": "Any."}}}
    tool = {"type": "function", "function": {"name": _PROBE, "description": "Try.", "parameters": parameters}}
    dialogue = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "x"},
        {"role": "tool", "name": _PROBE, "content": _PROBE},
    ]
    try:
        text = tokenizer.apply_chat_template(dialogue, tools=[tool], tokenize=False)
    except Exception:  # a chat template is third-party code and may raise anything
        return False
    return str(text).count(_PROBE) >= 2


def known_roles(tokenizer: Any, messages: Sequence[Message]) -> list[Message]:
    """The messages, with results of tools as user messages if the template lacks the role "tool".

    Results that follow the same reply become one message, because templates expect the roles to alternate.
    """
    if all(message["role"] != "tool" for message in messages) or knows_tools(tokenizer):
        return list(messages)
    renamed: list[Message] = []
    for is_tool, run in groupby(messages, lambda message: message["role"] == "tool"):
        if is_tool:
            results = (f"<tool_response>\n{message['content']}\n</tool_response>" for message in run)
            renamed.append({"role": "user", "content": "\n".join(results)})
        else:
            renamed += run
    return renamed
