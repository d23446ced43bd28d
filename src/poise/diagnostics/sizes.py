"""How long a token's gradient is at the logits, in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from poise.batch import TokenBatch
from poise.lm_head import HeadLike, as_head

BLOCK = 1 << 24  # elements of the logits held at a time


@torch.no_grad()
def gradient_sizes(hidden: Tensor, targets: Tensor, head: HeadLike, *, block: int = BLOCK) -> Tensor:
    """(N,) ``‖e_y − π‖`` of N tokens: the norm of ``∂ log π(y) / ∂ logits``, π the distribution that sampling used.

    ``‖e_y − π‖² = (1 − π(y))² + Σ_{v≠y} π(v)²``. So it lies between ``1 − p`` and ``√2·(1 − p)``, nearer to the upper
    end the fewer rivals the token has. A token's part in the loss multiplies this by weight, advantage and ratio.
    """
    head = as_head(head)
    found = []
    size = 1
    start = 0
    while start < len(hidden):
        logits = head(hidden[start : start + size])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        others = logits.softmax(-1)
        others.scatter_(1, targets[start : start + size, None], 0.0)  # 1 − p is their sum: no difference of large parts
        found.append((others.sum(1).square() + others.square().sum(1)).sqrt())
        start += size
        size = max(1, block // logits.shape[-1])  # the first row tells how wide the others are
    return torch.cat(found) if found else hidden.new_zeros(0)


def token_gradient_sizes(batch: TokenBatch) -> Tensor | None:
    """(B, T) the same for every response token, 0 elsewhere; None where the batch has no hidden states."""
    if batch.hidden is None or batch.head is None or batch.targets is None:
        return None
    sizes = torch.zeros_like(batch.mask, dtype=batch.dtype)
    alone = [[row] for row in range(len(batch.mask))]
    for rows in batch.group_members() if batch.groups is not None else alone:
        ix = torch.tensor(rows, device=batch.mask.device)
        inside, places = batch.mask[ix], sizes[ix]
        found = gradient_sizes(batch.hidden_of(ix)[inside], batch.targets[ix][inside], batch.head)
        places[inside] = found.to(batch.dtype)
        sizes[ix] = places
    return sizes
