"""A critic as an algorithm: one advantage per token, from a linear value of the model's hidden states.

    poise train demo algorithm="examples/own-loop/critic.py:Critic(group=4)" run=runs/critic

PPO's estimate (GAE, arXiv 1506.02438): ``A_t = Σ_k λ^k (V_{t+k+1} − V_{t+k})``, where the value after the last token is
the reward. ``V = w·h``, h the hidden state that predicts the token. w is the algorithm's memory, so checkpoints hold
it. Advantages use the w of the steps before: no response is compared with a value that knows its reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import poise


@poise.algorithm
@dataclass(frozen=True)
class Critic:
    """``group`` attempts at each problem. ``decay`` is λ; ``ridge`` holds w to that of the step before."""

    group: int = 4
    decay: float = 0.95
    ridge: float = 100.0

    def collect(
        self, problems: Sequence[Any], sampler: poise.Sampler, seed: int, memory: dict[str, Any] | None = None
    ) -> tuple[list[poise.Trajectory], dict[str, Any]]:
        """The attempts, each with one advantage per token, and the new weights of the critic."""
        attempts = sampler.play([problem for problem in problems for _ in range(self.group)], seed)
        states = hidden_states(attempts, sampler.policy)
        width = states[0].shape[1]
        weights = torch.tensor(memory["weights"]) if memory else torch.zeros(width)
        normal, moment = self.ridge * torch.eye(width), self.ridge * weights
        trajectories = []
        for attempt, state_nd in zip(attempts, states, strict=True):
            reward, value_n = attempt.score.reward, state_nd @ weights
            advantage = torch.zeros(len(attempt.tokens))
            advantage[attempt.own] = gae(value_n, reward, self.decay)
            trajectories.append(replace(attempt, advantage=advantage, notes={"value": float(value_n[0])}))
            normal, moment = normal + state_nd.T @ state_nd, moment + reward * state_nd.sum(0)
        return trajectories, {"weights": torch.linalg.solve(normal, moment).tolist()}  # least squares, held to w

    def metrics(self, trajectories: Sequence[poise.Trajectory]) -> dict[str, float]:
        """``critic/error``: the mean squared error of the value that a prompt has, over the rewards' variance."""
        rewards = torch.tensor([each.score.reward for each in trajectories])
        values = torch.tensor([each.notes["value"] for each in trajectories])
        return {"critic/error": float((rewards - values).square().mean() / rewards.var().clamp(min=1e-6))}


@torch.no_grad()
def hidden_states(attempts: Sequence[poise.Trajectory], policy: poise.Policy) -> list[Tensor]:
    """For each attempt the states (n, d) that predicted the model's own tokens.

    One forward pass over all of them: a large model needs several.
    """
    batch = poise.make_batch(attempts, policy, advantage="reinforce-pp")  # one that needs no groups; nobody reads it
    padded = policy.padded_hidden(batch).float().cpu()
    return [states[mask] for states, mask in zip(padded, batch.mask.cpu(), strict=True)]


def gae(values: Tensor, reward: float, decay: float) -> Tensor:
    """(n,) advantages of a response with these values (n,), whose reward comes after its last token."""
    advantages = torch.cat([values, torch.tensor([reward])]).diff()
    for t in reversed(range(len(values) - 1)):
        advantages[t] += decay * advantages[t + 1]
    return advantages
