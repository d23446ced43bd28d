"""The beginning of a response's reasoning, in the tokens of the model that is to continue it."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

from poise.models.prompts import plain
from poise.rewards.answers import stated

if TYPE_CHECKING:
    from poise.algorithms.sampler import Sampler
    from poise.models.policy import Policy

MARKS = ("<answer>", "\\boxed", "####")  # each begins an answer
EDGES = r"\s*_`\"'${"  # what may stand between a mark and its answer
COMPARED = 200  # characters of an answer that are compared
INCOMPLETE = "\ufffd"  # stands for bytes that are no whole character
MOST_BYTES = 4  # of a character in UTF-8
ROUNDING = 1e-9  # 0.29 · 100 is 28.999999999999996 in floating point, and means 29


def prefix(tokens: Sequence[int], share: float, marks: Sequence[str], policy: Policy, receiver: Sampler) -> list[int]:
    """The first ``share`` of the reasoning in a response of the policy; empty where there is no reasoning.

    It goes over as tokens, or as text if the receiver has another vocabulary. It never holds a token that would end the
    receiver's reply, or that the receiver does not have, and leaves room for at least one token.
    """
    begun = list(tokens[: int(share * reasoning_tokens(policy, tokens, marks) + ROUNDING)])
    if begun and not same_tokens(policy, receiver.policy):
        begun = plain(receiver.policy.tokenizer, whole_text(policy, begun))
    ends, size = set(receiver.policy.end_tokens), receiver.policy.head().vocabulary
    readable = next((i for i, token in enumerate(begun) if token in ends or token >= size), len(begun))
    return begun[: min(readable, receiver.max_tokens - 1)]


def same_tokens(policy: Policy, receiver: Policy) -> bool:
    """Whether the same numbers stand for the same tokens."""
    return policy.vocabulary_hash == receiver.vocabulary_hash


def reasoning_tokens(policy: Policy, tokens: Sequence[int], marks: Sequence[str] = MARKS) -> int:
    """How many tokens of a response come before its answer; without an answer all but the end token."""
    count = len(tokens) - (len(tokens) > 0 and tokens[-1] in policy.end_tokens)
    text = policy.decode(tokens)
    place = answer_place(text, marks)
    if place is None:
        return count
    # The last token that ends before the mark: one that holds a part of the mark belongs to the answer.
    return bisect_right(range(count + 1), place, key=lambda n: len(policy.decode(tokens[:n]))) - 1


def answer_place(text: str, marks: Sequence[str]) -> int | None:
    """Where the first mark is that the answer follows; None without a mark.

    A reply may name a mark before it answers ("I shall write it in ``\\boxed``"), or use it for something else
    (``#### Step 1``). If the answer follows no mark, the last mark counts.
    """
    answer, last = (stated(text) or "")[:COMPARED], None
    one = "|".join(map(re.escape, marks)) or "(?!)"
    for found in re.finditer(f"(?:(?:{one})[{EDGES}]*)+", text):  # <answer>\boxed{7} has two
        if answer and text.startswith(answer, found.end()):
            return found.start()
        last = found.start()
    return last


def whole_text(policy: Policy, tokens: Sequence[int]) -> str:
    """The text of some tokens; a character whose bytes are not all there is left out."""
    text = policy.decode(tokens)
    for fewer in range(1, min(MOST_BYTES, len(tokens) + 1)):
        if not text.endswith(INCOMPLETE):
            return text
        text = policy.decode(tokens[: len(tokens) - fewer])
    return text.rstrip(INCOMPLETE)
