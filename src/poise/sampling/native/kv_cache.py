"""The key-value cache of the native engine, and its form for CPUs. The package's docstring describes a row's life."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from poise._lib.device import send
from poise.models.attention import Shape, text_over_keys
from poise.models.packing import Packed

FIRST_ROOM = 256  # response tokens per row allocated at first
ROUND = 16  # attended response tokens are rounded up to a multiple: torch is slower with fewer tokens or more shapes


class CacheSizes(NamedTuple):
    """The capacity of a cache."""

    slots: int  # rows
    prompts: int
    longest_prompt: int  # tokens
    max_tokens: int  # per response; SlotCache: prompt and response together


@dataclass(frozen=True, eq=False)
class SavedRow:
    """The keys and values of one sequence, outside the cache. Rows that ended together share a block of tensors."""

    block: list[Tensor]  # every layer's keys, then every layer's values, each for all rows of the block
    row: int  # in the block
    length: int  # tokens


class KVCache:
    """Base class: records each row's prompt and length. Prompts are identified by numbers."""

    def __init__(self, slots: int, length: int, width: int, like: Tensor) -> None:
        self.slots, self.length = slots, length  # rows, and tokens per row
        self.device, self.n = like.device, 0
        self.prompt_states = torch.zeros((slots, width), dtype=like.dtype, device=like.device)  # (S, W), by home
        self.row_index = torch.arange(slots, device=like.device)
        self.positions = torch.zeros(slots, dtype=torch.long, device=like.device)  # (S,) of each row's next token
        self.counts = torch.zeros_like(self.positions)  # (S,) response tokens so far
        self.last_positions = torch.zeros_like(self.positions)  # (S,) the last position allowed in the row
        self.clear()

    def clear(self) -> None:
        """Forget all sequences: the weights may have changed."""
        self.prompt_of: dict[int, int] = {}  # row → prompt
        self.home: dict[int, int] = {}  # prompt → index of its keys

    def set_lengths(self, prompts: Sequence[int], counts: Sequence[int], limits: Sequence[int]) -> None:
        """Set the lengths of the first ``len(prompts)`` rows, which the next steps decode.

        Each list has one entry per row: the prompt's length, the response tokens so far, and the maximum number of
        response tokens.
        """
        self.n = len(prompts)
        prompt, count, limit = send(torch.tensor([prompts, counts, limits]), self.device)
        self.positions[: self.n] = prompt + count
        self.counts[: self.n] = count
        self.last_positions[: self.n] = prompt + limit.clamp(min=1) - 1

    def advance(self) -> None:
        """Count one more token in every decoded row. Finished rows may receive more tokens, which are discarded.

        A position never exceeds the row's last one: a table of learned positions ends there, and a rotary embedding may
        depend on the largest position of the batch.
        """
        self.positions[: self.n] = torch.minimum(self.positions[: self.n] + 1, self.last_positions[: self.n])
        self.counts[: self.n] += 1

    def keep_states(self, prompts: Sequence[int], states: Tensor) -> None:
        """Store the hidden states (P, W) of the prompts' last tokens."""
        self.prompt_states[send([self.home[prompt] for prompt in prompts], states.device)] = states

    def attend_text(self, layer: int, query: Tensor, scale: float | None, window: int | None) -> Tensor:
        """Attend with each query (L, H, D) of the new text to its own key and all earlier keys of its sequence."""
        outs = []
        for home, start, length, end in zip(self.text_homes, *self.text_spans, strict=True):
            keys, values = self.prompt_kv(layer, home, end)
            outs.append(text_over_keys(query[start : start + length], keys, values, scale, window))
        return torch.cat(outs)

    def prompt_kv(self, layer: int, home: int, length: int) -> tuple[Tensor, Tensor]:
        """Return the first ``length`` keys and values at a home, (G, length, D) each."""
        raise NotImplementedError

    def _destinations(self, packed: Packed, homes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the home and the position of every packed token, (L,) each."""
        start, length = packed.segments.start, packed.segments.length
        if packed.cached_S is not None:
            self.text_homes = list(homes)
            self.text_spans = start.tolist(), length.tolist(), (packed.cached_S + length).tolist()
        return send(torch.repeat_interleave(torch.tensor(homes), length), self.device), packed.positions[0]


class SharedPromptCache(KVCache):
    """Stores prompts (P, G, T, D) separately from responses (S, G, T, D), in every layer.

    Keys of prompts are transposed, (P, G, D, T), the fastest layout for the product with the queries.
    """

    room = 0  # response tokens per row allocated so far

    def __init__(self, shapes: Sequence[Shape], sizes: CacheSizes, width: int, like: Tensor) -> None:
        super().__init__(sizes.slots, sizes.max_tokens, width, like)
        self.shapes = list(shapes)
        self.dtype = torch.promote_types(like.dtype, torch.float32)  # no half precision for attention scores
        self.prompt_keys = [
            x.transpose(2, 3).contiguous() for x in self._allocate(sizes.prompts, sizes.longest_prompt, 1)
        ]
        self.prompt_values = self._allocate(sizes.prompts, sizes.longest_prompt, 2)
        self._allocate_room()

    def _allocate(self, rows: int, tokens: int, head: int) -> list[Tensor]:
        """Allocate zeros (rows, G, tokens, D) for each layer, for keys (``head`` = 1) or values (``head`` = 2).

        Uninitialized memory may contain NaN, and a masked weight of 0 times NaN is NaN.
        """
        return [torch.zeros((rows, s[0], tokens, s[head]), dtype=self.dtype, device=self.device) for s in self.shapes]

    def _allocate_room(self) -> None:
        self.room = min(FIRST_ROOM, self.length)
        self.response_keys, self.response_values = (self._allocate(self.slots, self.room, head) for head in (1, 2))

    @torch.inference_mode(False)
    def _double_room(self) -> None:
        """Double the room, one tensor after the other, so that only one tensor is in memory twice."""
        more = min(self.room, self.length - self.room)
        for stores in (self.response_keys, self.response_values):
            for layer, store in enumerate(stores):
                stores[layer] = torch.nn.functional.pad(store, (0, 0, 0, more))
                del store
        self.room += more

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        stores = (self.prompt_keys, self.prompt_values, self.response_keys, self.response_values)
        return sum(x.nbytes for store in stores for x in store)

    def clear(self) -> None:
        """Forget all sequences: the weights may have changed."""
        super().clear()
        self.lengths: list[int] = []  # prompt lengths, by home
        if self.room > FIRST_ROOM:  # the room must not depend on earlier calls: see NativeEngine._decoder_for
            self._allocate_room()

    # Prompts and rows

    def assign(self, packed: Packed, prompts: Sequence[int], lengths: Sequence[int], rows: Sequence[int]) -> None:  # noqa: ARG002
        """Assign each new prompt a home, after the prompts that are already in the cache."""
        homes = range(len(self.lengths), len(self.lengths) + len(prompts))
        self.lengths += lengths
        self.home.update(zip(prompts, homes, strict=True))
        self.token_places = self._destinations(packed, homes)

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store the keys and values (G, L, D) of packed prompt tokens."""
        home, position = self.token_places
        for store, new in ((self.prompt_keys[layer].transpose(2, 3), key), (self.prompt_values[layer], value)):
            store[home, :, position] = new.transpose(0, 1).to(store.dtype)

    def occupy(self, rows: Sequence[int], prompts: Sequence[int]) -> Tensor:
        """Assign rows to sequences with these prompts, which must have been read.

        Returns the hidden states (rows, W) from which the first tokens are drawn.
        """
        self.prompt_of.update(zip(rows, prompts, strict=True))
        return self.prompt_states[send([self.home[prompt] for prompt in prompts], self.device)]

    def free(self, rows: Sequence[int]) -> None:
        """Free rows of ended sequences, drop prompts without a sequence, and move the last prompts into the gaps."""
        for row in rows:
            del self.prompt_of[row]
        in_use = set(self.prompt_of.values())
        prompt_at = {place: prompt for prompt, place in self.home.items()}
        used = sorted(place for place, prompt in prompt_at.items() if prompt in in_use)
        holes = [place for place in range(len(used)) if prompt_at[place] not in in_use]
        sources = used[len(used) - len(holes) :]
        self.home = {prompt_at[place]: place for place in used}
        for source, hole in zip(sources, holes, strict=True):
            self.home[prompt_at[source]] = hole
            self.lengths[hole] = self.lengths[source]
        del self.lengths[len(used) :]
        longest = max(self.lengths, default=0)
        keys, values = [x[..., :longest] for x in self.prompt_keys], [x[:, :, :longest] for x in self.prompt_values]
        copy_rows([self.prompt_states, *keys, *values], sources, holes)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move sequences to free rows."""
        for source, target in zip(sources, targets, strict=True):
            self.prompt_of[target] = self.prompt_of.pop(source)
        used = max(self.host_counts)
        copy_rows([x[:, :, :used] for x in (*self.response_keys, *self.response_values)], sources, targets)

    # Keys between turns

    def copy_out(self, rows: Sequence[int], lengths: Sequence[int]) -> list[SavedRow]:
        """Save the first ``lengths`` keys and values of these rows, of the prompt and then of the response."""
        longest, block = max(lengths), []
        stores = (
            ([x.transpose(2, 3) for x in self.prompt_keys], self.response_keys),
            (self.prompt_values, self.response_values),
        )
        for prompt_stores, response_stores in stores:
            for of_prompts, of_responses in zip(prompt_stores, response_stores, strict=True):
                copy = of_prompts.new_zeros((len(rows), of_prompts.shape[1], longest, of_prompts.shape[3]))
                for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
                    home = self.home[self.prompt_of[row]]
                    prompt = self.lengths[home]
                    copy[number, :, :prompt] = of_prompts[home, :, :prompt]
                    copy[number, :, prompt:length] = of_responses[row, :, : length - prompt]
                block.append(copy)
        return [SavedRow(block, row, length) for row, length in enumerate(lengths)]

    def copy_in(self, saved: Sequence[SavedRow], prompts: Sequence[int]) -> None:
        """Copy saved keys and values to the start of these prompts, which must have a home."""
        stores = (*(x.transpose(2, 3) for x in self.prompt_keys), *self.prompt_values)
        for block, sources, homes, longest in by_block(saved, [self.home[prompt] for prompt in prompts]):
            source, target = send(sources, self.device), send(homes, self.device)
            for store, copy in zip(stores, block, strict=True):
                store[target, :, :longest] = copy[source, :, :longest]

    def prompt_kv(self, layer: int, home: int, length: int) -> tuple[Tensor, Tensor]:
        """Return the first ``length`` keys and values of a prompt, (G, length, D) each."""
        return self.prompt_keys[layer][home, ..., :length].transpose(1, 2), self.prompt_values[layer][home, :, :length]

    # Attention

    def set_lengths(self, prompts: Sequence[int], counts: Sequence[int], limits: Sequence[int]) -> None:
        """Set the lengths of the rows to decode, and group the rows by prompt."""
        super().set_lengths(prompts, counts, limits)
        self.host_counts = list(counts)
        groups: list[list[int]] = [[] for _ in self.lengths]
        for row in range(self.n):
            groups[self.home[self.prompt_of[row]]].append(row)
        largest = max(len(group) for group in groups)
        members = [row for group in groups for row in [*group, *[group[0]] * (largest - len(group))]]
        self.groups, self.largest_group = len(groups), largest
        # (groups · largest,) rows by group; smaller groups repeat their first row. None stands for 0, 1, 2, …
        self.members: Tensor | None = None
        if members != list(range(self.n)):
            place = {row: at for at, row in reversed(list(enumerate(members)))}
            self.members = send(members, self.device)
            self.member_places = send([place[row] for row in range(self.n)], self.device)
        self.prompt_lengths = send(list(prompts), self.device)
        longest = max(self.lengths)
        real = torch.arange(longest) < torch.tensor(self.lengths)[:, None]
        self.padding = None
        if min(self.lengths) < longest:
            self.padding = self._bias(send(real, self.device))[:, None, None, None]

    def advance(self) -> None:
        """Count one more token in every decoded row."""
        super().advance()
        self.host_counts = [count + 1 for count in self.host_counts]

    def begin_step(self) -> None:
        """Compute the values that all layers of a step share, and allocate room for the new keys."""
        self.biases: dict[int | None, tuple[Tensor | None, Tensor | None]] = {}  # by window
        self.lockstep = min(self.host_counts) == max(self.host_counts)
        self.newest = min(max(self.host_counts), self.length - 1)
        while self.newest >= self.room:
            self._double_room()
        self.used = min(-(-(self.newest + 1) // ROUND) * ROUND, self.room)
        self.column = self.counts[: self.n].clamp(max=self.length - 1)  # (n,) the place of each row's new key

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """Store the new keys and values (n, G, D), and attend with the queries (n, H, D) to all keys of their rows.

        Attention to the prompt is one product for all queries of a group; attention to the response is one product per
        row. The two results are weighted by their sums of exponentials.
        """
        n, heads, width = query.shape
        response_keys, response_values = self.response_keys[layer], self.response_values[layer]
        for store, new in ((response_keys, key), (response_values, value)):
            if self.lockstep:
                store[:n, :, self.newest] = new
            else:
                store[self.row_index[:n], :, self.column] = new.to(store.dtype)
        key_heads, longest, used, groups = key.shape[1], max(self.lengths), self.used, self.groups
        queries = (query * (width**-0.5 if scale is None else scale)).to(response_keys.dtype)
        if window not in self.biases:
            self.biases[window] = self._biases(window, longest)
        prompt_bias, response_bias = self.biases[window]

        scores = self._by_group(queries, key_heads) @ self.prompt_keys[layer][:groups, ..., :longest].flatten(0, 1)
        if prompt_bias is not None:
            scores.view(groups, key_heads, self.largest_group, -1, longest).add_(prompt_bias)
        over_prompt, prompt_sum = (
            self._by_row(x, key_heads)
            for x in _weighted(scores, self.prompt_values[layer][:groups, :, :longest].flatten(0, 1))
        )

        by_key_head = queries.reshape(n * key_heads, heads // key_heads, width)
        scores = by_key_head @ response_keys[:n, :, :used].flatten(0, 1).transpose(1, 2)
        if response_bias is not None:
            scores.view(n, heads, used).add_(response_bias)
        over_response, response_sum = _weighted(scores, response_values[:n, :, :used].flatten(0, 1))
        share = torch.sigmoid(response_sum.view_as(prompt_sum) - prompt_sum)
        return torch.lerp(over_prompt, over_response.view_as(over_prompt), share).to(query.dtype)

    def _by_group(self, x: Tensor, key_heads: int) -> Tensor:
        """Reshape (n, H, D) to (groups · G, rows of a group · H / G, D)."""
        rows = x if self.members is None else x.index_select(0, self.members)
        parts = rows.reshape(self.groups, self.largest_group, key_heads, -1, x.shape[-1]).transpose(1, 2)
        return parts.reshape(self.groups * key_heads, -1, x.shape[-1])

    def _by_row(self, x: Tensor, key_heads: int) -> Tensor:
        """The inverse of ``_by_group``."""
        parts = x.view(self.groups, key_heads, self.largest_group, -1, x.shape[-1]).transpose(1, 2)
        rows = parts.reshape(self.groups * self.largest_group, -1, x.shape[-1])
        return rows if self.members is None else rows.index_select(0, self.member_places)

    def _biases(self, window: int | None, longest: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the biases for the scores of prompts (by group) and of responses; all layers share them."""
        count, column = self.column[:, None], torch.arange(self.used, device=self.device)
        if window is None:
            whole = self.lockstep and self.used == self.newest + 1
            return self.padding, None if whole else self._bias(column <= count)[:, None]
        position, prompt = torch.arange(longest, device=self.device), self.prompt_lengths[:, None]
        prompt_bias = self._bias((position < prompt) & (prompt + count - position < window))
        prompt_bias = prompt_bias if self.members is None else prompt_bias.index_select(0, self.members)
        response_bias = self._bias((column <= count) & (count - column < window))
        return prompt_bias.view(self.groups, 1, self.largest_group, 1, longest), response_bias[:, None]

    def _bias(self, visible: Tensor) -> Tensor:
        # Not −∞: if a window hides the whole prompt, its result must be finite, so that a share of 0 removes it.
        hidden = torch.finfo(self.dtype).min / 2
        return torch.zeros(visible.shape, dtype=self.dtype, device=visible.device).masked_fill_(~visible, hidden)


def _weighted(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """For scores (…, T), return the values weighted by their softmax, (…, D), and log Σ exp(scores), (…, 1)."""
    weights = scores.softmax(-1)  # the largest weight is 1 / Σ exp(score − largest score)
    return weights @ values, scores.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log()


def by_block(saved: Sequence[SavedRow], homes: Sequence[int]) -> list[tuple[list[Tensor], list[int], list[int], int]]:
    """Group saved rows by block. Returns each block's tensors, rows, target homes, and longest row length."""
    members: dict[int, list[tuple[SavedRow, int]]] = {}
    for row, home in zip(saved, homes, strict=True):
        members.setdefault(id(row.block), []).append((row, home))
    return [
        (pairs[0][0].block, [row.row for row, _ in pairs], [home for _, home in pairs], max(r.length for r, _ in pairs))
        for pairs in members.values()
    ]


def copy_rows(tensors: Sequence[Tensor], sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copy the rows ``sources`` to the rows ``targets`` in each tensor."""
    if not targets:
        return
    device = tensors[0].device
    source, target = send(list(sources), device), send(list(targets), device)
    for tensor in tensors:
        tensor[target] = tensor[source]
