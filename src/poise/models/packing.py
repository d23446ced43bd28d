"""Packed sequences: responses end to end without padding, each prompt once.

``pack`` chooses the responses of one forward pass; ``layout`` arranges their tokens.

A *segment* is a run of packed tokens that attend causally to each other. If several responses share a prompt, the
prompt and each response are separate segments. The prompt is then the *prefix* of the responses' segments, and their
tokens also attend to all prompt tokens. A prompt with a single response forms one segment with it.

Shapes: B responses, T response tokens (padded), P distinct prompts, I pieces (a piece is a prompt or a response), L
packed tokens, S segments, K keys, N response tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from poise._lib.device import send
from poise.batch import Extent, Prompt, TokenBatch


def extents_of(batch: TokenBatch) -> Sequence[Extent]:
    """The batch's extents. Raises ValueError if the batch has none."""
    if batch.extents is None:
        raise ValueError("this pass needs TokenBatch.extents: build the batch with make_batch or padded_batch")
    return batch.extents


def pack(batch: TokenBatch, rows: Sequence[int], tokens: int) -> list[list[int]]:
    """Distribute rows over bins of at most ``tokens`` tokens, first-fit decreasing.

    Only a bin with a single response may exceed the limit. A prompt counts once per bin. A group stays in one bin
    unless it is too large.
    """
    extents = extents_of(batch)
    groups: dict[Prompt, list[int]] = {}
    for row in rows:
        groups.setdefault(extents[row].prompt, []).append(row)
    items: list[tuple[int, list[int]]] = []  # cost, rows
    for prompt, members in groups.items():
        for part in first_fit([extents[row].length for row in members], tokens - len(prompt.tokens)):
            together = [members[i] for i in part]
            items.append((len(prompt.tokens) + sum(extents[row].length for row in together), together))
    bins = first_fit([cost for cost, _ in items], tokens)
    return [[row for i in part for row in items[i][1]] for part in bins]


def tokens_in(batch: TokenBatch, rows: Sequence[int]) -> int:
    """The number of tokens in a pass over these rows, each prompt counted once."""
    extents = [extents_of(batch)[row] for row in rows]
    prompts = {extent.prompt for extent in extents}
    return sum(extent.length for extent in extents) + sum(len(prompt.tokens) for prompt in prompts)


def own_tokens(batch: TokenBatch) -> Tensor:
    """(N,) flat indices into (B, T) of the model's own tokens, row after row."""
    places = response_tokens(batch)
    has_holes = any(extent.length != extent.own for extent in extents_of(batch))
    return places[batch.mask.flatten()[places]] if has_holes else places


def response_tokens(batch: TokenBatch) -> Tensor:
    """(N,) flat indices into (B, T) of all response tokens, including the environment's.

    The host does not wait for the device.
    """
    lengths = [extent.length for extent in extents_of(batch)]
    count_B, total = send(lengths, batch.mask.device), sum(lengths)
    row_N = torch.repeat_interleave(count_B, output_size=total)
    first_B = torch.arange(len(count_B), device=row_N.device) * batch.mask.shape[1] - (count_B.cumsum(0) - count_B)
    return first_B[row_N] + torch.arange(total, device=row_N.device)


def first_fit(costs: Sequence[int], capacity: int) -> list[list[int]]:
    """Distribute items over bins: largest item first, each into the first bin with room, else into a new bin."""
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        number = next((i for i, left in enumerate(room) if costs[item] <= left), len(bins))
        if number == len(bins):
            bins.append([])
            room.append(capacity)
        bins[number].append(item)
        room[number] -= costs[item]
    return [sorted(part) for part in bins]


@dataclass(eq=False)
class Packed:
    """One forward pass: the packed tokens and their attention layout. Index tensors are on the tokens' device."""

    ids: Tensor  # (1, L)
    positions: Tensor  # (1, L) of each token in its own sequence
    places: Tensor  # (N,) index of the packed token that predicts each response token, in row order
    keys: Tensor | None  # (K,) packed tokens that serve as keys, segment after segment; None: all tokens, in order
    starts_q: Tensor  # (S + 1,) int32: boundaries of the segments' queries
    starts_k: Tensor  # (S + 1,) int32: boundaries of the segments' keys
    longest_q: int
    longest_k: int
    segments: Segments
    # (S,) on the host: number of keys that an engine's cache already holds for each segment's sequence; None: no cache
    cached_S: Tensor | None = None

    @cached_property
    def padded(self) -> Padded:
        """The segments as padded rectangles, for attention without variable lengths."""
        return Padded(self.segments, self.ids.device)


