"""Keys and values of the sequences that are being decoded, and attention over them.

Row i of every tensor belongs to sequence i; the first ``n`` rows are decoded together, so that nothing has to be
gathered for them. The model code is transformers' own: it hands an object of these classes down to poise's attention
function (``decoding=``), which lets it ``keep`` the keys of prompts that are being read, and ``attend`` for a token
per row. Two forms:

- ``SharedKeys``: a prompt's keys once for all of its responses, the responses' own apart. A step reads a prompt's keys
  once for the whole group. Shapes change from step to step. For CPUs, and for precisions that no flash kernel knows.
- ``SlotKeys``: a slot of fixed length per sequence, prompt and response in one. For flash attention on CUDA, which
  takes slots as they lie; shapes do not change, so that a step can be recorded as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from poise._lib import triton as _triton
from poise._lib.transfer import send
from poise.models.attention import over_slots
from poise.models.packing import Packed

ROUND = 16  # response tokens: products of fewer go a slower way in torch, and fewer shapes are better anyway
FIRST = 256  # response tokens that there is room for at first; a multiple of ROUND
Shape = tuple[int, int, int]  # of a layer: key heads, width of a key, width of a value


class Keys:
    """What both forms share: who is where. A prompt is known by a number."""

    def __init__(self, slots: int, length: int, width: int, like: Tensor) -> None:
        self.slots, self.length = slots, length  # rows, and tokens per row
        self.states = torch.zeros((slots, width), dtype=like.dtype, device=like.device)  # of the prompts' last tokens
        self.rows = torch.arange(slots, device=like.device)
        self.position = torch.zeros(slots, dtype=torch.long, device=like.device)  # of the token that comes next
        self.count = torch.zeros_like(self.position)  # response tokens before it
        self.last = torch.zeros_like(self.position)  # of the last token that the row may have
        self.device, self.n = like.device, 0
        self.clear()

    def clear(self) -> None:
        """Forget all sequences: the weights may have changed."""
        self.prompt_of: dict[int, int] = {}  # row → prompt
        self.home: dict[int, int] = {}  # prompt → where its keys are

    def place(self, prompts: Sequence[int], counts: Sequence[int], limits: Sequence[int]) -> None:
        """From here on the first rows are decoded: the lengths of their prompts, response tokens so far and at most."""
        self.n = len(prompts)
        prompt, count, limit = send(torch.tensor([prompts, counts, limits]), self.position.device)
        self.position[: self.n] = prompt + count
        self.count[: self.n] = count
        self.last[: self.n] = prompt + limit.clamp(min=1) - 1

    def advance(self) -> None:
        """All rows have one token more. Nobody reads what lies behind a row's end, so a finished one may go on.

        Its position stays at its last one: a table of learned positions has no more, and rotary embeddings that
        depend on the largest position of a batch must not see any more.
        """
        self.position[: self.n] = torch.minimum(self.position[: self.n] + 1, self.last[: self.n])
        self.count[: self.n] += 1

    def keep_states(self, prompts: Sequence[int], states: Tensor) -> None:
        """The states of the prompts' last tokens."""
        self.states[send([self.home[prompt] for prompt in prompts], states.device)] = states

    def _of_tokens(self, packed: Packed, homes: Sequence[int], lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Where each packed token of the prompts goes."""
        owner = torch.repeat_interleave(torch.tensor(homes), torch.tensor(lengths))
        return send(owner, self.rows.device), packed.positions[0]


class SharedKeys(Keys):
    """Prompts apart from responses: (prompts, heads, length, D) and (slots, heads, length, D) for every layer.

    A prompt's keys lie as (heads, D, length), since that is how a product takes them fastest. There is room for the
    first response tokens of each row, and for twice as many whenever that is full: few responses reach their limit.
    """

    room = 0  # response tokens per row that there is memory for

    def __init__(
        self, shapes: Sequence[Shape], slots: int, prompts: int, longest_prompt: int, length: int, width: int,
        like: Tensor,
    ) -> None:  # fmt: skip
        super().__init__(slots, length, width, like)
        self.prompts, self.longest_prompt = prompts, longest_prompt
        self.shapes = list(shapes)
        # Scores must not be rounded to half precision. Zeros, since 0 · NaN is NaN where a mask has left something out.
        self.kind = torch.promote_types(like.dtype, torch.float32)
        self.prompt_keys = [x.transpose(2, 3).contiguous() for x in self._make(prompts, longest_prompt, 1)]
        self.prompt_values = self._make(prompts, longest_prompt, 2)
        self._begin_room()

    def _make(self, rows: int, tokens: int, of: int) -> list[Tensor]:
        return [torch.zeros((rows, s[0], tokens, s[of]), dtype=self.kind, device=self.device) for s in self.shapes]

    def _begin_room(self) -> None:
        self.room = min(FIRST, self.length)
        self.own_keys, self.own_values = (self._make(self.slots, self.room, of) for of in (1, 2))

    def _grow(self) -> None:
        """Twice the room. One tensor after the other: the old ones are never all there beside the new ones."""
        more = min(self.room, self.length - self.room)
        for stores in (self.own_keys, self.own_values):
            for layer, store in enumerate(stores):
                stores[layer] = torch.nn.functional.pad(store, (0, 0, 0, more))
                del store
        self.room += more

    @property
    def nbytes(self) -> int:
        """Of keys and values."""
        return sum(
            x.nbytes
            for stores in (self.prompt_keys, self.prompt_values, self.own_keys, self.own_values)
            for x in stores
        )

    def clear(self) -> None:
        """Forget all sequences: the weights may have changed."""
        super().clear()
        self.lengths: list[int] = []  # of the prompts, in the order in which their keys lie
        if self.room > FIRST:  # how much there is must not depend on calls before: see NativeEngine._room
            self._begin_room()

    # Who is where

    def reading(self, packed: Packed, prompts: Sequence[int], lengths: Sequence[int], rows: Sequence[int]) -> None:  # noqa: ARG002
        """These prompts are about to be read, packed: they get a place."""
        homes = range(len(self.lengths), len(self.lengths) + len(prompts))
        self.lengths += lengths
        self.home.update(zip(prompts, homes, strict=True))
        self.target = self._of_tokens(packed, homes, lengths)

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """The keys of packed prompt tokens, (heads, L, D)."""
        home, position = self.target
        for store, new in ((self.prompt_keys[layer].transpose(2, 3), key), (self.prompt_values[layer], value)):
            store[home, :, position] = new.transpose(0, 1).to(store.dtype)

    def join(self, rows: Sequence[int], prompts: Sequence[int]) -> Tensor:
        """Sequences take these rows; their prompts have been read. Returns the states that the first tokens need."""
        self.prompt_of.update(zip(rows, prompts, strict=True))
        return self.states[send([self.home[prompt] for prompt in prompts], self.states.device)]

    def leave(self, rows: Sequence[int]) -> None:
        """Sequences have ended. A prompt without any is dropped, and the last one takes its place."""
        for row in rows:
            del self.prompt_of[row]
        used = set(self.prompt_of.values())
        at = {place: prompt for prompt, place in self.home.items()}
        kept = sorted(place for place, prompt in at.items() if prompt in used)
        holes = [place for place in range(len(kept)) if at[place] not in used]
        sources = kept[len(kept) - len(holes) :]
        self.home = {at[place]: place for place in kept} | {at[a]: b for a, b in zip(sources, holes, strict=True)}
        for a, b in zip(sources, holes, strict=True):
            self.lengths[b] = self.lengths[a]
        del self.lengths[len(kept) :]
        longest = max(self.lengths, default=0)
        keys = [x[..., :longest] for x in self.prompt_keys]
        _move([self.states, *keys, *(x[:, :, :longest] for x in self.prompt_values)], sources, holes)

    def move(self, sources: Sequence[int], rows: Sequence[int]) -> None:
        """Sequences go to other rows, which are free."""
        for a, b in zip(sources, rows, strict=True):
            self.prompt_of[b] = self.prompt_of.pop(a)
        used = max(self.host_counts)
        _move([x[:, :, :used] for x in (*self.own_keys, *self.own_values)], sources, rows)

    # Attention

    def place(self, prompts: Sequence[int], counts: Sequence[int], limits: Sequence[int]) -> None:
        """Besides, work out which rows share a prompt."""
        super().place(prompts, counts, limits)
        self.host_counts = list(counts)
        groups: list[list[int]] = [[] for _ in self.lengths]
        for row in range(self.n):
            groups[self.home[self.prompt_of[row]]].append(row)
        widest = max(len(group) for group in groups)
        in_order = [row for group in groups for row in [*group, *[group[0]] * (widest - len(group))]]
        device = self.rows.device
        self.groups, self.widest = len(groups), widest
        self.members: Tensor | None = None  # (groups · widest,) rows; None: they lie like that
        if in_order != list(range(self.n)):
            where = {row: at for at, row in reversed(list(enumerate(in_order)))}
            self.members, self.at = send(in_order, device), send([where[row] for row in range(self.n)], device)
        self.prompt_length = send(list(prompts), device)
        longest = max(self.lengths)
        seen = torch.arange(longest) < torch.tensor(self.lengths)[:, None]
        self.padding = None if min(self.lengths) == longest else self._bias(send(seen, device))[:, None, None, None]

    def advance(self) -> None:
        """All rows have one token more."""
        super().advance()
        self.host_counts = [count + 1 for count in self.host_counts]

    def begin(self) -> None:
        """What a step's layers have in common."""
        self.biases: dict[int | None, tuple[Tensor | None, Tensor | None]] = {}
        self.lockstep = min(self.host_counts) == max(self.host_counts)
        self.newest = min(max(self.host_counts), self.length - 1)
        while self.newest >= self.room:
            self._grow()
        self.used = min(-(-(self.newest + 1) // ROUND) * ROUND, self.room)
        self.column = self.count[: self.n].clamp(max=self.length - 1)  # where the row's next key goes

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """(n, heads, D) queries, and keys and values of the same tokens, to (n, heads, D).

        Over the prompt, with one product for all of a group's queries; over the response so far, with one for each
        row; and put together by the sums of their exponentials.
        """
        n, heads, width = query.shape
        own_keys, own_values = self.own_keys[layer], self.own_values[layer]
        for store, new in ((own_keys, key), (own_values, value)):
            if self.lockstep:
                store[:n, :, self.newest] = new
            else:
                store[self.rows[:n], :, self.column] = new.to(store.dtype)
        key_heads, longest, used = key.shape[1], max(self.lengths), self.used
        queries = (query * (width**-0.5 if scale is None else scale)).to(own_keys.dtype)
        if window not in self.biases:
            self.biases[window] = self._biases(window, longest)
        padding, behind = self.biases[window]

        scores = self._together(queries, key_heads) @ self.prompt_keys[layer][: self.groups, ..., :longest].flatten(
            0, 1
        )
        if padding is not None:
            scores.view(self.groups, key_heads, self.widest, -1, longest).add_(padding)
        first, of_first = _weighted(scores, self.prompt_values[layer][: self.groups, :, :longest].flatten(0, 1))
        first, of_first = self._apart(first, key_heads), self._apart(of_first, key_heads)

        parts = queries.reshape(n * key_heads, heads // key_heads, width)
        scores = parts @ own_keys[:n, :, :used].flatten(0, 1).transpose(1, 2)
        if behind is not None:
            scores.view(n, heads, used).add_(behind)
        own, of_own = _weighted(scores, own_values[:n, :, :used].flatten(0, 1))
        share = torch.sigmoid(of_own.view_as(of_first) - of_first)
        return torch.lerp(first, own.view_as(first), share).to(query.dtype)

    def _together(self, x: Tensor, key_heads: int) -> Tensor:
        """(n, heads, K) by group: (groups · key heads, rows · queries per key head, K)."""
        rows = x if self.members is None else x.index_select(0, self.members)
        parts = rows.reshape(self.groups, self.widest, key_heads, -1, x.shape[-1]).transpose(1, 2)
        return parts.reshape(self.groups * key_heads, -1, x.shape[-1])

    def _apart(self, x: Tensor, key_heads: int) -> Tensor:
        """The way back."""
        parts = x.view(self.groups, key_heads, self.widest, -1, x.shape[-1]).transpose(1, 2)
        rows = parts.reshape(self.groups * self.widest, -1, x.shape[-1])
        return rows if self.members is None else rows.index_select(0, self.at)

    def _biases(self, window: int | None, longest: int) -> tuple[Tensor | None, Tensor | None]:
        """What is added to the scores of prompts (by group) and of responses. The same for all layers."""
        count, own = self.column[:, None], torch.arange(self.used, device=self.rows.device)
        if window is None:
            whole = self.lockstep and self.used == self.newest + 1
            return self.padding, None if whole else self._bias(own <= count)[:, None]
        first, before = torch.arange(longest, device=own.device), self.prompt_length[:, None]
        padding = self._bias((first < before) & (before + count - first < window))
        padding = padding if self.members is None else padding.index_select(0, self.members)
        behind = self._bias((own <= count) & (count - own < window))
        return padding.view(self.groups, 1, self.widest, 1, longest), behind[:, None]

    def _bias(self, seen: Tensor) -> Tensor:
        # Not −∞: a row may see nothing of its prompt any more, and must get numbers from there, with a share of 0.
        kind = self.prompt_values[0].dtype
        return torch.zeros(seen.shape, dtype=kind, device=seen.device).masked_fill_(~seen, torch.finfo(kind).min / 2)


def _weighted(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """(…, R, K) scores to the values weighted by their softmax, (…, R, D), and log Σ exp, (…, R, 1)."""
    weights = scores.softmax(-1)  # the largest weight is 1 / Σ exp(score − largest)
    return weights @ values, scores.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log()


class SlotKeys(Keys):
    """A slot of fixed length per sequence: (slots, length, heads, D) for every layer."""

    def __init__(self, shapes: Sequence[Shape], slots: int, length: int, width: int, like: Tensor) -> None:
        super().__init__(slots, length, width, like)

        def make(of: int) -> list[Tensor]:
            return [torch.zeros((slots, length, s[0], s[of]), dtype=like.dtype, device=like.device) for s in shapes]

        self.keys, self.values = make(1), make(2)
        self.starts_q = torch.arange(slots + 1, dtype=torch.int32, device=like.device)
        self.starts_k = self.starts_q * length

    @property
    def nbytes(self) -> int:
        """Of keys and values."""
        return sum(x.nbytes for x in (*self.keys, *self.values))

    def clear(self) -> None:
        """Forget all sequences: the weights may have changed."""
        super().clear()
        self.longest = 0  # of the prompts so far

    # Who is where

    def reading(self, packed: Packed, prompts: Sequence[int], lengths: Sequence[int], rows: Sequence[int]) -> None:
        """These prompts are about to be read, packed, each into a row that will be a sequence of its."""
        self.home.update(zip(prompts, rows, strict=True))
        self.longest = max(self.longest, *lengths)
        row, position = self._of_tokens(packed, rows, lengths)
        self.target = row * self.length + position

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """The keys of packed prompt tokens, (heads, L, D)."""
        for store, new in ((self.keys, key), (self.values, value)):
            store[layer].flatten(0, 1).index_copy_(0, self.target, new.transpose(0, 1))

    def join(self, rows: Sequence[int], prompts: Sequence[int]) -> Tensor:
        """Sequences take these rows; their prompts have been read, and are copied from where they are."""
        self.prompt_of.update(zip(rows, prompts, strict=True))
        pairs = [(self.home[p], row) for row, p in zip(rows, prompts, strict=True) if self.home[p] != row]
        parts = [x[:, : self.longest] for x in (*self.keys, *self.values)]
        _move([self.states, *parts], [a for a, _ in pairs], [b for _, b in pairs])
        return self.states[send(list(rows), self.states.device)]

    def leave(self, rows: Sequence[int]) -> None:
        """Sequences have ended. A prompt is known as long as a sequence of its is there to copy from."""
        for row in rows:
            del self.prompt_of[row]
        self.home = {prompt: row for row, prompt in self.prompt_of.items()}

    def move(self, sources: Sequence[int], rows: Sequence[int]) -> None:
        """Sequences go to other rows, which are free."""
        for a, b in zip(sources, rows, strict=True):
            self.prompt_of[b] = self.prompt_of.pop(a)
        self.home = {prompt: row for row, prompt in self.prompt_of.items()}
        _move([self.states, *self.keys, *self.values], sources, rows)

    # Attention

    def begin(self) -> None:
        """What a step's layers have in common: where the newest keys go, and how many of a slot's are in use."""
        position = self.position[: self.n]
        self.newest, self.used = self.rows[: self.n] * self.length + position, (position + 1).to(torch.int32)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """(n, heads, D) queries, and keys and values of the same tokens, to (n, heads, D)."""
        n, keys, values = len(query), self.keys[layer][: self.n], self.values[layer][: self.n]
        if _triton.suits(query):
            from poise.engines.native import kernels

            if kernels.suits(query, keys):
                return kernels.attend(query, key, value, keys, values, self.used, scale, window)
        for store, new in ((keys, key), (values, value)):
            store.flatten(0, 1).index_copy_(0, self.newest, new)
        starts = self.starts_q[: n + 1], self.starts_k[: n + 1]
        return over_slots(query, keys, values, *starts, self.used, scale, window)


def _move(tensors: Sequence[Tensor], sources: Sequence[int], rows: Sequence[int]) -> None:
    """Copy rows onto others, none of which is a source of a later copy."""
    if not rows:
        return
    device = tensors[0].device
    a, b = send(list(sources), device), send(list(rows), device)
    for tensor in tensors:
        tensor[b] = tensor[a]
