"""The key-value cache for CUDA: a slot of fixed length per row, so that a step can be recorded as a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from poise._lib import device as _device
from poise._lib.device import accumulator, send
from poise.models.attention import Shape, flash_takes, over_slots
from poise.models.packing import Packed
from poise.sampling.native.kv_cache import KVCache, SavedRow, by_block, copy_rows


class Rotation(NamedTuple):
    """Normalises each head of an attention layer's queries and keys, then rotates it; one token per row.

    A step whose tensors are None is skipped.
    """

    cosine: Tensor | None = None  # (n, D), from the rotary embedding
    sine: Tensor | None = None
    query_weight: Tensor | None = None  # (D,), of the norm
    key_weight: Tensor | None = None
    epsilon: float = 0.0

    def query(self, x: Tensor) -> Tensor:
        """Return the normed and rotated queries, (n, H, D)."""
        return self._rotated(x, self.query_weight)

    def key(self, x: Tensor) -> Tensor:
        """Return the normed and rotated keys, (n, G, D), as the cache stores them."""
        return self._rotated(x, self.key_weight)

    def _rotated(self, x: Tensor, weight: Tensor | None) -> Tensor:
        wide = x.to(accumulator(x.dtype))
        if weight is not None:
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon) * weight.to(wide.dtype)
        if self.cosine is not None and self.sine is not None:
            first, second = wide.chunk(2, -1)
            partners = torch.cat([-second, first], -1)
            wide = wide * self.cosine[:, None].to(wide.dtype) + partners * self.sine[:, None].to(wide.dtype)
        return wide.to(x.dtype)


class SlotCache(KVCache):
    """Stores the keys and values of prompt and response in one slot: (S, length, G, D) for every layer.

    The package's docstring describes the life of a row and the letters in shapes.
    """

    def __init__(self, shapes: Sequence[Shape], slots: int, length: int, width: int, like: Tensor) -> None:
        super().__init__(slots, length, width, like)

        def allocate(head_widths: Sequence[int]) -> list[Tensor]:
            sizes = [(slots, length, shape[0], head) for shape, head in zip(shapes, head_widths, strict=True)]
            return [torch.zeros(size, dtype=like.dtype, device=like.device) for size in sizes]

        self.keys, self.values = allocate([s[1] for s in shapes]), allocate([s[2] for s in shapes])
        self.query_starts = torch.arange(slots + 1, dtype=torch.int32, device=like.device)  # one query per row
        self.slot_starts = self.query_starts * length

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(x.nbytes for x in (*self.keys, *self.values))

    def clear(self) -> None:
        """Forget all sequences: the weights may have changed."""
        super().clear()
        self.longest_prompt = 0  # of the prompts read so far

    # Prompts and rows

    def assign(self, packed: Packed, prompts: Sequence[int], lengths: Sequence[int], rows: Sequence[int]) -> None:
        """Assign each new prompt a home: the first row that will use the prompt."""
        self.home.update(zip(prompts, rows, strict=True))
        self.longest_prompt = max(self.longest_prompt, *lengths)
        row, position = self._destinations(packed, rows)
        self.token_index = row * self.length + position
        if packed.cached_S is not None:
            self.text = packed
            used = packed.cached_S + packed.segments.length
            starts = torch.tensor([*rows, rows[-1] + 1]) * self.length
            self.text_starts, self.text_used = (send(x.to(torch.int32), self.device) for x in (starts, used))

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store the keys and values (G, L, D) of packed prompt tokens."""
        for store, new in ((self.keys, key), (self.values, value)):
            store[layer].flatten(0, 1).index_copy_(0, self.token_index, new.transpose(0, 1))

    def occupy(self, rows: Sequence[int], prompts: Sequence[int]) -> Tensor:
        """Assign rows to sequences with these prompts, which must have been read, and copy the prompts to the rows.

        Returns the hidden states (rows, W) from which the first tokens are drawn.
        """
        self.prompt_of.update(zip(rows, prompts, strict=True))
        pairs = [(self.home[p], row) for row, p in zip(rows, prompts, strict=True) if self.home[p] != row]
        parts = [x[:, : self.longest_prompt] for x in (*self.keys, *self.values)]
        copy_rows([self.prompt_states, *parts], [a for a, _ in pairs], [b for _, b in pairs])
        return self.prompt_states[send(list(rows), self.device)]

    def free(self, rows: Sequence[int]) -> None:
        """Free rows of ended sequences. A prompt has a home while any row holds the prompt."""
        for row in rows:
            del self.prompt_of[row]
        self.home = {prompt: row for row, prompt in self.prompt_of.items()}

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move sequences to free rows."""
        for source, target in zip(sources, targets, strict=True):
            self.prompt_of[target] = self.prompt_of.pop(source)
        self.home = {prompt: row for row, prompt in self.prompt_of.items()}
        copy_rows([self.prompt_states, *self.keys, *self.values], sources, targets)

    # Keys between turns

    def copy_out(self, rows: Sequence[int], lengths: Sequence[int]) -> list[SavedRow]:
        """Save the first ``lengths`` keys and values of these rows."""
        index, longest = send(list(rows), self.device), max(lengths)
        block = [x[index, :longest] for x in (*self.keys, *self.values)]
        return [SavedRow(block, row, length) for row, length in enumerate(lengths)]

    def copy_in(self, saved: Sequence[SavedRow], prompts: Sequence[int]) -> None:
        """Copy saved keys and values to the start of these prompts, which must have a home."""
        for block, sources, homes, longest in by_block(saved, [self.home[prompt] for prompt in prompts]):
            source, target = send(sources, self.device), send(homes, self.device)
            for store, copy in zip((*self.keys, *self.values), block, strict=True):
                store[target, :longest] = copy[source, :longest]

    def prompt_kv(self, layer: int, home: int, length: int) -> tuple[Tensor, Tensor]:
        """Return the first ``length`` keys and values of a slot, (G, length, D) each."""
        return self.keys[layer][home, :length].transpose(0, 1), self.values[layer][home, :length].transpose(0, 1)

    def attend_text(self, layer: int, query: Tensor, scale: float | None, window: int | None) -> Tensor:
        """Attend with each query (L, H, D) of the new text to its own key and all earlier keys of its slot."""
        keys, values = self.keys[layer], self.values[layer]
        if not flash_takes(query, keys.shape[-1], values.shape[-1]):
            return super().attend_text(layer, query, scale, window)
        starts = self.text.starts_q, self.text_starts
        return over_slots(query, keys, values, *starts, self.text_used, scale, window, self.text.longest_q)

    # Attention

    def begin_step(self) -> None:
        """Compute the values that all layers of a step share: the new keys' indices and each slot's number of keys."""
        position = self.positions[: self.n]
        self.newest, self.used = self.row_index[: self.n] * self.length + position, (position + 1).to(torch.int32)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Store the new keys and values (n, G, D), and attend with the queries (n, H, D) to all keys of their slots.

        Without ``rotation``, queries and keys must already be normed and rotated.
        """
        n, keys, values = len(query), self.keys[layer][: self.n], self.values[layer][: self.n]
        if _device.suits_triton(query):
            from poise.sampling.native import kernels

            if kernels.suits(query, keys):
                return kernels.attend(query, key, value, keys, values, self.used, scale, window, rotation)
        if rotation is not None:
            query, key = rotation.query(query), rotation.key(key)
        for store, new in ((keys, key), (values, value)):
            store.flatten(0, 1).index_copy_(0, self.newest, new)
        starts = self.query_starts[: n + 1], self.slot_starts[: n + 1]
        return over_slots(query, keys, values, *starts, self.used, scale, window)
