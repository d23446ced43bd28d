"""The key-value cache of the native engine: what its two forms share, and the life of a row in it.

The model code is transformers' own. It hands a cache down to poise's attention function (``decoding=``), which calls
``keep`` with the keys and values of prompts that are being read, and ``attend`` for one new token in every row; so does
the fused step.

The life of a row, for four rows and the requests A, B (one group: the same prompt p) and C, D (prompt q):

1. *A prompt is read.* All unread prompts run through the model, packed end to end. ``assign`` gives each prompt a
   home, ``keep`` stores its keys there, and ``keep_states`` the last hidden state, from which the first token is drawn.
2. *Rows are taken.* ``occupy`` ties rows to prompts::

       row      0   1   2   3
       request  A   B   C   D        first 4 rows decoded

3. *Decoding.* Only the first n rows take part, so nothing is gathered for a step. ``set_lengths`` says how long the
   rows are, ``begin_step`` works out what all layers share, ``attend`` stores the new key in each row and attends to
   everything before it, ``advance`` counts the new token. After a few steps the host looks at the tokens.
4. *A row is freed* (``free``) when its response has ended. A waiting request takes it at once. Here nobody waits::

       row      0   1   2   3
       request  A   –   C   D        B has ended

5. *Rows close up* (``move``): the last sequences move into the holes, so that fewer rows are decoded::

       row      0   1   2   3
       request  A   D   C   –        first 3 rows decoded; row 3 may be reused

6. ``clear`` forgets everything at the start of the next call, because the weights may have changed.

In a dialogue of several turns a row has a second life. ``copy_out`` saves its keys when its response has ended (all but
that of the last token, which may not have run yet). When the next turn takes a row, ``copy_in`` puts the keys back as
the beginning of its prompt, and only the new text runs through the model: ``attend_text`` lets it see the keys that are
there. From then on it is a row like any other. ``kept_rows.py`` decides which rows are saved, and for how long.

The two forms differ in where a home is:

- ``SharedPromptCache`` (CPU, and CUDA dtypes without a flash kernel): a prompt's keys are stored once and shared by its
  group. A row holds only the keys of its response, and the room per row doubles when it is full. A home is a place
  among the prompts; it is given up with the last sequence of its group, and the last prompt moves there. Shapes change
  from step to step.
- ``SlotCache`` (CUDA, half precision): a row is a slot of fixed length for prompt and response. A prompt is read into
  the first row of its group and copied to the others; its home is any row that still holds it. Shapes and addresses
  never change, so a decoding step can be recorded as a CUDA graph.

Letters in shapes: S rows (slots), P prompts, n rows that are decoded, H query heads, G key heads, D width of a head,
L packed tokens, T tokens of one row, W width of the hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from poise._lib.device import send
from poise.models.attention import text_over_keys
from poise.models.packing import Packed

FIRST_ROOM = 256  # response tokens per row that there is memory for at first
Shape = tuple[int, int, int]  # of a layer: key heads, width of a key, width of a value


@dataclass(frozen=True, eq=False)
class SavedRow:
    """The keys and values of one sequence, outside the cache. Rows that ended together share the tensors of a block."""

    block: list[Tensor]  # the keys of every layer, then the values, of all rows of the block
    row: int  # in the block
    length: int  # tokens


class KVCache:
    """Which row belongs to which prompt, and how long each row is. Prompts are known by numbers."""

    def __init__(self, slots: int, length: int, width: int, like: Tensor) -> None:
        self.slots, self.length = slots, length  # rows, and tokens per row
        self.device, self.n = like.device, 0
        self.prompt_states = torch.zeros((slots, width), dtype=like.dtype, device=like.device)  # (S, W), by home
        self.row_index = torch.arange(slots, device=like.device)
        self.positions = torch.zeros(slots, dtype=torch.long, device=like.device)  # of each row's next token
        self.counts = torch.zeros_like(self.positions)  # response tokens before it
        self.last_positions = torch.zeros_like(self.positions)  # of the last token that the row may have
        self.clear()

    def clear(self) -> None:
        """Forget all sequences: the weights may have changed."""
        self.prompt_of: dict[int, int] = {}  # row → prompt
        self.home: dict[int, int] = {}  # prompt → where its keys are

    def set_lengths(self, prompts: Sequence[int], counts: Sequence[int], limits: Sequence[int]) -> None:
        """Decode the first ``len(prompts)`` rows from now on.

        For each row: the length of its prompt, and how many response tokens it has and may have.
        """
        self.n = len(prompts)
        prompt, count, limit = send(torch.tensor([prompts, counts, limits]), self.device)
        self.positions[: self.n] = prompt + count
        self.counts[: self.n] = count
        self.last_positions[: self.n] = prompt + limit.clamp(min=1) - 1

    def advance(self) -> None:
        """Every decoded row has one more token. A finished row may go on, because nobody reads past its end.

        Its position stops at the last one: a table of learned positions ends there, and rotary embeddings that depend
        on the largest position of a batch must not see a larger one.
        """
        self.positions[: self.n] = torch.minimum(self.positions[: self.n] + 1, self.last_positions[: self.n])
        self.counts[: self.n] += 1

    def keep_states(self, prompts: Sequence[int], states: Tensor) -> None:
        """Store the hidden states (P, W) of the prompts' last tokens."""
        self.prompt_states[send([self.home[prompt] for prompt in prompts], states.device)] = states

    def attend_text(self, layer: int, query: Tensor, scale: float | None, window: int | None) -> Tensor:
        """Attend with the queries (L, H, D) of the text just kept to all that precedes each in its sequence."""
        outs = []
        for home, start, length, end in zip(self.text_homes, *self.text_spans, strict=True):
            keys, values = self.prompt_kv(layer, home, end)
            outs.append(text_over_keys(query[start : start + length], keys, values, scale, window))
        return torch.cat(outs)

    def prompt_kv(self, layer: int, home: int, length: int) -> tuple[Tensor, Tensor]:
        """(G, length, D) the first keys and values at a home."""
        raise NotImplementedError

    def _destinations(self, packed: Packed, homes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(L,) each: the home and the position of every packed token."""
        start, length = packed.segments.start, packed.segments.length
        if packed.cached_S is not None:
            self.text_homes = list(homes)
            self.text_spans = start.tolist(), length.tolist(), (packed.cached_S + length).tolist()
        return send(torch.repeat_interleave(torch.tensor(homes), length), self.device), packed.positions[0]


def by_block(saved: Sequence[SavedRow], homes: Sequence[int]) -> list[tuple[list[Tensor], list[int], list[int], int]]:
    """For every block: its tensors, the rows to copy, the homes to copy them to, and the longest row's tokens."""
    members: dict[int, list[tuple[SavedRow, int]]] = {}
    for row, home in zip(saved, homes, strict=True):
        members.setdefault(id(row.block), []).append((row, home))
    return [
        (pairs[0][0].block, [row.row for row, _ in pairs], [home for _, home in pairs], max(r.length for r, _ in pairs))
        for pairs in members.values()
    ]


def copy_rows(tensors: Sequence[Tensor], sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copy rows onto other rows, in each tensor."""
    if not targets:
        return
    device = tensors[0].device
    source, target = send(list(sources), device), send(list(targets), device)
    for tensor in tensors:
        tensor[target] = tensor[source]
