"""How one token's gradient at the head moves another token: NTHR's scores, exact over the full vocabulary.

Take two tokens k and k' with hidden states h, sampled tokens y and next-token distributions π. The inner product of the
gradients of their log-probabilities with respect to the head is ``⟨e_y − π, e_y' − π'⟩ · ⟨h, h'⟩``. Its sum over the
tokens k of a group's correct responses is the score of k' (arXiv 2505.18830, equation of s⁻).

There are two ways to compute the sum for N tokens, of which N⁺ belong to correct responses:

- pair: every pair (k, k'). One pass over the vocabulary, ``2·N·V·(d + N⁺)`` FLOP: products of exponentials are summed
  before the normalisers are known, as in flash attention, and divided by them at the end;
- linear: with ``G = Σ_k (e_y − π) hᵀ`` (V × d) the score of k' is ``(e_y' − π')ᵀ G h'``. Two passes, since G needs the
  normalisers: ``6·N·V·d`` FLOP.

So the pair form is cheaper if N⁺ ≤ 2·d. Both forms process the vocabulary in slices: neither G nor any tokens ×
vocabulary tensor is ever complete in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from types import ModuleType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from poise._lib import device as _device
from poise._lib.device import accumulator, multiply, send
from poise._lib.errors import check_choice
from poise.head import influence_elementwise as in_torch
from poise.head.influence_elementwise import Rows, stored
from poise.lm_head import Head, HeadLike, as_head

Form = Literal["auto", "pair", "linear"]


class Scores(NamedTuple):
    """The scores of a group's tokens against its correct responses."""

    negative: Tensor  # (N⁻,) the score s⁻ of each token of the incorrect responses
    positive: Tensor  # (n⁺,) the mean score s̄⁺ over the tokens of each correct response


