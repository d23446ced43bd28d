"""Responses laid end to end without padding, each prompt once: which go into one pass, and how they lie in it.

A *segment* is a run of packed tokens that attends to itself, causally, and before that to a *prefix*: the prompt that
several responses share. So a prompt with one response is one segment together with it; a prompt with several is a
segment by itself, and the prefix of its responses'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from poise._lib.transfer import send
from poise.rollout.types import Rollouts


def pack(rollouts: Rollouts, rows: Sequence[int], tokens: int) -> list[list[int]]:
    """The given rows in bins of at most ``tokens`` tokens, by first-fit decreasing; a single response may take more.

    A prompt counts once for all its responses in a bin. Groups stay together unless one is too large by itself.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for row in rows:
        groups.setdefault(tuple(rollouts.prompts[row]), []).append(row)
    lengths = rollouts.lengths
    items: list[tuple[int, list[int]]] = []
    for prompt, own in groups.items():
        parts = first_fit([lengths[row] for row in own], tokens - len(prompt))
        items += [(len(prompt) + sum(lengths[own[i]] for i in part), [own[i] for i in part]) for part in parts]
    bins = first_fit([cost for cost, _ in items], tokens)
    return [[row for i in part for row in items[i][1]] for part in bins]


def first_fit(costs: Sequence[int], capacity: int) -> list[list[int]]:
    """Item numbers in bins: from the largest item down, each into the first bin with room, in a new one otherwise."""
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        place = next((i for i, left in enumerate(room) if costs[item] <= left), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(capacity)
        bins[place].append(item)
        room[place] -= costs[item]
    return [sorted(part) for part in bins]


@dataclass(eq=False)
class Packed:
    """One bin: L packed tokens, and what each attends to. Index tensors are on the device of the tokens."""

    ids: Tensor  # (1, L)
    positions: Tensor  # (1, L) of each token in its own sequence
    places: Tensor  # (n,) the packed token that predicts each response token, in row order
    keys: Tensor | None  # (K,) packed tokens that are the segments' keys, one after another; None: all, as they lie
    starts_q: Tensor  # (S + 1,) int32: where the segments' queries begin and end
    starts_k: Tensor  # (S + 1,) int32: likewise their keys
    longest_q: int
    longest_k: int
    segments: Segments

    @cached_property
    def padded(self) -> Padded:
        """The same segments as rectangles, for attention that knows no variable lengths."""
        return Padded(self.segments, self.ids.device)


@dataclass(frozen=True, eq=False)
class Segments:
    """(S,) each, on the host. The queries of all segments, one after another, are the packed tokens."""

    start: Tensor
    length: Tensor
    prefix: Tensor  # the number of the segment that is attended to first, or −1
    prefix_length: Tensor  # 0 where there is none


def layout(rollouts: Rollouts) -> Packed:
    """Pack all rows into one sequence: each prompt, and behind it the responses to it, without their last tokens.

    Everything is worked out on the host from the lengths, and goes to the device in two transfers.
    """
    numbers: dict[tuple[int, ...], int] = {}
    prompt_of = torch.tensor([numbers.setdefault(tuple(prompt), len(numbers)) for prompt in rollouts.prompts])
    width = rollouts.mask.shape[1]
    prompt, response = torch.tensor([len(p) for p in numbers]), torch.tensor(rollouts.lengths)
    if int(prompt.min()) == 0:
        raise ValueError("layout: an empty prompt predicts nothing")
    alone = torch.bincount(prompt_of) == 1

    # Pieces in packed order: a prompt (row −1), then its responses.
    order = prompt_of.argsort(stable=True)
    group = torch.cat([torch.arange(len(numbers)), prompt_of[order]])
    row = torch.cat([torch.full((len(numbers),), -1), order])
    behind = group.argsort(stable=True)
    group, row = group[behind], row[behind]
    is_prompt = row < 0
    length = torch.where(is_prompt, prompt[group], (response - 1).clamp(min=0)[row])
    start = length.cumsum(0) - length
    prompt_start = start[is_prompt]
    response_start = torch.empty_like(response)
    response_start[row[~is_prompt]] = start[~is_prompt]

    piece, offset = ragged(length)
    prompt_text = torch.tensor([token for p in numbers for token in p])
    first = torch.where(is_prompt, (prompt.cumsum(0) - prompt)[group], row * width + len(prompt_text))
    source = first[piece] + offset
    position = torch.where(is_prompt, 0, prompt[group])[piece] + offset
    owner, number = ragged(response)
    last_of_prompt = (prompt_start + prompt - 1)[prompt_of]
    place = torch.where(number == 0, last_of_prompt[owner], response_start[owner] + number - 1)

    segments = _segments(group, is_prompt, alone, start, length, prompt)
    keys, starts_q, starts_k = _keys(segments)
    device = rollouts.tokens.device
    indices = [prompt_text, source, position, place, keys]
    starts = torch.stack([starts_q, starts_k]).to(torch.int32)
    text, source, position, place, keys = send(torch.cat(indices), device).split([len(x) for x in indices])
    device_starts = send(starts, device)
    return Packed(
        ids=torch.cat([text, rollouts.tokens.flatten()])[source][None],
        positions=position[None],
        places=place,
        keys=keys if len(keys) else None,
        starts_q=device_starts[0],
        starts_k=device_starts[1],
        longest_q=int(starts[0].diff().max()),
        longest_k=int(starts[1].diff().max()),
        segments=segments,
    )


def layout_prompts(prompts: Sequence[Sequence[int]], device: torch.device) -> Packed:
    """Pack different prompts by themselves; ``places`` are their last tokens."""
    one = torch.ones((len(prompts), 1), dtype=torch.bool, device=device)
    zero = torch.zeros_like(one, dtype=torch.long)
    alone = Rollouts(
        [list(prompt) for prompt in prompts], zero, one, zero, zero, one[:, 0], extents=[(1, 1)] * len(prompts)
    )
    return layout(alone)


def ragged(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """For rows of the given lengths, end to end: the row of each entry, and its number in it."""
    owner = torch.repeat_interleave(lengths)
    return owner, torch.arange(len(owner)) - (lengths.cumsum(0) - lengths)[owner]


def _segments(
    group: Tensor, is_prompt: Tensor, alone: Tensor, start: Tensor, length: Tensor, prompt: Tensor
) -> Segments:
    """The pieces that have queries; a prompt's only response is one segment with it."""
    own = is_prompt & alone[group]  # such a prompt's response is the very next piece
    whole = length.clone()
    whole[own] += length[own.roll(1)]
    kept = is_prompt | (~alone[group] & (length > 0))
    number = kept.cumsum(0) - 1
    prefix = torch.where(is_prompt, -1, number[is_prompt][group])
    prefix_length = torch.where(is_prompt, 0, prompt[group])
    return Segments(*(x[kept] for x in (start, whole, prefix, prefix_length)))


def _keys(segments: Segments) -> tuple[Tensor, Tensor, Tensor]:
    """The packed tokens that are keys (none listed where they are all tokens, once), and both cumulative lengths."""
    both = segments.prefix_length + segments.length
    starts_q, starts_k = (torch.nn.functional.pad(x.cumsum(0), (1, 0)) for x in (segments.length, both))
    if not segments.prefix_length.any():
        return torch.empty(0, dtype=torch.long), starts_q, starts_k
    owner, number = ragged(both)
    before = segments.prefix_length[owner]
    prefix_start = segments.start[segments.prefix.clamp(min=0)][owner]
    keys = torch.where(number < before, prefix_start + number, segments.start[owner] + number - before)
    return keys, starts_q, starts_k


class Padded:
    """The segments as rectangles: those of like length together, padded on the right.

    Causality keeps padded keys out of sight of every real query, so only prefixes of different lengths need masking.
    The first rectangle holds the segments that are prefixes, where there are any.
    """

    def __init__(self, segments: Segments, device: torch.device) -> None:
        row_of = torch.full_like(segments.start, -1)
        is_prefix = torch.zeros_like(row_of, dtype=torch.bool)
        is_prefix[segments.prefix[segments.prefix >= 0]] = True
        parts = [is_prefix.nonzero()[:, 0]] if is_prefix.any() else []
        for kind in (~is_prefix & (segments.prefix < 0), segments.prefix >= 0):
            parts += _alike(kind.nonzero()[:, 0], segments.length)
        self.rectangles: list[Rectangle] = []
        index, slots, begin = [], torch.empty(int(segments.length.sum()), dtype=torch.long), 0
        for part in parts:
            start, length = segments.start[part], segments.length[part]
            column = torch.arange(int(length.max()))
            packed = start[:, None] + torch.minimum(column, length[:, None] - 1)
            real = column < length[:, None]
            slots[packed[real]] = begin + real.flatten().nonzero()[:, 0]
            index.append(packed.flatten())
            begin += packed.numel()
            row_of[part] = torch.arange(len(part))
            prefix, longest = segments.prefix_length[part], int(segments.prefix_length[part].max())
            rows = row_of[segments.prefix[part]] if longest else prefix
            self.rectangles.append(Rectangle(len(part), len(column), send(rows, device), send(prefix, device), longest))
        self.index = send(torch.cat(index), device)  # the packed token in each slot; some token in padding
        self.slots = send(slots, device)  # (L,) the slot of each packed token


def _alike(part: Tensor, lengths: Tensor) -> list[Tensor]:
    """Segments by length, in parts within which it differs by a third at most: little padding, few calls."""
    order = part[lengths[part].argsort(descending=True, stable=True)]
    parts: list[list[int]] = []
    widest = 0
    for segment, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        if not parts or 3 * length < 2 * widest:
            parts.append([])
            widest = length
        parts[-1].append(segment)
    return [torch.tensor(segments) for segments in parts]


@dataclass(eq=False)
class Rectangle:
    """Segments of like length."""

    rows: int
    width: int
    prefix: Tensor  # (rows,) the row of the prefix in the first rectangle
    prefix_length: Tensor  # (rows,); all 0 where there is none
    longest_prefix: int
    masks: dict[tuple[int | None, torch.dtype], Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """What is added to the scores, made once for all layers; None: plain causal."""
        if (window, dtype) not in self.masks:
            self.masks[window, dtype] = self._mask(window, dtype)
        return self.masks[window, dtype]

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        if self.longest_prefix == 0 and (window is None or window >= self.width):
            return None
        column = torch.arange(self.width, device=self.prefix.device)
        key = torch.arange(self.longest_prefix, device=self.prefix.device)
        length = self.prefix_length[:, None, None]
        back = (column[:, None] - column)[None]
        own = back >= 0
        before = (key < length).expand(-1, self.width, -1)
        if window is not None:
            own = own & (back < window)
            before = before & (length + column[:, None] - key < window)
        allowed = torch.cat([before, own.expand(self.rows, -1, -1)], 2) if self.longest_prefix else own
        bias = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        return bias.masked_fill_(~allowed, -torch.inf)[:, None]
