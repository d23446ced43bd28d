"""How tokens pull on each other through the head: the scores behind NTHR, exact at full vocabulary.

For two tokens k and k' with hidden states h, sampled tokens y and next-token distributions π, the inner product of the
gradients of their log-probabilities with respect to the head is ``⟨e_y − π, e_y' − π'⟩ · ⟨h, h'⟩``. Summed over the
tokens k of a group's correct responses this is the score of k' (arXiv 2505.18830, equation of s⁻).

Two forms of the same sum:

- pair: every pair (k, k'), ``2·N⁺·(N⁺ + N⁻)·V`` FLOP;
- linear: with ``G = Σ_k (e_y − π) hᵀ`` (V × d) the score of k' is ``(e_y' − π')ᵀ G h'``, ``2·(N⁺ + N⁻)·d·V`` FLOP.

The pair form is the cheaper one where N⁺ < d. (For the scores of the incorrect responses alone the border is N⁺·N⁻ /
(N⁺ + N⁻) < d, but the threshold needs the correct ones scored too.) Both walk the vocabulary in slices: neither G nor
any tokens × vocabulary array is ever whole. A head that is an opaque callable cannot be sliced; there rows are walked
in blocks, in the pair form, and the head is called again and again on the same rows: for many tokens give a ``Head``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from poise._errors import check_choice
from poise.linear import Head, HeadLike, as_head

Tokens = tuple[Tensor, Tensor]  # hidden (N, d), targets (N,)
Form = Literal["auto", "pair", "linear"]

BLOCK = 1 << 20  # elements of the largest temporary: 4 MiB in float32


class Scores(NamedTuple):
    """What a group's tokens have to say about its correct responses."""

    negative: Tensor  # (N⁻,) the score s⁻ of each token of the incorrect responses
    positive: Tensor  # (n⁺,) the mean score s̄⁺ over the tokens of each correct response


@torch.no_grad()
def scores(
    head: HeadLike,
    positive: Sequence[Tokens],
    negative: Tokens,
    *,
    self_inclusive: bool = False,
    form: Form = "auto",
    block: int = BLOCK,
) -> Scores:
    """Score the tokens of the incorrect responses, and each correct response, against the correct responses.

    ``positive`` has one entry per correct response, none of them empty; ``negative`` holds the tokens of all incorrect
    ones. A correct response is scored against the others, or with ``self_inclusive`` against itself too. Half
    precision is computed in float32.
    """
    check_choice("scores", "form", form, ("auto", "pair", "linear"))
    head = as_head(head)
    hidden = torch.cat([h for h, _ in positive] + [negative[0]])
    if isinstance(head, Head):  # a callable gets hidden states as the model made them
        hidden = hidden.to(_accumulator(hidden))
    targets = torch.cat([y for _, y in positive] + [negative[1]])
    lengths = [len(y) for _, y in positive]
    if form == "auto":
        form = "pair" if sum(lengths) < hidden.shape[1] or not isinstance(head, Head) else "linear"
    if form == "linear":
        if not isinstance(head, Head):
            raise ValueError("scores: the linear form needs a head that can be sliced: a weight or a poise.Head")
        s_negative, s_positive = _linear(head, hidden, targets, lengths, self_inclusive, block)
    else:
        s_negative, s_positive = _pair(head, hidden, targets, lengths, self_inclusive, block)
    return Scores(s_negative, s_positive / torch.tensor(lengths, dtype=s_positive.dtype, device=hidden.device))


def _linear(
    head: Head, hidden: Tensor, targets: Tensor, lengths: list[int], self_inclusive: bool, block: int
) -> tuple[Tensor, Tensor]:
    n_positive = sum(lengths)
    rest = hidden[n_positive:]
    negative, positive = hidden.new_zeros(len(rest)), hidden.new_zeros(len(lengths))
    width = max(1, block // max(len(hidden), len(lengths) * hidden.shape[1]))
    for errors in _errors_by_vocabulary(head, hidden, targets, width):
        responses = zip(errors[:n_positive].split(lengths), hidden[:n_positive].split(lengths), strict=True)
        parts = torch.stack([e.T @ h for e, h in responses])  # this slice of G_i, one for each correct response
        total = parts.sum(0)
        # A response's own part is left out here, not taken off the end result, where it is far larger than the rest.
        partners = total.expand_as(parts) if self_inclusive else total - parts
        positive += torch.linalg.vecdot(parts.flatten(1), partners.flatten(1))
        negative += torch.linalg.vecdot(errors[n_positive:], rest @ total.T)
    return negative, positive


def _pair(
    head: Head | Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    lengths: list[int],
    self_inclusive: bool,
    block: int,
) -> tuple[Tensor, Tensor]:
    n_positive = sum(lengths)
    exact = hidden.to(_accumulator(hidden))
    pairs = exact.new_zeros(n_positive, len(hidden))
    if isinstance(head, Head):
        for errors in _errors_by_vocabulary(head, hidden, targets, max(1, block // len(hidden))):
            pairs.addmm_(errors[:n_positive], errors.T)
    else:
        size = max(1, block // head(hidden[:1]).shape[-1])
        for left in _blocks(n_positive, 8 * size):  # each costs a pass of the head over all tokens
            errors = _errors_of_rows(head, hidden[left], targets[left])
            for right in _blocks(len(hidden), size):
                pairs[left, right] = errors @ _errors_of_rows(head, hidden[right], targets[right]).T
    pairs *= exact[:n_positive] @ exact.T
    negative = pairs[:, n_positive:].sum(0)
    if not self_inclusive:
        for own in torch.arange(n_positive, device=hidden.device).split(lengths):
            pairs[own[0] : own[-1] + 1, own[0] : own[-1] + 1] = 0
    positive = torch.stack([columns.sum() for columns in pairs[:, :n_positive].split(lengths, 1)])
    return negative, positive


def _errors_by_vocabulary(head: Head, hidden: Tensor, targets: Tensor, width: int) -> Iterator[Tensor]:
    """``e_y − π`` of every token, one slice of the vocabulary after the other: (N, width)."""
    slices = _blocks(head.vocabulary, width)
    log_norm = hidden.new_full((len(hidden),), -torch.inf)
    for vocabulary in slices:
        log_norm = torch.logaddexp(log_norm, head.logits(hidden, vocabulary).logsumexp(1))
    for vocabulary in slices:
        errors = head.logits(hidden, vocabulary).sub_(log_norm[:, None]).exp_().neg_()
        yield _add_targets(errors, targets - vocabulary.start)


def _errors_of_rows(head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor) -> Tensor:
    """``e_y − π`` of some tokens over the whole vocabulary, from a head that only gives whole rows."""
    logits = head(hidden)
    return _add_targets(logits.to(_accumulator(logits)).softmax(-1).neg_(), targets)


def _accumulator(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _add_targets(errors: Tensor, column: Tensor) -> Tensor:
    """Add 1 at each row's target where it lies within these columns, without asking the host which do."""
    within = (column >= 0) & (column < errors.shape[1])
    return errors.scatter_add_(1, column.clamp(0, errors.shape[1] - 1)[:, None], within[:, None].to(errors.dtype))


def _blocks(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
