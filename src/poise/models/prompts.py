"""Messages as token ids: through the chat template, and what a message says never as control tokens.

A tokenizer turns ``<|im_end|>`` into the control token wherever it stands. In a problem's text that would end the
user's turn, and let the text speak for the model: what a message says is text, whatever it says.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from poise.models.tool_prompts import Tools, announce, known_roles, template_arguments
from poise.tasks import Message

PLACE = "PlaceOfContent{}."  # no template knows it, and none has a reason to change it
Pieces = list[tuple[str, bool]]  # a rendered dialogue, cut up: text, and whether it is what a message says


class PromptError(ValueError):
    """A text that cannot be encoded as what it is."""


def encode(
    tokenizer: Any, messages: str | Sequence[Message], ends: Collection[int] = (), tools: Tools = ()
) -> list[int]:
    """The ids of messages, up to where the model's turn begins. A bare text is a user's message.

    ``ends`` are tokens that end a response. ``tools`` are shown to the model by its chat template, or, where that knows
    none, as text in the first message. Without a control token in any message these are the ids of
    ``apply_chat_template``. With one, the template's control tokens stand for themselves, and all between them is
    encoded as plain text. Without a chat template the messages follow each other, a line each.
    """
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    messages = announce(tokenizer, known_roles(tokenizer, messages), tools)
    more = template_arguments(tokenizer, tools)
    controls = _controls(tokenizer, ends)
    found = sorted(token for token in controls if any(token in message["content"] for message in messages))
    if not tokenizer.chat_template:
        text = "\n".join(message["content"] for message in messages)
        if found:
            _check(found, set(ends).isdisjoint(plain(tokenizer, text)))
        return list(tokenizer(text, split_special_tokens=bool(found))["input_ids"])
    if not found:
        return list(_render(tokenizer, messages, more, tokenize=True))
    ids, harmless = _encode(tokenizer, _pieces(tokenizer, messages, more), controls, ends)
    # Where a tokenizer treats the beginning of a text in its own way, the parts are not the whole.
    neutral = [{**message, "content": _without(found, message["content"])} for message in messages]
    parts, _ = _encode(tokenizer, _pieces(tokenizer, neutral, more), controls, ends)
    _check(found, harmless and parts == list(_render(tokenizer, neutral, more, tokenize=True)))
    return ids


def encode_next(
    tokenizer: Any,
    before: Sequence[Message],
    said: Sequence[Message],
    last: int | None,
    ends: Collection[int] = (),
    tools: Tools = (),
) -> list[int]:
    """The ids of what follows the model's reply: the end of its turn, the messages ``said``, the start of the next.

    ``before`` are the messages so far, the reply last. ``last`` is the reply's last token: where it is the one with
    which the template ends a turn, it is not repeated. What was said before the reply does not matter, and a template
    may change it (Qwen3's drops the reasoning of earlier replies): neutral text takes its place.
    """
    said = known_roles(tokenizer, said)
    if not tokenizer.chat_template:
        return plain(tokenizer, "".join(f"\n{message['content']}" for message in said) + "\n")
    earlier = [{**message, "content": "x"} for message in known_roles(tokenizer, before)]
    pieces = _pieces(tokenizer, [*earlier, *said], template_arguments(tokenizer, tools))
    contents = [at for at, (_, is_content) in enumerate(pieces) if is_content]
    controls = _controls(tokenizer, ends)
    ids, harmless = _encode(tokenizer, pieces[contents[len(earlier) - 1] + 1 :], controls, ends)
    _check(sorted(token for token in controls if any(token in message["content"] for message in said)), harmless)
    return ids[1:] if ids and ids[0] == last else ids


def plain(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text by itself: no special token is read out of it, and none is added."""
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


def _check(found: Sequence[str], harmless: bool) -> None:
    if not harmless:
        raise PromptError(
            f"the text holds {', '.join(map(repr, found))}, a control token of the model, and this tokenizer and its "
            "chat template do not let poise encode it as plain text: take it out of the problem's text"
        )


def _without(tokens: Sequence[str], text: str) -> str:
    for token in tokens:
        text = text.replace(token, "x")
    return text


def _controls(tokenizer: Any, ends: Collection[int]) -> dict[str, int]:
    """The tokens that mean something to the model other than their text."""
    added = tokenizer.added_tokens_decoder.items()
    return {token.content: i for i, token in added if token.content and (token.special or i in ends)}


def _render(tokenizer: Any, messages: Sequence[Message], more: dict[str, Any], *, tokenize: bool) -> Any:
    """The dialogue up to where the model's turn begins: ids, or text."""
    if not tokenize:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **more)
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, **more)["input_ids"]


def _pieces(tokenizer: Any, messages: Sequence[Message], more: dict[str, Any]) -> Pieces:
    """The dialogue cut up into the template's own text and what the messages say."""
    places = [PLACE.format(number) for number in range(len(messages))]
    framed = [{**message, "content": place} for message, place in zip(messages, places, strict=True)]
    around = _render(tokenizer, framed, more, tokenize=False)
    whole = _render(tokenizer, messages, more, tokenize=False)
    frame = re.split("(" + "|".join(map(re.escape, places)) + ")", around)
    pieces: Pieces = [(frame[0], False)]
    at = len(frame[0])
    exact = frame[1::2] == places and whole.startswith(frame[0])
    for message, behind in zip(messages, frame[2::2], strict=False):
        said = message["content"]
        forms = (said, said.strip(), said.lstrip(), said.rstrip())  # a template may cut spaces off
        content = next((form for form in forms if whole.startswith(form + behind, at)), None)
        if content is None:
            exact = False
            break
        pieces += [(content, True), (behind, False)]
        at += len(content) + len(behind)
    if not exact or at != len(whole):
        raise PromptError(
            "the chat template does not hand a message's text on as it is, and the text holds control tokens, or is "
            "one of several turns"
        )
    return pieces


def _encode(tokenizer: Any, pieces: Pieces, controls: dict[str, int], ends: Collection[int]) -> tuple[list[int], bool]:
    """The ids, cut at the template's control tokens, where a tokenizer cuts first of all; and whether the text between
    them is free of tokens that mean something here."""
    added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
    runs, cuts = _runs(pieces, controls)
    for number, cut in enumerate(cuts):
        if added[cut].lstrip:  # such a token takes the space beside it
            runs[number] = runs[number].rstrip()
        if added[cut].rstrip:
            runs[number + 1] = runs[number + 1].lstrip()
    inside = [plain(tokenizer, run) if run else [] for run in runs]
    ids = list(inside[0])
    for cut, run in zip(cuts, inside[1:], strict=True):
        ids += [controls[cut], *run]
    risky = {*ends, *(controls[cut] for cut in cuts)}
    return ids, all(risky.isdisjoint(run) for run in inside)


def _runs(pieces: Pieces, controls: dict[str, int]) -> tuple[list[str], list[str]]:
    """The text between control tokens that the template wrote, and these tokens."""
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
