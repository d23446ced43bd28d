"""Messages to token ids: through the chat template, and never with control tokens from a message's own text.

A tokenizer turns ``<|im_end|>`` into a control token wherever it occurs. In a problem's text that would end the user's
turn and let the text speak for the model. Here a message's content is always plain text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Any

from poise.models.tool_prompts import Tools, announce, known_roles, template_arguments
from poise.tasks import Message

PLACEHOLDER = "PlaceOfContent{}."  # no template treats it specially
Pieces = list[tuple[str, bool]]  # a rendered dialogue: text, and whether it is a message's content
_PROBE = "TextOfProbe."
_KNOWN: dict[str, bool] = {}  # by template


class PromptError(ValueError):
    """A text that cannot be encoded as plain text."""


def encode(
    tokenizer: Any, messages: str | Sequence[Message], ends: Collection[int] = (), tools: Tools = ()
) -> list[int]:
    """The ids of a dialogue up to the start of the model's turn. A string is one user message.

    ``ends`` are the tokens that end a response. The chat template shows ``tools`` to the model; if it knows none, they
    become text in the first message. If no message contains a control token, these are the ids of
    ``apply_chat_template``. Otherwise only the template's own control tokens become control tokens, and the text
    between them is encoded as plain text. Without a chat template the messages are joined by line breaks.
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
    # Some tokenizers treat the beginning of a text specially: then the encoded parts do not add up to the whole.
    neutral = [{**message, "content": _without(contained, message["content"])} for message in messages]
    parts, _ = _encode(tokenizer, _pieces(tokenizer, neutral, arguments), controls, ends)
    _check(contained, harmless and parts == list(_render(tokenizer, neutral, arguments, tokenize=True)))
    return ids


def encode_next(
    tokenizer: Any,
    before: Sequence[Message],
    said: Sequence[Message],
    last: int | None,
    ends: Collection[int] = (),
    tools: Tools = (),
) -> list[int]:
    """The ids that follow the model's reply: the end of its turn, the new messages, the start of its next turn.

    ``before`` are the messages so far, the reply last; ``said`` are the new messages. ``last`` is the reply's last
    token: if it is an end token, the turn has ended, and what the template writes up to that token is left out. Earlier
    turns do not matter, and a template may change them (Qwen3's drops the reasoning of earlier replies). So only the
    opening and the reply are rendered, with neutral text.
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
    between, _ = _encode(tokenizer, tail[:1], controls, ends)  # a later end token would be that of a new message
    return ids[ids.index(last) + 1 :] if last in ends and last in between else ids


def opened(tokenizer: Any) -> str:
    """How the template begins every reply: ``<think>`` and blanks, where it opens a thought; else nothing."""
    found = re.search(r"<think>\s*\Z", _turn(tokenizer)) if tokenizer.chat_template else None
    return found[0] if found else ""


def starts_no_turn(tokenizer: Any) -> bool:
    """Whether the chat template does not tell the model that its turn begins, as a dialogue with a reply does."""
    if not tokenizer.chat_template:
        return False
    prompt, answered = _turn(tokenizer), _turn(tokenizer, [{"role": "assistant", "content": "x"}])
    begun = prompt != _turn(tokenizer, start=False) or re.match(re.escape(prompt) + r"\s*x", answered)
    return bool(answered) and not begun


def _turn(tokenizer: Any, more: Sequence[Message] = (), *, start: bool = True) -> str:
    """What the template writes behind a user's message; nothing where it fails, which the first prompt tells."""
    messages = [{"role": "user", "content": _PROBE}, *more]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=start and not more)
    except Exception:  # a chat template is third-party code and may raise anything
        return ""
    return str(text).rpartition(_PROBE)[2]


def plain(tokenizer: Any, text: str) -> list[int]:
    """The ids of a plain text: special tokens are neither recognised in it nor added to it."""
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


def _check(contained: Sequence[str], harmless: bool) -> None:
    if not harmless:
        raise PromptError(
            f"the text holds {', '.join(map(repr, contained))}, a control token of the model, and this tokenizer and "
            "its chat template do not let poise encode it as plain text: take it out of the problem's text"
        )


def _without(tokens: Sequence[str], text: str) -> str:
    for token in tokens:
        text = text.replace(token, "x")
    return text


def _controls(tokenizer: Any, ends: Collection[int]) -> dict[str, int]:
    """The control tokens: those that mean more to the model than their text."""
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
            "the chat template changes a message's text; poise needs it unchanged where the text holds control tokens, "
            "and in a dialogue of several turns"
        )
    return pieces


def _encode(tokenizer: Any, pieces: Pieces, controls: dict[str, int], ends: Collection[int]) -> tuple[list[int], bool]:
    """The ids, and whether the plain text between the control tokens encodes to none of them.

    The text is cut at the template's control tokens, as a tokenizer does before anything else.
    """
    added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
    runs, cuts = _runs(pieces, controls)
    for number, cut in enumerate(cuts):
        if added[cut].lstrip:  # this token absorbs the space beside it
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
    """The runs of text between the template's control tokens, and those tokens."""
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