@dataclass(frozen=True, eq=False)
class Segments:
    """(S,) tensors on the host. Segments follow each other without gaps and together cover all packed tokens."""

    start: Tensor
    length: Tensor
    prefix: Tensor  # number of the segment that is the prefix, or −1
    prefix_length: Tensor  # 0 without a prefix


def layout(batch: TokenBatch) -> Packed:
    """Pack all rows into one sequence: each prompt, followed by its responses without their last tokens.

    A response's last token predicts nothing, so it is not packed. Rows 0 and 1 share the prompt ``a b c``; their
    responses are ``x y z`` and ``u v``. Row 2 has the prompt ``p q`` and the response ``r s t``:

        packed token    0  1  2 | 3  4 | 5 | 6  7  8  9     L = 10
        ids             a  b  c | x  y | u | p  q  r  s
        positions       0  1  2 | 3  4 | 3 | 0  1  2  3     a response continues its prompt
        segment         0  0  0 | 1  1 | 2 | 3  3  3  3     S = 4; row 2 is one segment with its prompt
        prefix             -    |   0  | 0 |     -
        predicts              x | y  z | v |    r  s  t
                              u                             one prompt token predicts the first token of both rows

        places          2 3 4 | 2 5 | 7 8 9                 predictors of x y z | u v | r s t
        keys            0 1 2 | 0 1 2 3 4 | 0 1 2 5 | 6 7 8 9
        starts_q        0 3 5 6 10
        starts_k        0 3 8 12 16

    The host computes all indices from the lengths and sends them to the device in two transfers.
    """
    assert batch.targets is not None
    extents = extents_of(batch)
    return _layout([extent.prompt for extent in extents], [extent.length for extent in extents], batch.targets)


def layout_prompts(prompts: Sequence[Prompt], device: torch.device) -> Packed:
    """Pack distinct prompts without responses; ``places`` holds the indices of their last tokens."""
    return _layout(prompts, [1] * len(prompts), torch.zeros((len(prompts), 1), dtype=torch.long, device=device))


def _layout(prompts: Sequence[Prompt], lengths: Sequence[int], tokens_BT: Tensor) -> Packed:
    prompt_numbers: dict[Prompt, int] = {}
    prompt_B = torch.tensor([prompt_numbers.setdefault(prompt, len(prompt_numbers)) for prompt in prompts])
    prompt_length_P = torch.tensor([len(prompt.tokens) for prompt in prompt_numbers])
    response_length_B = torch.tensor(lengths)
    if int(prompt_length_P.min()) == 0:
        raise ValueError("layout: an empty prompt predicts nothing")
    pieces = _pieces(prompt_B, prompt_length_P, response_length_B)
    segments = _segments(pieces, prompt_length_P, single_P=torch.bincount(prompt_B) == 1)
    keys_K, starts_q, starts_k = _keys(segments)

    # The token ids come from one flat tensor: the tokens of all prompts, then the (B, T) responses.
    prompt_text = torch.tensor([token for prompt in prompt_numbers for token in prompt.tokens])
    prompt_first_P = prompt_length_P.cumsum(0) - prompt_length_P
    row_first_I = pieces.row * tokens_BT.shape[1] + len(prompt_text)
    first_I = torch.where(pieces.is_prompt, prompt_first_P[pieces.prompt], row_first_I)
    piece_L, offset_L = ragged(pieces.length)
    source_L = first_I[piece_L] + offset_L
    position_L = torch.where(pieces.is_prompt, 0, prompt_length_P[pieces.prompt])[piece_L] + offset_L
    place_N = _places(pieces, prompt_B, prompt_length_P, response_length_B)

    device = tokens_BT.device
    indices = [prompt_text, source_L, position_L, place_N, keys_K]
    starts = torch.stack([starts_q, starts_k]).to(torch.int32)
    prompt_text, source_L, position_L, place_N, keys_K = send(torch.cat(indices), device).split(list(map(len, indices)))
    device_starts = send(starts, device)
    return Packed(
        ids=torch.cat([prompt_text, tokens_BT.flatten()])[source_L][None],
        positions=position_L[None],
        places=place_N,
        keys=keys_K if len(keys_K) else None,
        starts_q=device_starts[0],
        starts_k=device_starts[1],
        longest_q=int(starts[0].diff().max()),
        longest_k=int(starts[1].diff().max()),
        segments=segments,
    )