def default_block(device: torch.device, tokens: int, vocabulary: int) -> int:
    """Elements of the largest temporary tensor: on a CPU 4 MiB in float32, on a GPU 32 to 64 MiB in bfloat16."""
    return 1 << 20 if device.type == "cpu" else min(max(tokens * vocabulary // 5, 1 << 24), 1 << 25)


def cheaper_form(positive: int, width: int) -> Form:
    """The form that takes fewer FLOP for N⁺ = ``positive`` tokens of correct responses."""
    return "pair" if positive <= 2 * width else "linear"


@torch.no_grad()
def group_scores(
    head: HeadLike,
    hidden: Tensor,
    targets: Tensor,
    groups: Sequence[Sequence[int]],
    *,
    self_inclusive: bool = False,
    form: Form = "auto",
    block: int | None = None,
    half: bool | None = None,
) -> Scores:
    """Score the tokens of incorrect responses, and each correct response, against the group's correct responses.

    Each entry of ``groups`` lists the number of tokens of each correct response and, last, of all incorrect responses
    together. ``hidden`` (N, d), ``targets`` (N,) and the returned scores have the tokens in this order, group by group.
    A correct response is not scored against itself, unless ``self_inclusive`` is True. ``block`` is the
    number of elements of the largest temporary tensor (``default_block``). The host never waits for the device.

    On a GPU, half-precision hidden states stay half precision in matrix products, which accumulate in float32;
    everything between the products is float32. On a CPU they are converted to float32. ``half`` overrides the choice.
    """
    check_choice("scores", "form", form, ("auto", "pair", "linear"))
    head = as_head(head)
    if not isinstance(head, Head):
        raise TypeError("scores: a head that is an opaque callable cannot be sliced: pass its weight, or a poise.Head")
    if half is None:
        half = hidden.is_cuda and hidden.element_size() == 2
    if not half:
        hidden = hidden.to(accumulator(hidden.dtype))
    counts = send([count for group in groups for count in group], hidden.device)
    owner = torch.repeat_interleave(counts, output_size=len(hidden))  # (N,) the response of each token
    rows = Rows.start(hidden)  # for all groups at once: fewer launches on a GPU
    sums, correct, wrong, begin, first = [], [], [], 0, 0
    with torch.cuda.device_of(hidden):  # Triton launches on the current device; does nothing on a CPU
        for *lengths, rest in groups:
            tokens = slice(begin, begin + sum(lengths) + rest)
            group = _Group(hidden[tokens], targets[tokens], owner[tokens], lengths, rows.part(tokens))
            sums.append(_sums(head, group, self_inclusive, form, block))
            correct.append(slice(first, first + len(lengths)))
            wrong.append(slice(tokens.stop - rest, tokens.stop))
            begin, first = tokens.stop, first + len(lengths) + 1
    token_scores = torch.cat(sums)
    means = torch.segment_reduce(token_scores, "sum", lengths=counts, unsafe=True) / counts
    return Scores(torch.cat([token_scores[i] for i in wrong]), torch.cat([means[i] for i in correct]))


class _Group(NamedTuple):
    hidden: Tensor  # (N, d) correct responses first
    targets: Tensor  # (N,)
    owner: Tensor  # (N,) the number of the token's correct response; one number for all incorrect responses
    lengths: list[int]  # of the correct responses
    rows: Rows  # before the first slice


def _sums(head: Head, group: _Group, self_inclusive: bool, form: Form, block: int | None) -> Tensor:
    """(N,) token scores. For a correct response only their sum is valid: the linear form stores it at one token."""
    if form == "auto":
        form = cheaper_form(sum(group.lengths), group.hidden.shape[1])
    block = block or default_block(group.hidden.device, len(group.hidden), head.vocabulary)
    return (_linear if form == "linear" else _pair)(head, group, self_inclusive, block)


def _pair(head: Head, group: _Group, self_inclusive: bool, block: int) -> Tensor:
    hidden, targets, owner, lengths, rows = group
    n_positive, exact = sum(lengths), accumulator(hidden.dtype)
    if not n_positive:
        return hidden.new_zeros(len(hidden), dtype=exact)
    steps = _steps(hidden)
    pairs = hidden.new_empty(n_positive, len(hidden), dtype=exact)
    for start, raw in _products(head, hidden, _width(block, len(hidden))):
        shrink = steps.walk(raw, head, start, targets, rows, update=True, write=True)
        values = stored(raw)
        if start:
            steps.rescale(pairs, shrink[:n_positive], shrink)
        multiply(pairs, values[:n_positive], values.T, add=start > 0)
    del raw, values  # free the slice's memory for the next step

    at_targets = head.weight[targets].to(hidden.dtype)
    added = []  # what the tokens of each part add to the scores of all tokens
    for part in _blocks(n_positive, max(1, block // (4 * len(hidden)))):
        products = pairs.new_empty(part.stop - part.start, len(hidden))
        multiply(products, hidden[part], hidden.T)
        left_at_right, right_at_left = hidden[part] @ at_targets.T, at_targets[part] @ hidden.T
        added.append(
            steps.columns(
                pairs[part], products, left_at_right, right_at_left, head, targets, owner, rows, part.start,
                self_inclusive,
            )
        )  # fmt: skip
    return torch.stack(added).sum(0)


def _linear(head: Head, group: _Group, self_inclusive: bool, block: int) -> Tensor:
    hidden, targets, _, lengths, rows = group
    steps, n_positive = _steps(hidden), sum(lengths)
    for start, raw in _products(head, hidden, _width(block, len(hidden))):
        steps.walk(raw, head, start, targets, rows, update=True, write=False)
    del raw

    exact = accumulator(hidden.dtype)
    correct = hidden[:n_positive].to(_operand(hidden)).split(lengths)
    rest = hidden[n_positive:].to(exact)
    pulled, positive = torch.zeros_like(rest), rest.new_zeros(len(lengths))
    wider = torch.finfo(exact).bits // torch.finfo(hidden.dtype).bits  # an element of G_i is wider than one of h
    width = _width(block, max(len(hidden), wider * len(lengths) * hidden.shape[1]))
    parts = hidden.new_empty(len(lengths), min(width, head.vocabulary), hidden.shape[1], dtype=exact)
    for start, raw in _products(head, hidden, width):
        steps.walk(raw, head, start, targets, rows, update=False, write=True)
        errors = stored(raw)  # π − e_y
        slices = parts[:, : raw.shape[1]]  # a slice of −G_i for each correct response i
        for e, h, out in zip(errors[:n_positive].split(lengths), correct, slices, strict=True):
            multiply(out, e.T, h)
        total, products = steps.combine(slices, self_inclusive, _operand(hidden))
        positive += products
        multiply(pulled, errors[n_positive:], total, add=True)
    sums = rest.new_zeros(len(hidden))
    sums[n_positive:] = torch.linalg.vecdot(pulled, rest)
    firsts = [0, *accumulate(lengths[:-1])]  # a response's sum goes to its first token
    for first, value in zip(firsts, positive, strict=True):
        sums[first] = value
    return sums


def _products(head: Head, hidden: Tensor, width: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each slice's first column and ``W h`` (N, width). All slices reuse the same memory."""
    memory = hidden.new_empty(len(hidden), min(width, head.vocabulary))
    for vocabulary in _blocks(head.vocabulary, width):
        raw = memory[:, : vocabulary.stop - vocabulary.start]
        torch.mm(hidden, head.weight[vocabulary].to(hidden.dtype).T, out=raw)
        yield vocabulary.start, raw


def _operand(hidden: Tensor) -> torch.dtype:
    return torch.bfloat16 if hidden.element_size() == 2 else hidden.dtype


def _width(block: int, tokens: int) -> int:
    width = max(1, block // tokens)
    return width - width % 128 if width > 256 else width  # keep the rows of the slice aligned


def _blocks(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _steps(hidden: Tensor) -> ModuleType:
    if _device.suits_triton(hidden):
        from poise.head import influence_kernels

        return influence_kernels
    return in_torch
