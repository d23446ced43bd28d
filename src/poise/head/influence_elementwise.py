"""The elementwise steps of ``poise.head.influence`` in plain torch: the reference, also used without Triton.

``poise.head.influence_kernels`` has the same functions as Triton kernels. Arithmetic is float32, or float64 for float64
inputs. Half-precision operands of matrix products are stored as bfloat16, which has the range of float32.

Shapes: N tokens of a group, N⁺ of them in its n⁺ correct responses, V vocabulary size, d hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from poise._lib.device import accumulator
from poise.lm_head import Head

LAG = 20.0  # how far the maximum may rise before the sums are rescaled to the new maximum


@dataclass(eq=False)
class Rows:
    """Running statistics of each token's row of logits, over the slices of the vocabulary seen so far."""

    top: Tensor  # (N,) the largest logit so far, or up to LAG less
    others: Tensor  # (N,) Σ exp(logit − top) over all but the sampled token
    own: Tensor  # (N,) the logit of the sampled token

    @classmethod
    def start(cls, hidden: Tensor) -> Rows:
        """The statistics before the first slice."""
        zeros = hidden.new_zeros(len(hidden), dtype=accumulator(hidden.dtype))
        return cls(torch.full_like(zeros, torch.finfo(zeros.dtype).min), zeros, zeros.clone())

    def part(self, tokens: slice) -> Rows:
        """The statistics of some of the tokens."""
        return Rows(self.top[tokens], self.others[tokens], self.own[tokens])

    @property
    def norm(self) -> Tensor:
        """(N,) Σ exp(logit − top) over the vocabulary."""
        return self.others + (self.own - self.top).exp()


def stored(raw: Tensor) -> Tensor:
    """View ``raw`` as an operand of a product: bfloat16 instead of float16, whose range is too small."""
    return raw.view(torch.bfloat16) if raw.dtype == torch.float16 else raw


def walk(raw: Tensor, head: Head, start: int, targets: Tensor, rows: Rows, *, update: bool, write: bool) -> Tensor:
    """Process one slice of the vocabulary, ``raw = W h`` from column ``start`` on, and overwrite it.

    The first pass (``update``) adds the slice to ``rows`` and turns ``raw`` into ``exp(logit − top)``, with 0 for the
    sampled token. The second pass, with complete ``rows``, turns ``raw`` into ``π − e_y``; the sampled token's entry is
    ``−others / norm``, which is exact where π − 1 would round. Without ``write``, the content of ``raw`` is undefined
    afterwards. Returns (N,) factors by which sums over earlier slices must be multiplied: below 1 where ``top`` rose.
    """
    width = raw.shape[1]
    logits = head.finish(raw, slice(start, start + width))
    within = (targets >= start) & (targets < start + width)
    column = (targets - start).clamp(0, width - 1)[:, None]
    shrink = torch.ones_like(rows.top)
    if update:
        peak = logits.amax(1)
        top = torch.where(peak > rows.top + LAG, peak, rows.top)
        shrink = (rows.top - top).exp()
        rows.top = top
        rows.own = torch.where(within, logits.gather(1, column)[:, 0], rows.own)
    values = logits.sub_((rows.top if update else rows.top + rows.norm.log())[:, None]).exp_()
    entry = torch.zeros_like(rows.top) if update else -rows.others / rows.norm
    values.scatter_(1, column, torch.where(within, entry, values.gather(1, column)[:, 0])[:, None])
    if update:
        rows.others = rows.others * shrink + values.sum(1)
    if write and values is not raw:
        stored(raw).copy_(values)
    return shrink


def rescale(pairs: Tensor, left: Tensor, right: Tensor) -> None:
    """``pairs[k, k'] *= left[k] · right[k']``. The factors are nearly always 1: see LAG."""
    if pairs.is_cuda or bool((left != 1).any()) or bool((right != 1).any()):  # on CUDA the check would cost a wait
        pairs.mul_(left[:, None]).mul_(right)


def columns(
    pairs: Tensor,
    products: Tensor,
    left_at_right: Tensor,
    right_at_left: Tensor,
    head: Head,
    targets: Tensor,
    owner: Tensor,
    rows: Rows,
    first: int,
    self_inclusive: bool,
) -> Tensor:
    """(n,) the amounts that the tokens k = first, first + 1, … of correct responses add to the scores of n tokens k'.

    The tokens k' are the group's first n; n is the width of ``pairs``. ``targets``, ``owner`` and ``rows`` cover all
    tokens of the group. The sampled token is treated separately: ``e_y − π = a·e_y − q``; here ``a = 1 − π(y)``, and q
    is π with a 0 at y. Then ``⟨a·e_y − q, a'·e_y' − q'⟩ = a·a'·[y = y'] − a·q'(y) − a'·q(y') + ⟨q, q'⟩``. ``pairs``
    holds the last term times both norms, and is overwritten. ``products`` holds ⟨h, h'⟩. ``right_at_left`` and
    ``left_at_right`` hold the entries of ``W h`` for q'(y) and q(y').
    """
    left, right = slice(first, first + len(pairs)), slice(pairs.shape[1])
    norm, top = rows.norm, rows.top
    miss = rows.others / norm
    same = targets[left, None] == targets[right]
    theirs = head.finish(right_at_left.T, targets[left]).T
    theirs = theirs.sub_(top[right]).exp_().div_(norm[right]).mul_(miss[left, None]).masked_fill_(same, 0)  # a·q'(y)
    ours = head.finish(left_at_right, targets[right])
    ours = ours.sub_(top[left, None]).exp_().div_(norm[left, None]).mul_(miss[right]).masked_fill_(same, 0)  # a'·q(y')
    pairs.div_(norm[left, None]).div_(norm[right]).sub_(theirs).sub_(ours)
    pairs += miss[left, None] * miss[right] * same
    pairs *= products
    if not self_inclusive:
        pairs.masked_fill_(owner[left, None] == owner[right], 0)
    return pairs.sum(0)


def combine(parts: Tensor, self_inclusive: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the sum of a slice ``parts`` (n⁺, width, d) of all G_i, in ``dtype``, and each ⟨G_i, Σ_j≠i G_j⟩."""
    total = parts.sum(0)
    # Remove a response's own part before the product: it is far larger than the others, which rounding would destroy.
    partners = total.expand_as(parts) if self_inclusive else total - parts
    return total.to(dtype), torch.linalg.vecdot(parts.flatten(1), partners.flatten(1))
