"""Encode messages as token ids with the chat template. A message's own text never becomes control tokens.

A tokenizer turns ``<|im_end|>`` into a control token wherever it occurs. In a problem's text, that token would end the
user's turn and let the text speak for the model. So poise always encodes a message's content as plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from datetime import datetime
from functools import cache
from itertools import groupby, takewhile
from typing import Any

from poise.tasks import Message, TaskError

PLACEHOLDER = "PlaceOfContent{}."  # no template treats it specially
Pieces = list[tuple[str, bool]]  # a rendered dialogue: text, and whether it is a message's content
_PROBE = "TextOfProbe."
_WITH_SYSTEM: dict[str, bool] = {}  # by template: whether it has a system role
Tools = Sequence[dict[str, Any]]  # JSON schemas

INSTRUCTION = (
    "You can call these tools, described by JSON schemas:\n{}\nTo call one, write its name and its arguments as JSON "
    'between tags:\n<tool_call>\n{{"name": "NAME", "arguments": {{…}}}}\n</tool_call>'
)
_TOOL_PROBE = "ResultOfProbe."
_WITH_TOOLS: dict[str, bool] = {}  # by template: whether it shows tools
_DATE = [datetime.now()]  # the date in all prompts of a process or a run: it does not change at midnight


class PromptError(ValueError):
    """A message that cannot be encoded as plain text."""


def encode(
    tokenizer: Any, messages: str | Sequence[Message], ends: Collection[int] = (), tools: Tools = ()
) -> list[int]:
    """The token ids of a dialogue up to the start of the model's turn. A string is one user message.

    ``ends`` are the tokens that end a response. The chat template shows ``tools`` to the model; if the template does
    not support tools, the first message describes them. If no message contains a control token, the ids equal the
    result of ``apply_chat_template``. Otherwise only the template's own control tokens become control tokens, and the
    text between them is encoded as plain text. Without a chat template, the messages are joined by line breaks.
    """
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    messages = announce(tokenizer, known_roles(tokenizer, messages), tools)
    arguments = template_arguments(tokenizer, tools)
    controls = _controls(tokenizer, ends)
    contained = sorted(token for token in controls if any(token in message["content"] for message in messages))
    if not tokenizer.chat_template:
        text = "\n".join(message["content"] for message in messages)
        if contained:
            _check(contained, set(ends).isdisjoint(plain(tokenizer, text)))
        return list(tokenizer(text, split_special_tokens=bool(contained))["input_ids"])
    if not contained:
        return list(_render(tokenizer, messages, arguments, tokenize=True))
    ids, harmless = _encode(tokenizer, _pieces(tokenizer, messages, arguments), controls, ends)
    # Some tokenizers treat the start of a text specially: then the parts' ids differ from the whole text's ids.
    neutral = [{**message, "content": _without(contained, message["content"])} for message in messages]
    parts, _ = _encode(tokenizer, _pieces(tokenizer, neutral, arguments), controls, ends)
    _check(contained, harmless and parts == list(_render(tokenizer, neutral, arguments, tokenize=True)))
    return ids


def as_text(tokenizer: Any, messages: str | Sequence[Message]) -> str:
    """The dialogue up to the start of the model's turn as text, for a server that encodes it with its own tokenizer.

    The text has no beginning-of-text token if this tokenizer adds one, because the server's tokenizer adds it again.
    """
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    messages = known_roles(tokenizer, messages)
    if not tokenizer.chat_template:
        return "\n".join(message["content"] for message in messages)
    text = str(_render(tokenizer, messages, template_arguments(tokenizer, ()), tokenize=False))
    start = tokenizer.bos_token
    return text.removeprefix(start) if start and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id] else text


def encode_next(
    tokenizer: Any,
    before: Sequence[Message],
    said: Sequence[Message],
    last: int | None,
    ends: Collection[int] = (),
    tools: Tools = (),
) -> list[int]:
    """The token ids after the model's reply: the end of its turn, the new messages, the start of its next turn.

    ``before`` holds the messages so far and ends with the reply; ``said`` holds the new messages. ``last`` is the
    reply's last token. If ``last`` is an end token, the result begins after that token in the template's text. Earlier
    turns do not change the result, and a template may change them (Qwen3's template removes the reasoning of earlier
    replies). So of ``before``, only the opening and the reply are rendered, with neutral text.
    """
    said = known_roles(tokenizer, said)
    if not tokenizer.chat_template:
        return plain(tokenizer, "".join(f"\n{message['content']}" for message in said) + "\n")
    opening = takewhile(lambda message: message["role"] != "assistant", before)
    earlier = [{**message, "content": "x"} for message in (*opening, before[-1])]
    pieces = _pieces(tokenizer, [*earlier, *said], template_arguments(tokenizer, tools))
    contents = [at for at, (_, is_content) in enumerate(pieces) if is_content]
    controls = _controls(tokenizer, ends)
    tail = pieces[contents[len(earlier) - 1] + 1 :]
    ids, harmless = _encode(tokenizer, tail, controls, ends)
    _check(sorted(token for token in controls if any(token in message["content"] for message in said)), harmless)
    between, _ = _encode(tokenizer, tail[:1], controls, ends)  # a later end token would belong to a new message
    return ids[ids.index(last) + 1 :] if last in ends and last in between else ids


def opened(tokenizer: Any) -> str:
    """How the template begins every reply: ``<think>`` and whitespace if it opens a thinking block, else ""."""
    match = re.search(r"<think>\s*\Z", _turn(tokenizer)) if tokenizer.chat_template else None
    return match[0] if match else ""


def starts_no_turn(tokenizer: Any) -> bool:
    """Whether the chat template marks the start of the model's turn before a reply but not at the end of a prompt."""
    if not tokenizer.chat_template:
        return False
    prompt, answered = _turn(tokenizer), _turn(tokenizer, [{"role": "assistant", "content": "x"}])
    begun = prompt != _turn(tokenizer, start=False) or re.match(re.escape(prompt) + r"\s*x", answered)
    return bool(answered) and not begun