def layout_group(prompt: Prompt, lengths: Sequence[int], device: torch.device) -> Packed:
    """Pack responses of these lengths to one prompt. All response tokens have id 0."""
    tokens_BT = torch.zeros((len(lengths), max(lengths)), dtype=torch.long, device=device)
    return _layout([prompt] * len(lengths), lengths, tokens_BT)


def layout_continued(texts: Sequence[Sequence[int]], cached: Sequence[int], device: torch.device) -> Packed:
    """Pack texts that each continue a sequence; an engine's cache holds ``cached`` keys of each sequence.

    Unlike prompts, texts may be equal. ``places`` holds the indices of their last tokens.
    """
    length_S, cached_S = torch.tensor([len(text) for text in texts]), torch.tensor(cached)
    owner_L, offset_L = ragged(length_S)
    starts = torch.nn.functional.pad(length_S.cumsum(0), (1, 0))
    indices = [torch.tensor([token for text in texts for token in text]), cached_S[owner_L] + offset_L, starts[1:] - 1]
    ids_L, position_L, place_S = send(torch.cat(indices), device).split(list(map(len, indices)))
    starts_q, longest = send(starts.to(torch.int32), device), int(length_S.max())
    no_prefix = Segments(starts[:-1], length_S, torch.full_like(length_S, -1), torch.zeros_like(length_S))
    return Packed(
        ids_L[None], position_L[None], place_S, None, starts_q, starts_q, longest, longest, no_prefix, cached_S=cached_S
    )


