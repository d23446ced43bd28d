"""Log-probabilities of many responses, in packed passes without gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from poise._lib.transfer import send
from poise.models.packing import pack
from poise.models.policy import Policy
from poise.rollout.types import Rollouts

BUSY_TOKENS = 16384  # in a pass: enough to keep a device busy


def default_micro_tokens(device: torch.device) -> int:
    """Tokens per pass where nobody says: what keeps a device busy, and on CUDA its launches cheap."""
    return BUSY_TOKENS * 4 if device.type == "cuda" else BUSY_TOKENS


@torch.no_grad()
def score_all(
    policy: Policy, rollouts: Rollouts, temperature: float, micro_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """(B, T) log-probabilities of all responses under the policy as it is, without gradients, and entropies."""
    micro_tokens = micro_tokens or default_micro_tokens(policy.device)
    made = torch.zeros_like(rollouts.logp), torch.zeros_like(rollouts.logp)
    for part in pack(rollouts, range(len(rollouts.prompts)), policy.budget(micro_tokens)):
        at = send(part, rollouts.logp.device)
        for values, found in zip(made, policy.score(rollouts.rows(part), temperature), strict=True):
            values[at] = found.to(values.dtype)
    return made