def _turn(tokenizer: Any, more: Sequence[Message] = (), *, start: bool = True) -> str:
    """The template's text after a user's message; empty if rendering fails.

    Encoding the first prompt will report such a failure.
    """
    messages = [{"role": "user", "content": _PROBE}, *more]
    return _tried(tokenizer, messages, add_generation_prompt=start and not more).rpartition(_PROBE)[2]


def _tried(tokenizer: Any, messages: Sequence[Message], **arguments: Any) -> str:
    """The messages rendered by the chat template; empty if rendering fails: third-party code may raise anything."""
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **arguments))
    except Exception:
        return ""


def encode_prefill(tokenizer: Any, text: str) -> list[int]:
    """The token ids of text that begins the model's turn; a tag such as ``<think>`` may be a single token."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def plain(tokenizer: Any, text: str) -> list[int]:
    """The token ids of plain text. Special tokens are neither recognised nor added."""
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


def _check(contained: Sequence[str], harmless: bool) -> None:
    if not harmless:
        raise PromptError(
            f"the text contains {', '.join(map(repr, contained))}, a control token of the model, and with this "
            "tokenizer and chat template poise cannot encode it as plain text: remove it from the problem's text"
        )


def _without(tokens: Sequence[str], text: str) -> str:
    for token in tokens:
        text = text.replace(token, "x")
    return text


def _controls(tokenizer: Any, ends: Collection[int]) -> dict[str, int]:
    """The control tokens' ids by their text. To the model, a control token means more than its text."""
    added = tokenizer.added_tokens_decoder.items()
    return {token.content: i for i, token in added if token.content and (token.special or i in ends)}


def _render(tokenizer: Any, messages: Sequence[Message], arguments: dict[str, Any], *, tokenize: bool) -> Any:
    """The dialogue up to the start of the model's turn, as ids or as text."""
    arguments = {"add_generation_prompt": True, **arguments}
    if not tokenize:
        return tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
    return tokenizer.apply_chat_template(messages, return_dict=True, **arguments)["input_ids"]


def _pieces(tokenizer: Any, messages: Sequence[Message], arguments: dict[str, Any]) -> Pieces:
    """Split the dialogue into the template's own text and the contents of the messages."""
    places = [PLACEHOLDER.format(number) for number in range(len(messages))]
    framed = [{**message, "content": place} for message, place in zip(messages, places, strict=True)]
    around = _render(tokenizer, framed, arguments, tokenize=False)
    whole = _render(tokenizer, messages, arguments, tokenize=False)
    frame = re.split("(" + "|".join(map(re.escape, places)) + ")", around)
    pieces: Pieces = [(frame[0], False)]
    at = len(frame[0])
    exact = frame[1::2] == places and whole.startswith(frame[0])
    for message, behind in zip(messages, frame[2::2], strict=False):
        text = message["content"]
        forms = (text, text.strip(), text.lstrip(), text.rstrip())  # a template may strip spaces
        content = next((form for form in forms if whole.startswith(form + behind, at)), None)
        if content is None:
            exact = False
            break
        pieces += [(content, True), (behind, False)]
        at += len(content) + len(behind)
    if not exact or at != len(whole):
        raise PromptError(
            "the chat template changes a message's text; poise needs the text unchanged if it contains control "
            "tokens or if the dialogue has several turns"
        )
    return pieces


def _encode(tokenizer: Any, pieces: Pieces, controls: dict[str, int], ends: Collection[int]) -> tuple[list[int], bool]:
    """The token ids, and whether the plain text between control tokens encodes without control tokens.

    The text is split at the template's control tokens, as a tokenizer does first.
    """
    added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
    runs, cuts = _runs(pieces, controls)
    for number, cut in enumerate(cuts):
        if added[cut].lstrip:  # this token absorbs adjacent spaces
            runs[number] = runs[number].rstrip()
        if added[cut].rstrip:
            runs[number + 1] = runs[number + 1].lstrip()
    encoded = [plain(tokenizer, run) if run else [] for run in runs]
    ids = list(encoded[0])
    for cut, run in zip(cuts, encoded[1:], strict=True):
        ids += [controls[cut], *run]
    risky = {*ends, *(controls[cut] for cut in cuts)}
    return ids, all(risky.isdisjoint(run) for run in encoded)


