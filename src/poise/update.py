"""One update of the policy from one rollout batch: phases, mini-batches, micro-batches, optimizer steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from poise.batch import Phase, TokenBatch
from poise.objective import Settings, active, normalizer, policy_loss
from poise.policy import Policy
from poise.rollout.base import Rollouts

PART_OVERHEAD = 128  # tokens that a forward and backward pass costs besides its tokens


class NotFiniteError(RuntimeError):
    """The gradient is NaN or infinite: the step was not taken."""


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    rollouts: Rollouts,
    batch: TokenBatch,
    phases: Sequence[Phase],
    settings: Settings,
    *,
    temperature: float = 1.0,
    mini_batch: int = 0,
    micro_tokens: int = 16384,
    grad_clip: float = 1.0,
    seed: int = 0,
) -> dict[str, float]:
    """Run every phase as a complete pass over the batch, and return ``optim/…`` metrics averaged over the steps taken.

    A mini-batch in which no token is active takes no step: momentum alone must not move the model. Responses without an
    active token are not run through the model, but stay in the denominator.
    """
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    totals: dict[str, Tensor | float] = defaultdict(float)
    steps = 0
    for number, phase in enumerate(phases):
        for ix in _shuffled(len(batch.mask), mini_batch, seed + number, batch.mask.device):
            mini, mini_phase, responses = batch.rows(ix), phase.rows(ix), rollouts.rows(ix)
            rows = active(mini, mini_phase, settings).any(1).nonzero()[:, 0]
            if len(rows) == 0:
                continue
            norm = normalizer(mini, settings)
            optimizer.zero_grad(set_to_none=True)
            for jx in micro_batches(responses, rows, micro_tokens):
                piece = mini.rows(jx)
                logp, entropy = policy.score(
                    responses.rows(jx), piece.mask, temperature, entropy=settings.entropy_coef != 0
                )
                weights = mini_phase.rows(jx)
                loss, metrics = policy_loss(logp, piece, weights, settings, normalizer=norm, entropy=entropy)
                loss.backward()
                for name, value in metrics.items():
                    totals[name] += value
            norm_of_gradient = torch.nn.utils.clip_grad_norm_(parameters, grad_clip)
            if not torch.isfinite(norm_of_gradient):
                optimizer.zero_grad(set_to_none=True)
                raise NotFiniteError(f"the gradient's norm is {norm_of_gradient.item()} in phase {phase.name!r}")
            optimizer.step()
            totals["optim/grad_norm"] += norm_of_gradient
            steps += 1
    averaged = {name: float(value) / max(steps, 1) for name, value in totals.items()}
    return {**averaged, "optim/steps": float(steps)}


def micro_batches(rollouts: Rollouts, rows: Tensor, tokens: int) -> list[Tensor]:
    """The given rows in parts that cost at most ``tokens`` tokens each, padding counted (a single row may cost more).

    Whole groups together, so that a prompt is read once for many responses, or responses of like length together, so
    that little is padded; in large parts or smaller ones: whichever costs least in all.
    """
    chosen, counts = rows.tolist(), rollouts.mask.sum(1).tolist()
    groups: dict[tuple[int, ...], list[int]] = {}
    for row in chosen:
        groups.setdefault(tuple(rollouts.prompts[row]), []).append(row)
    sizes = {
        row: (number, len(prompt), counts[row]) for number, (prompt, own) in enumerate(groups.items()) for row in own
    }
    by_group = [row for own in sorted(groups.values(), key=lambda own: max(counts[r] for r in own)) for row in own]
    by_length = sorted(chosen, key=lambda row: (counts[row], row))
    cuts = [
        _cut(order, sizes, limit) for order in (by_group, by_length) for limit in (tokens, tokens // 2, tokens // 4)
    ]
    return [torch.tensor(part, device=rows.device) for part in min(cuts, key=lambda cut: cut[1])[0]]


def _cut(order: list[int], sizes: dict[int, tuple[int, int, int]], limit: int) -> tuple[list[list[int]], int]:
    """Parts of consecutive rows, and what they cost: each distinct prompt and each response, padded to the longest."""
    parts: list[list[int]] = []
    total, seen, longest_prompt, longest, cost = 0, set[int](), 0, 0, 0
    for row in order:
        number, prompt, response = sizes[row]
        wide, long = max(longest_prompt, prompt), max(longest, response)
        more = len(seen | {number}) * wide + (len(parts[-1]) + 1) * long if parts else limit + 1
        if more > limit:
            total += cost + PART_OVERHEAD
            parts.append([])
            seen, wide, long, more = set(), prompt, response, prompt + response
        parts[-1].append(row)
        seen.add(number)
        longest_prompt, longest, cost = wide, long, more
    return parts, total + cost


@torch.no_grad()
def score_all(policy: Policy, rollouts: Rollouts, temperature: float, micro_tokens: int) -> Tensor:
    """(B, T) log-probabilities of all responses under the policy as it is, without gradients."""
    logp = torch.zeros_like(rollouts.logp)
    rows = torch.arange(len(rollouts.prompts), device=logp.device)
    for ix in micro_batches(rollouts, rows, micro_tokens):
        piece = rollouts.rows(ix)
        logp[ix] = policy.score(piece, piece.mask, temperature)[0]
    return logp


def _shuffled(count: int, size: int, seed: int, device: torch.device) -> list[Tensor]:
    """Row indices of the mini-batches: all rows at once, or shuffled and cut."""
    if size == 0 or size >= count:
        return [torch.arange(count, device=device)]
    generator = torch.Generator().manual_seed(seed)
    return [part.to(device) for part in torch.randperm(count, generator=generator).split(size)]
