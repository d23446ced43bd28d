"""Log-probabilities of a whole rollout batch, in packed passes without gradients.

Shapes: B responses, T response tokens (padded).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from poise._lib.device import send
from poise.batch import TokenBatch
from poise.head import min_p_logp
from poise.models.layers import OutOfMemoryError
from poise.models.packing import own_tokens, pack, tokens_in
from poise.models.policy import Policy


@torch.no_grad()
def score_all(
    policy: Policy, batch: TokenBatch, temperature: float, micro_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """(B, T) log-probabilities and entropies of all responses under the current policy."""
    logp_BT, entropy_BT = torch.zeros_like(batch.old_logp), torch.zeros_like(batch.old_logp)

    def score(part: TokenBatch, ix: Tensor) -> None:
        logp, entropy = policy.score(part, temperature)
        logp_BT[ix], entropy_BT[ix] = logp.to(logp_BT.dtype), entropy.to(entropy_BT.dtype)

    _in_passes(policy, batch, micro_tokens, score)
    return logp_BT, entropy_BT


@torch.no_grad()
def score_min_p(
    policy: Policy, batch: TokenBatch, temperature: float, min_p: float, micro_tokens: int | None = None
) -> Tensor:
    """(B, T) log-probabilities under the current policy filtered by min-p: see ``poise.head.min_p_logp``."""
    logp_BT = torch.zeros_like(batch.old_logp)

    def score(part: TokenBatch, ix: Tensor) -> None:
        assert part.targets is not None
        places = own_tokens(part)
        states, targets = policy.hidden(part, places), part.targets.flatten()[places]
        logp = min_p_logp(states, targets, policy.head(temperature), min_p)
        scored = torch.zeros_like(part.old_logp).view(-1).index_put_((places,), logp.to(logp_BT.dtype))
        logp_BT[ix] = scored.view(part.old_logp.shape)

    _in_passes(policy, batch, micro_tokens, score)
    return logp_BT


def _in_passes(
    policy: Policy, batch: TokenBatch, micro_tokens: int | None, score: Callable[[TokenBatch, Tensor], None]
) -> None:
    """Call ``score`` with the part and the rows of each packed pass; when memory runs out, again in smaller parts."""
    while True:
        bins = pack(batch, range(len(batch.mask)), policy.budget(micro_tokens))
        try:
            for rows in bins:
                score(batch.rows(rows), send(rows, batch.mask.device))
            return
        except torch.OutOfMemoryError:
            pass  # retry outside of this block: here the error still references the tensors that filled the memory
        take_less(policy, largest_pass(batch, bins))


def take_less(policy: Policy, largest: int) -> None:
    """Halve ``largest``, the tokens of a pass, for later passes; an error if that was a single response already."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if not largest:
        raise OutOfMemoryError("with a single response per pass")
    policy.most_tokens = largest // 2


def largest_pass(batch: TokenBatch, bins: Sequence[Sequence[int]]) -> int:
    """The largest number of tokens in a pass of several responses, counting each prompt once; 0 without such a pass."""
    return max((tokens_in(batch, rows) for rows in bins if len(rows) > 1), default=0)
