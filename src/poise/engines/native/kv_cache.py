"""The key-value cache of the native engine: what its two forms share, and the life of a row in it.

The model code is transformers' own. It hands a cache down to poise's attention function (``decoding=``), which calls
``keep`` with the keys and values of prompts that are being read, and ``attend`` for one new token in every row.

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

The two forms differ in where a home is:

- ``SharedPromptCache`` (CPU, and CUDA dtypes without a flash kernel): a prompt's keys are stored once and shared by its
  group. A row holds only the keys of its response, and the room per row doubles when it is full. A home is a place
  among the prompts; it is given up with the last sequence of its group, and the last prompt moves there. Shapes change
  from step to step.
- ``SlotCache`` (CUDA, half precision): a row is a slot of fixed length for prompt and response. A prompt is read into
  the first row of its group and copied to the others; its home is any row that still holds it. Shapes and addresses
  never change, so a decoding step can be recorded as a CUDA graph.

Letters in shapes: S rows (slots), P prompts, n rows that are decoded, H query heads, K key heads, D width of a head,
L packed tokens, T tokens of one row, W width of the hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from poise._lib.transfer import send
from poise.models.packing import Packed

FIRST_ROOM = 256  # response tokens per row that there is memory for at first
Shape = tuple[int, int, int]  # of a layer: key heads, width of a key, width of a value


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

    def _destinations(self, packed: Packed, homes: Sequence[int], lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(L,) each: the home and the position of every packed token."""
        owner = torch.repeat_interleave(torch.tensor(homes), torch.tensor(lengths))
        return send(owner, self.device), packed.positions[0]


def copy_rows(tensors: Sequence[Tensor], sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copy rows onto other rows, in each tensor."""
    if not targets:
        return
    device = tensors[0].device
    source, target = send(list(sources), device), send(list(targets), device)
    for tensor in tensors:
        tensor[target] = tensor[source]
