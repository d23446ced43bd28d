"""Texts of a response's tokens, for a line of a token file.

Trainers that write token files import only this file of the report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from typing import Any


class Decoder:
    """Decodes token ids with a tokenizer's ``decode``. Without ``decode``, a token's text is its id in brackets."""

    def __init__(self, decode: Callable[[list[int]], str] | None = None) -> None:
        self.word = cache(lambda token: decode([token]) if decode else f"⟨{token}⟩")
        self.text = decode or (lambda tokens: "".join(map(self.word, tokens)))


def response_texts(tokens: Sequence[int], own: Sequence[bool], decoder: Decoder) -> dict[str, Any]:
    """The text fields of a line. ``own`` marks the tokens that the model, not the environment, wrote."""
    mine = [token for token, is_own in zip(tokens, own, strict=True) if is_own]
    turns, before = [], 0
    for is_own, pairs in groupby(zip(own, tokens, strict=True), key=lambda pair: bool(pair[0])):
        part = [token for _, token in pairs]
        turns += [] if is_own else [[before, decoder.text(part)]]
        before += len(part) if is_own else 0
    fields = {"tokens": [decoder.word(token) for token in mine], "text": decoder.text(mine)}
    return fields | ({"environment": turns} if turns else {})
