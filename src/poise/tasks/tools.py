"""Tool calls: read out of a reply as data, checked against a JSON schema, answered with messages.

Two formats are read. Hermes' and Qwen's, any number in a reply:

    <tool_call>
    {"name": "search", "arguments": {"query": "Oslo"}}
    </tool_call>

and that of Llama 3, a reply that is nothing but one JSON object (or a list of them, as Mistral's models write it):

    {"name": "search", "parameters": {"query": "Oslo"}}

A reply is untrusted. A call that cannot be read is answered with an error text; nothing of it is run as code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from poise._lib.errors import short, unknown
from poise.rewards.answers import conclusion
from poise.tasks.base import Message

LONGEST = 20_000  # characters of a call
MOST = 16  # calls in a reply that are answered
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MARKS = ("[TOOL_CALLS]", "<|python_tag|>")  # what models write before bare JSON
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,),
    "object": (dict,), "null": (type(None),),
}  # fmt: skip

Schema = dict[str, Any]  # {"type": "function", "function": {"name": …, "parameters": …}}, as chat templates take it


@dataclass(frozen=True)
class Call:
    """One call: a tool and its arguments, or why it cannot be read."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


def calls_in(reply: str) -> list[Call]:
    """The calls that a reply makes, malformed ones included; none where it makes none. Reasoning does not count."""
    said = conclusion(reply).strip()
    if _OPEN in said:
        return [_tagged(block) for block in said.split(_OPEN, MOST)[1:]]
    for mark in _MARKS:
        said = said.removeprefix(mark).lstrip()
    if not said.startswith(("{", "[")) or '"name"' not in said:
        return []
    try:
        found = _loads(said)
    except ValueError as error:
        return [Call("", error=str(error))]
    return [_call(one) for one in (found if isinstance(found, list) else [found])[:MOST]]


def _tagged(block: str) -> Call:
    text, close, _ = block.partition(_CLOSE)
    if not close:
        return Call("", error=f"{_CLOSE} is missing")
    try:
        return _call(_loads(text))
    except ValueError as error:
        return Call("", error=str(error))


def _call(found: Any) -> Call:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return Call("", error='a call must be like {"name": "…", "arguments": {…}}')
    arguments = found.get("arguments", found.get("parameters", {}))
    if not isinstance(arguments, dict):
        return Call(found["name"], error=f"the arguments must be a JSON object, got {short(arguments)}")
    return Call(found["name"], arguments)


def _loads(text: str) -> Any:
    """JSON without what Python's reader adds to it; errors are ValueErrors, however hostile the text."""
    if len(text) > LONGEST:
        raise ValueError(f"the call is longer than {LONGEST} characters")
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"this is not JSON: {error.msg} at character {error.pos + 1}") from None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def problem_with(call: Call, schemas: Sequence[Schema]) -> str | None:
    """What is wrong with a call, by the tools' schemas: an unknown tool, or arguments that do not fit."""
    if call.error:
        return call.error
    known = {schema["function"]["name"]: schema["function"].get("parameters", {}) for schema in schemas}
    if call.name not in known:
        return unknown("tool", call.name, known)
    properties = known[call.name].get("properties", {})
    for name in known[call.name].get("required", ()):
        if name not in call.arguments:
            return f"{call.name}: the argument {name!r} is missing"
    for name, value in call.arguments.items():
        if name not in properties:
            return f"{call.name}: " + unknown("argument", name, properties)
        if not _fits(value, properties[name]):
            wanted = properties[name].get("enum") or properties[name].get("type")
            return f"{call.name}: the argument {name!r} must be {_either(wanted)}, got {short(value)}"
    return None


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, bool):  # which Python counts among the numbers
        return not kinds or "boolean" in kinds
    return not kinds or any(isinstance(value, _TYPES.get(kind, (object,))) for kind in kinds)


def _either(wanted: Any) -> str:
    return " or ".join(map(str, wanted)) if isinstance(wanted, list) else str(wanted)


def answer_all(
    reply: str, tools: Mapping[str, Callable[..., Any]], schemas: Sequence[Schema] | None = None
) -> list[Message]:
    """A message per call of the reply, with the tool's result or what is wrong with the call.

    Templates that lack the role get it as the user's.

    With ``schemas``, arguments must fit them before a tool is called. A tool that raises is answered with its error.
    """
    messages = []
    for call in calls_in(reply):
        wrong = call.error or (None if call.name in tools else unknown("tool", call.name, tools))
        if wrong is None and schemas is not None:
            wrong = problem_with(call, schemas)
        if wrong is not None:
            content = f"error: {wrong}"
        else:
            try:
                content = str(tools[call.name](**call.arguments))
            except (Exception, SystemExit) as error:  # the tool's own way to say that it refuses
                content = str({"error": str(error)})  # in TRL's form
        name = call.name if call.name in tools else ""  # what else a model calls is no name, and may hold anything
        messages.append({"role": "tool", "name": name, "content": content})
    return messages
