"""The norm of a token's gradient at the logits, in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from poise.batch import TokenBatch
from poise.lm_head import HeadLike, as_head

BLOCK = 1 << 24  # elements of logits in memory at a time


@torch.no_grad()
def gradient_sizes(hidden: Tensor, targets: Tensor, head: HeadLike, *, block: int = BLOCK) -> Tensor:
    """(N,) ``‖e_y − π‖`` of N tokens: the norm of ``∂ log π(y) / ∂ logits``, π the distribution that sampling used.

    ``‖e_y − π‖² = (1 − π(y))² + Σ_{v≠y} π(v)²``. It lies between ``1 − p`` and ``√2·(1 − p)``, nearer to the
    upper end the fewer rivals the token has. In the loss, a token's weight, advantage and ratio multiply it.
    """
    head = as_head(head)
    norms = []
    size = 1
    start = 0
    while start < len(hidden):
        logits = head(hidden[start : start + size])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        others = logits.softmax(-1)
        others.scatter_(1, targets[start : start + size, None], 0.0)  # 1 − p is their sum: nothing cancels
        norms.append((others.sum(1).square() + others.square().sum(1)).sqrt())
        start += size
        size = max(1, block // logits.shape[-1])  # the first row gives the vocabulary size
    return torch.cat(norms) if norms else hidden.new_zeros(0)


def token_gradient_sizes(batch: TokenBatch) -> Tensor | None:
    """(B, T) ``gradient_sizes`` of the response tokens, 0 elsewhere; None if the batch has no hidden states."""
    if batch.hidden is None or batch.head is None or batch.targets is None:
        return None
    sizes = torch.zeros_like(batch.mask, dtype=batch.dtype)
    alone = [[row] for row in range(len(batch.mask))]
    for rows in batch.group_members() if batch.groups is not None else alone:
        ix = torch.tensor(rows, device=batch.mask.device)
        mask, part = batch.mask[ix], sizes[ix]
        norms = gradient_sizes(batch.hidden_of(ix)[mask], batch.targets[ix][mask], batch.head)
        part[mask] = norms.to(batch.dtype)
        sizes[ix] = part
    return sizes
