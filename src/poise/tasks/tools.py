"""Tool calls: parse the calls in a reply, check them against a JSON schema, and answer them with messages.

Two formats are supported. The first is the format of Hermes and Qwen, with any number of calls in a reply:

    <tool_call>
    {"name": "search", "arguments": {"query": "Oslo"}}
    </tool_call>

The second is Llama 3's format: the whole reply is one JSON object (or a list of objects, as in Mistral's models):

    {"name": "search", "parameters": {"query": "Oslo"}}

A reply is untrusted. If a call cannot be parsed, the answer is an error message. No part of a reply runs as code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from poise._lib.errors import short, unknown
from poise.tasks.base import Message
from poise.tasks.rewards.answers import conclusion

LONGEST = 20_000  # characters of a call
MOST = 16  # calls that are answered per reply
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MARKS = ("[TOOL_CALLS]", "<|python_tag|>")  # models write these before bare JSON
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}

Schema = dict[str, Any]  # {"type": "function", "function": {"name": …, "parameters": …}}, as chat templates expect it


@dataclass(frozen=True)
class Call:
    """One call: a tool and its arguments, or the reason why the call cannot be parsed."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


def calls_in(reply: str) -> list[Call]:
    """Parse the calls in a reply, including malformed calls. Ignore the reasoning."""
    text = conclusion(reply).strip()
    if _OPEN in text:
        return [_tagged_call(block) for block in text.split(_OPEN, MOST)[1:]]
    for mark in _MARKS:
        text = text.removeprefix(mark).lstrip()
    if not text.startswith(("{", "[")) or '"name"' not in text:
        return []
    try:
        data = _loads(text)
    except ValueError as error:
        return [Call("", error=str(error))]
    return [_call(one) for one in (data if isinstance(data, list) else [data])[:MOST]]


def _tagged_call(block: str) -> Call:
    text, close, _ = block.partition(_CLOSE)
    if not close:
        return Call("", error=f"{_CLOSE} is missing")
    try:
        return _call(_loads(text))
    except ValueError as error:
        return Call("", error=str(error))


def _call(data: Any) -> Call:
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return Call("", error='a call must be like {"name": "…", "arguments": {…}}')
    arguments = data.get("arguments", data.get("parameters", {}))
    if not isinstance(arguments, dict):
        return Call(data["name"], error=f"the arguments must be a JSON object, got {short(arguments)}")
    return Call(data["name"], arguments)


def _loads(text: str) -> Any:
    """Parse strict JSON, without Python's extensions. Raise ValueError for any other text."""
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
    """Check a call against the schemas. Return an error message for an unknown tool or a wrong argument, else None."""
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
            allowed = properties[name].get("enum") or properties[name].get("type")
            listed = " or ".join(map(str, allowed)) if isinstance(allowed, list) else allowed
            return f"{call.name}: the argument {name!r} must be {listed}, got {short(value)}"
    return None


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, bool):  # a bool is an int in Python
        return not kinds or "boolean" in kinds
    return not kinds or any(isinstance(value, _TYPES.get(kind, (object,))) for kind in kinds)


def answer_all(
    reply: str, tools: Mapping[str, Callable[..., Any]], schemas: Sequence[Schema] | None = None
) -> list[Message]:
    """Run the calls in a reply. Return one ``tool`` message per call, with the tool's result or an error.

    With ``schemas``, call a tool only if the arguments match its schema.
    """
    messages = []
    for call in calls_in(reply):
        error = call.error or (None if call.name in tools else unknown("tool", call.name, tools))
        if error is None and schemas is not None:
            error = problem_with(call, schemas)
        if error is not None:
            content = f"error: {error}"
        else:
            try:
                content = str(tools[call.name](**call.arguments))
            except (Exception, SystemExit) as refusal:  # a tool may refuse by raising
                content = str({"error": str(refusal)})  # as TRL writes it
        name = call.name if call.name in tools else ""  # any other name is untrusted text
        messages.append({"role": "tool", "name": name, "content": content})
    return messages
