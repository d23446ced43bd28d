"""Updates on the same responses, by the fast path and by the plain one: losses, and where the weights end."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from poise import TokenBatch, advantages, objective, regulators
from poise.models.loading import load_policy
from poise.models.master_weights import MasterWeights
from poise.models.policy import Policy
from poise.objective import Settings
from poise.sampling.cached_engine import CachedEngine
from poise.tasks.knights_knaves import KnightsKnaves
from poise.training.update import UpdatePlan, update
from support.tiny_models import sample

SETTINGS = Settings(kl_coef=0.001)


def sampled(device: str, steps: int = 20) -> list[TokenBatch]:
    """What steps of the embedded model before training would see, advantages made up so that all move it."""
    policy = load_policy("embedded", device=device, dtype="float32")
    engine, task, made = CachedEngine(policy), KnightsKnaves(), []
    for step in range(steps):
        prompts = [policy.encode(problem.prompt) for problem in islice(task.problems("train", step), 3)]
        out = sample(engine, prompts, 4, max_tokens=48, temperature=1.0, seed=step)
        groups = torch.arange(3, device=device).repeat_interleave(4)
        rewards = torch.randn(12, generator=torch.Generator().manual_seed(step)).to(device)
        logp, entropy = out.logp.to(device), out.entropy.to(device)
        made.append(replace(
            out.batch, old_logp=logp, advantages=advantages.group_zscore(rewards, groups), groups=groups, ref_logp=logp,
            entropy=entropy,
        ))  # fmt: skip
    return made


def start(device: str, dtype: torch.dtype, *, compiled: bool = False) -> tuple[Policy, Any]:
    policy = load_policy("embedded", device=device, dtype="float32")
    policy = Policy(policy.model.to(dtype), policy.tokenizer, compiled=compiled)
    policy.master_weights = MasterWeights(policy.model)
    optimizer = torch.optim.AdamW(policy.master_weights.parameters.values(), lr=1e-4)
    policy.master_weights.serve(optimizer)
    return policy, optimizer


def fast(
    made: list[TokenBatch],
    device: str,
    dtype: torch.dtype,
    *,
    micro_tokens: int = 1_000_000,
    **how: Any,
) -> tuple[list[float], torch.Tensor]:
    """Packed, fused: losses, and how far the weights have come."""
    policy, optimizer = start(device, dtype, **how)
    before, losses = weights(policy), []
    plan = UpdatePlan(SETTINGS, micro_tokens=micro_tokens)
    for batch in made:
        metrics = update(policy, optimizer, batch, regulators.parse("lopti")(batch), plan)
        losses.append(metrics["optim/loss"])
    return losses, weights(policy) - before


def plain(made: list[TokenBatch], device: str, dtype: torch.dtype) -> tuple[list[float], torch.Tensor]:
    """Padded, all logits at once, ``objective.policy_loss``, the whole batch in one pass."""
    policy, optimizer = start(device, dtype)
    before, losses = weights(policy), []
    for batch in made:
        step = []
        for phase in regulators.parse("lopti")(batch):
            optimizer.zero_grad()
            states = policy.padded_states(batch)
            logits = policy.head()(states).to(torch.promote_types(dtype, torch.float32))
            logp = logits.log_softmax(-1).gather(-1, batch.targets[..., None])[..., 0]
            norm = objective.normalizer(batch, SETTINGS)
            loss, _ = objective.policy_loss(logp, batch, phase, SETTINGS, normalizer=norm)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.master_weights.parameters.values(), 1.0)
            optimizer.step()
            step.append(loss.item())
        losses.append(sum(step) / len(step))
    return losses, weights(policy) - before


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in policy.master_weights.parameters.values()])