def ragged(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Each entry's row, and its index in that row, for rows of these lengths laid end to end."""
    owner = torch.repeat_interleave(lengths)
    return owner, torch.arange(len(owner)) - (lengths.cumsum(0) - lengths)[owner]


class _Pieces(NamedTuple):
    """(I,) tensors in packed order: a prompt, its responses, the next prompt, …"""

    prompt: Tensor  # number of the prompt
    row: Tensor  # row of the response; −1 for a prompt
    is_prompt: Tensor
    start: Tensor
    length: Tensor  # without a response's last token


def _pieces(prompt_B: Tensor, prompt_length_P: Tensor, response_length_B: Tensor) -> _Pieces:
    count = len(prompt_length_P)
    rows = prompt_B.argsort(stable=True)
    prompt_I = torch.cat([torch.arange(count), prompt_B[rows]])
    row_I = torch.cat([torch.full((count,), -1), rows])
    order = prompt_I.argsort(stable=True)  # stable: a prompt comes before its responses
    prompt_I, row_I = prompt_I[order], row_I[order]
    is_prompt_I = row_I < 0
    length_I = torch.where(is_prompt_I, prompt_length_P[prompt_I], (response_length_B - 1).clamp(min=0)[row_I])
    return _Pieces(prompt_I, row_I, is_prompt_I, length_I.cumsum(0) - length_I, length_I)


def _places(pieces: _Pieces, prompt_B: Tensor, prompt_length_P: Tensor, response_length_B: Tensor) -> Tensor:
    """(N,) the packed position before each response token: the prompt's last token or the previous response token."""
    prompt_start_P = pieces.start[pieces.is_prompt]
    response_start_B = torch.empty_like(response_length_B)
    response_start_B[pieces.row[~pieces.is_prompt]] = pieces.start[~pieces.is_prompt]
    prompt_last_B = (prompt_start_P + prompt_length_P - 1)[prompt_B]
    row_N, number_N = ragged(response_length_B)
    return torch.where(number_N == 0, prompt_last_B[row_N], response_start_B[row_N] + number_N - 1)


def _segments(pieces: _Pieces, prompt_length_P: Tensor, single_P: Tensor) -> Segments:
    """One segment per piece that has tokens. A prompt in ``single_P`` forms one segment with its only response."""
    single_I = single_P[pieces.prompt]
    with_response_I = pieces.is_prompt & single_I  # the response is the next piece
    length_I = pieces.length.clone()
    length_I[with_response_I] += pieces.length[with_response_I.roll(1)]
    is_segment_I = pieces.is_prompt | (~single_I & (pieces.length > 0))
    number_I = is_segment_I.cumsum(0) - 1
    prefix_I = torch.where(pieces.is_prompt, -1, number_I[pieces.is_prompt][pieces.prompt])
    prefix_length_I = torch.where(pieces.is_prompt, 0, prompt_length_P[pieces.prompt])
    return Segments(*(x[is_segment_I] for x in (pieces.start, length_I, prefix_I, prefix_length_I)))


def _keys(segments: Segments) -> tuple[Tensor, Tensor, Tensor]:
    """The packed tokens that are keys (empty: all tokens in order), and the boundaries of queries and of keys."""
    key_count_S = segments.prefix_length + segments.length
    starts_q, starts_k = (torch.nn.functional.pad(x.cumsum(0), (1, 0)) for x in (segments.length, key_count_S))
    if not segments.prefix_length.any():
        return torch.empty(0, dtype=torch.long), starts_q, starts_k
    segment_K, number_K = ragged(key_count_S)
    prefix_length_K = segments.prefix_length[segment_K]
    prefix_start_K = segments.start[segments.prefix.clamp(min=0)][segment_K]
    own_K = segments.start[segment_K] + number_K - prefix_length_K
    return torch.where(number_K < prefix_length_K, prefix_start_K + number_K, own_K), starts_q, starts_k


class Padded:
    """The segments in rectangles. Each rectangle has segments of similar length, padded on the right.

    Causal attention hides padded keys from every real query, so only prefixes of different lengths need a mask. If
    there are prefixes, they are in the first rectangle. A *slot* is a position in a rectangle; slots are numbered
    across all rectangles.
    """

    def __init__(self, segments: Segments, device: torch.device) -> None:
        row_S = torch.full_like(segments.start, -1)  # the segment's row in its rectangle
        is_prefix_S = torch.zeros_like(row_S, dtype=torch.bool)
        is_prefix_S[segments.prefix[segments.prefix >= 0]] = True
        parts = [is_prefix_S.nonzero()[:, 0]] if is_prefix_S.any() else []
        for members in (~is_prefix_S & (segments.prefix < 0), segments.prefix >= 0):
            parts += _by_length(members.nonzero()[:, 0], segments.length)
        self.rectangles: list[Rectangle] = []
        index, slot_L, begin = [], torch.empty(int(segments.length.sum()), dtype=torch.long), 0
        for part in parts:
            start, length = segments.start[part], segments.length[part]
            column = torch.arange(int(length.max()))
            token = start[:, None] + torch.minimum(column, length[:, None] - 1)  # (rows, width)
            is_real = column < length[:, None]
            slot_L[token[is_real]] = begin + is_real.flatten().nonzero()[:, 0]
            index.append(token.flatten())
            begin += token.numel()
            row_S[part] = torch.arange(len(part))
            prefix, longest = segments.prefix_length[part], int(segments.prefix_length[part].max())
            rows = row_S[segments.prefix[part]] if longest else prefix
            self.rectangles.append(Rectangle(len(part), len(column), send(rows, device), send(prefix, device), longest))
        self.index = send(torch.cat(index), device)  # (slots,) the packed token in each slot; any token in padding
        self.slots = send(slot_L, device)  # (L,) the slot of each packed token


def _by_length(part: Tensor, lengths: Tensor) -> list[Tensor]:
    """Sort segments by length and divide them into groups: little padding, few calls.

    A new group starts at a segment shorter than two thirds of the group's longest.
    """
    order = part[lengths[part].argsort(descending=True, stable=True)]
    parts: list[list[int]] = []
    longest = 0
    for segment, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        if not parts or 3 * length < 2 * longest:
            parts.append([])
            longest = length
        parts[-1].append(segment)
    return [torch.tensor(segments) for segments in parts]


@dataclass(eq=False)
class Rectangle:
    """Segments of similar length, padded to ``width``."""

    rows: int
    width: int
    prefix: Tensor  # (rows,) row of the prefix in the first rectangle
    prefix_length: Tensor  # (rows,) all 0 without prefixes
    longest_prefix: int
    masks: dict[tuple[int | None, torch.dtype], Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """The mask (rows or 1, 1, width, longest_prefix + width) to add to attention scores, the same for all layers.

        None means plain causal attention.
        """
        if (window, dtype) not in self.masks:
            self.masks[window, dtype] = self._mask(window, dtype)
        return self.masks[window, dtype]

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        if self.longest_prefix == 0 and (window is None or window >= self.width):
            return None
        column = torch.arange(self.width, device=self.prefix.device)
        key = torch.arange(self.longest_prefix, device=self.prefix.device)
        length = self.prefix_length[:, None, None]
        distance = (column[:, None] - column)[None]
        own = distance >= 0
        before = (key < length).expand(-1, self.width, -1)
        if window is not None:
            own = own & (distance < window)
            before = before & (length + column[:, None] - key < window)
        allowed = torch.cat([before, own.expand(self.rows, -1, -1)], 2) if self.longest_prefix else own
        bias = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        return bias.masked_fill_(~allowed, -torch.inf)[:, None]
