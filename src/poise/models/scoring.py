"""Log-probabilities of a whole rollout batch, in packed passes without gradients.

Shapes: B responses, T response tokens (padded).
"""

from __future__ import annotations

import torch
from torch import Tensor

from poise._lib.transfer import send
from poise.models.packing import pack
from poise.models.policy import Policy
from poise.rollout.types import Rollouts

BUSY_TOKENS = 16384  # tokens per pass that keep a device busy


def default_micro_tokens(device: torch.device) -> int:
    """Default tokens per pass: enough to keep the device busy; more on CUDA, where each launch has a cost."""
    return BUSY_TOKENS * 4 if device.type == "cuda" else BUSY_TOKENS


@torch.no_grad()
def score_all(
    policy: Policy, rollouts: Rollouts, temperature: float, micro_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """(B, T) log-probabilities and entropies of all responses under the current policy."""
    micro_tokens = micro_tokens or default_micro_tokens(policy.device)
    logp_BT, entropy_BT = torch.zeros_like(rollouts.logp), torch.zeros_like(rollouts.logp)
    for rows in pack(rollouts, range(len(rollouts.prompts)), policy.budget(micro_tokens)):
        ix = send(rows, rollouts.logp.device)
        logp, entropy = policy.score(rollouts.rows(rows), temperature)
        logp_BT[ix], entropy_BT[ix] = logp.to(logp_BT.dtype), entropy.to(entropy_BT.dtype)
    return logp_BT, entropy_BT
