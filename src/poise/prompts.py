"""A problem's text as token ids: through the chat template, and never as control tokens.

A tokenizer turns ``<|im_end|>`` into the control token wherever it stands. In a problem's text that would end the
user's turn, and let the text speak for the model: what a problem says is text, whatever it says.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

PLACE = "PlaceOfTheContent"  # no template knows it, and none has a reason to change it


class PromptError(ValueError):
    """A text that cannot be encoded as what it is."""


def encode(tokenizer: Any, text: str, ends: Collection[int] = ()) -> list[int]:
    """A prompt's ids: a user's turn of the chat template, where there is one. ``ends`` are tokens that end a response.

    Without a control token in the text these are the ids of ``apply_chat_template``. With one, the template's parts
    are encoded by themselves, and the text between the template's control tokens as plain text.
    """
    controls = _controls(tokenizer, ends)
    found = sorted(token for token in controls if token in text)
    if not found:
        return _turn(tokenizer, text, tokenize=True) if tokenizer.chat_template else list(tokenizer(text)["input_ids"])
    if not tokenizer.chat_template:
        inside, ids = plain(tokenizer, text), list(tokenizer(text, split_special_tokens=True)["input_ids"])
        risky, exact = set(ends), True
    else:
        neutral = text
        for token in found:
            neutral = neutral.replace(token, "x")
        before, inside, after = _parts(tokenizer, text, controls)
        ids = [*before, *inside, *after]
        risky = {*ends, *before, *after} & {*controls.values()}
        # Where a tokenizer treats the beginning of a text in its own way, the parts are not the whole.
        parts = _parts(tokenizer, neutral, controls)
        exact = [i for part in parts for i in part] == _turn(tokenizer, neutral, tokenize=True)
    if not exact or not risky.isdisjoint(inside):
        raise PromptError(
            f"the text holds {', '.join(map(repr, found))}, a control token of the model, and this tokenizer and its "
            "chat template do not let poise encode it as plain text: take it out of the problem's text"
        )
    return ids


def plain(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text by itself: no special token is read out of it, and none is added."""
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


def _controls(tokenizer: Any, ends: Collection[int]) -> dict[str, int]:
    """The tokens that mean something to the model other than their text."""
    added = tokenizer.added_tokens_decoder.items()
    return {token.content: i for i, token in added if token.content and (token.special or i in ends)}


def _turn(tokenizer: Any, text: str, *, tokenize: bool) -> Any:
    """A user's turn, and the beginning of the answer: ids, or text."""
    messages = [{"role": "user", "content": text}]
    if not tokenize:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def _parts(tokenizer: Any, text: str, controls: dict[str, int]) -> tuple[list[int], list[int], list[int]]:
    """The ids before the text, of the text and what the template puts next to it, and after it.

    They are cut at the template's control tokens, where a tokenizer cuts first of all.
    """
    whole, around = (_turn(tokenizer, content, tokenize=False) for content in (text, PLACE))
    left, _, right = around.partition(PLACE)
    if around.count(PLACE) != 1 or not (whole.startswith(left) and whole.endswith(right)):
        raise PromptError(
            "the chat template does not hand a problem's text on as it is, and the text holds control tokens"
        )
    content = whole[len(left) : len(whole) - len(right)]  # as the template has it: without spaces at its ends, perhaps
    pattern = re.compile("|".join(map(re.escape, sorted(controls, key=len, reverse=True))))
    first = next(iter(pattern.finditer(right)), None)
    last = next(reversed(list(pattern.finditer(left))), None)
    begin, end = last.end() if last else 0, first.start() if first else len(right)
    middle = left[begin:] + content + right[:end]
    tokens = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
    if last and tokens[last[0]].rstrip:  # such a token takes the space beside it
        middle = middle.lstrip()
    if first and tokens[first[0]].lstrip:
        middle = middle.rstrip()

    def ids(part: str) -> list[int]:
        return list(tokenizer(part, add_special_tokens=False)["input_ids"]) if part else []

    return ids(left[:begin]), plain(tokenizer, middle), ids(right[end:])
