"""Log-probabilities of a whole rollout batch, in packed passes without gradients.

Shapes: B responses, T response tokens (padded).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from poise._lib.device import send
from poise.batch import TokenBatch
from poise.head import min_p_logp
from poise.models.packing import own_tokens, pack
from poise.models.policy import Policy

BUSY_TOKENS = 16384  # tokens per pass that keep a device busy
BUSY_WORK = BUSY_TOKENS * 1e9  # tokens × parameters of a pass on CUDA that takes longer than launching its kernels


def default_micro_tokens(policy: Policy) -> int:
    """Default tokens per pass: enough to keep the device busy; up to 4 times as many for small models on CUDA."""
    if policy.device.type != "cuda":
        return BUSY_TOKENS
    parameters = sum(parameter.numel() for parameter in policy.trunk.parameters())
    return int(max(BUSY_TOKENS, min(4 * BUSY_TOKENS, BUSY_WORK / parameters)))


@torch.no_grad()
def score_all(
    policy: Policy, batch: TokenBatch, temperature: float, micro_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """(B, T) log-probabilities and entropies of all responses under the current policy."""
    logp_BT, entropy_BT = torch.zeros_like(batch.old_logp), torch.zeros_like(batch.old_logp)
    for part, ix in _passes(policy, batch, micro_tokens):
        logp, entropy = policy.score(part, temperature)
        logp_BT[ix], entropy_BT[ix] = logp.to(logp_BT.dtype), entropy.to(entropy_BT.dtype)
    return logp_BT, entropy_BT


@torch.no_grad()
def score_min_p(
    policy: Policy, batch: TokenBatch, temperature: float, min_p: float, micro_tokens: int | None = None
) -> Tensor:
    """(B, T) log-probabilities under the current policy filtered by min-p: see ``poise.head.min_p_logp``."""
    logp_BT = torch.zeros_like(batch.old_logp)
    for part, ix in _passes(policy, batch, micro_tokens):
        assert part.targets is not None
        places = own_tokens(part)
        states, targets = policy.hidden(part, places), part.targets.flatten()[places]
        logp = min_p_logp(states, targets, policy.head(temperature), min_p)
        scored = torch.zeros_like(part.old_logp).view(-1).index_put_((places,), logp.to(logp_BT.dtype))
        logp_BT[ix] = scored.view(part.old_logp.shape)
    return logp_BT


def _passes(policy: Policy, batch: TokenBatch, micro_tokens: int | None) -> Iterator[tuple[TokenBatch, Tensor]]:
    """The part of the batch in each packed pass, and its row numbers."""
    tokens = policy.budget(micro_tokens or default_micro_tokens(policy))
    for rows in pack(batch, range(len(batch.mask)), tokens):
        yield batch.rows(rows), send(rows, batch.mask.device)