def _runs(pieces: Pieces, controls: dict[str, int]) -> tuple[list[str], list[str]]:
    """The text between the template's control tokens, and these control tokens."""
    pattern = re.compile("|".join(map(re.escape, sorted(controls, key=len, reverse=True))) or r"(?!)")
    runs, cuts = [""], []
    for text, is_content in pieces:
        at = 0
        for match in () if is_content else pattern.finditer(text):
            runs[-1] += text[at : match.start()]
            cuts.append(match[0])
            runs.append("")
            at = match.end()
        runs[-1] += text[at:]
    return runs, cuts


def with_system(tokenizer: Any, messages: Sequence[Message], text: str) -> list[Message]:
    """The opening messages with ``text`` as their system prompt. An existing system prompt is replaced.

    If the chat template has no system role, the text is put before the first message.
    """
    rest = [message for message in messages if message["role"] != "system"]
    if not rest or knows_system(tokenizer):
        return [{"role": "system", "content": text}, *rest]
    first, *others = rest
    return [{**first, "content": f"{text}\n\n{first['content']}"}, *others]


def knows_system(tokenizer: Any) -> bool:
    """Whether the chat template has a system role. Tested once per template.

    A template without a system role raises an error, drops the text, or shows it like any unknown role.
    """
    template = str(tokenizer.chat_template)
    if template not in _WITH_SYSTEM:
        shown = _shown(tokenizer, "system")
        _WITH_SYSTEM[template] = _PROBE in shown and shown != _shown(tokenizer, "RoleOfProbe")
    return not tokenizer.chat_template or _WITH_SYSTEM[template]


def _shown(tokenizer: Any, role: str) -> str:
    dialogue = [{"role": role, "content": _PROBE}, {"role": "user", "content": "x"}]
    return _tried(tokenizer, dialogue, add_generation_prompt=True)


# Tools in a prompt: the chat template shows them if it can; else they are text in the format of Hermes models.


def schemas_of(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """JSON schemas of tools. Each tool is a schema, or a function or method with type hints and a docstring."""
    return [tool if isinstance(tool, dict) else _schema(tool) for tool in tools]


def tools_of(episode: Any) -> Tools:
    """The schemas of an episode's tools, if it has any."""
    return schemas_of(episode.tools()) if hasattr(episode, "tools") else ()


@cache
def _schema(function: Any) -> dict[str, Any]:
    """The JSON schema of a function, built by transformers as in TRL."""
    from transformers.utils import get_json_schema

    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:  # transformers cannot read the hints or the docstring
        raise TaskError(f"{getattr(function, '__qualname__', function)} cannot become a tool: {error}") from error
    return schema


def template_arguments(tokenizer: Any, tools: Tools) -> dict[str, Any]:
    """The chat template's arguments besides the messages. Also fixes the date in a template that prints it."""
    arguments = {"tools": list(tools)} if tools and knows_tools(tokenizer) else {}
    if "strftime_now" in str(tokenizer.chat_template):
        _hold_date(tokenizer.get_chat_template(tools=arguments.get("tools")))
    return arguments


def _hold_date(template: str) -> None:
    """Make the template print ``_DATE``. An argument cannot do this: transformers turns functions into strings."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    _compile_jinja_template(template).globals["strftime_now"] = _DATE[0].strftime  # compiled templates are cached


def fix_date(date: datetime) -> None:
    """Make chat templates show this date from now on, so that a run's prompts keep the run's first date."""
    _DATE[0] = date


def announce(tokenizer: Any, messages: Sequence[Message], tools: Tools) -> list[Message]:
    """The opening messages. If the chat template does not show tools, the first message describes them."""
    if not tools or knows_tools(tokenizer):
        return list(messages)
    first, *others = messages
    instruction = INSTRUCTION.format("\n".join(json.dumps(tool["function"]) for tool in tools))
    parts = (first["content"], instruction) if first["role"] == "system" else (instruction, first["content"])
    return [{**first, "content": "\n\n".join(parts)}, *others]


def knows_tools(tokenizer: Any) -> bool:
    """Whether the chat template shows tool schemas and a tool's result after a reply. Tested once per template."""
    template = str(tokenizer.chat_template)
    if template not in _WITH_TOOLS:
        _WITH_TOOLS[template] = "tools" in template and _renders(tokenizer)
    return _WITH_TOOLS[template]


def _renders(tokenizer: Any) -> bool:
    parameters = {"type": "object", "properties": {"text": {"type": "string", "description": "Any."}}}
    tool = {"type": "function", "function": {"name": _TOOL_PROBE, "description": "Try.", "parameters": parameters}}
    dialogue = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "x"},
        {"role": "tool", "name": _TOOL_PROBE, "content": _TOOL_PROBE},
    ]
    return _tried(tokenizer, dialogue, tools=[tool]).count(_TOOL_PROBE) >= 2


def known_roles(tokenizer: Any, messages: Sequence[Message]) -> list[Message]:
    """The messages, with tool results turned into user messages if the template has no role "tool".

    Results after the same reply become one message, because templates expect the roles to alternate.
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
