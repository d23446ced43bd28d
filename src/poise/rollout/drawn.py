"""The hidden states that an engine drew the tokens of a row from: where they are, and how to look them up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from poise._lib.spans import spans


class Part(NamedTuple):
    """A reply's place in its row, and that of its states in all states of the call that sampled it."""

    column: int
    states: Tensor  # (N, d) on the device, shared by the rows of a call
    first: int
    length: int


@dataclass(frozen=True, eq=False)
class Drawn:
    """The states of one row's own tokens, and the row: an algorithm may have changed its prompt or tokens since."""

    prompt: list[int]
    tokens: Tensor  # (n,)
    parts: list[Part]

    def of(self, prompt: list[int], tokens: Tensor) -> bool:
        """Whether they are the states of this row, and still there."""
        return bool(self.parts) and self.prompt == prompt and torch.equal(self.tokens, tokens)

    def release(self) -> None:
        """Forget the states, so that their memory is free."""
        self.parts.clear()


def lookup(rows: Sequence[Drawn | None], width: int) -> tuple[Tensor, Tensor] | None:
    """(N, d) states of these rows, and (rows, width) the place of each token's state there; None if there are none.

    The place of a token without a state is 0. The host does not wait for the device.
    """
    parts = [(row, part) for row, drawn in enumerate(rows) if drawn is not None for part in drawn.parts]
    if not parts:
        return None
    calls = {id(part.states): part.states for _, part in parts}  # one tensor for each call of the engine
    offsets, total = {}, 0
    for key, states in calls.items():
        offsets[key], total = total, total + len(states)
    states = torch.cat(list(calls.values())) if len(calls) > 1 else parts[0][1].states
    counts = [part.length for _, part in parts]
    places = torch.zeros((len(rows), width), dtype=torch.long, device=states.device)
    tokens = spans([row * width + part.column for row, part in parts], counts, states.device)
    places.view(-1)[tokens] = spans([offsets[id(part.states)] + part.first for _, part in parts], counts, states.device)
    return states, places
