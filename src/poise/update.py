"""One update of the policy from one rollout batch: phases, mini-batches, packed passes, optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from poise._transfer import send
from poise.batch import Phase, TokenBatch
from poise.head import policy_loss
from poise.memory import OutOfMemoryError
from poise.objective import Settings, active, normalizer
from poise.packing import pack
from poise.policy import Policy
from poise.rollout.base import Rollouts

Metrics = dict[str, Tensor]


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
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    totals: Metrics = {}
    steps = 0
    for number, phase in enumerate(phases):
        moving = active(batch, phase, settings).cpu()
        takes_part = moving.any(1).tolist()
        for mini in _shuffled(len(batch.mask), mini_batch, seed + number):
            rows = [row for row in mini if takes_part[row]]
            if not rows:
                continue
            norm = normalizer(batch.rows(send(mini, batch.mask.device)), settings)
            backward = partial(_backward, policy, rollouts, batch, phase, moving, settings, norm, temperature)
            found = _in_memory(policy, optimizer, rollouts, rows, micro_tokens, backward)
            size = found["optim/grad_norm"] = torch.nn.utils.clip_grad_norm_(parameters, grad_clip)
            if not torch.isfinite(size):
                optimizer.zero_grad(set_to_none=True)
                raise NotFiniteError(f"the gradient's norm is {size.item()} in phase {phase.name!r}")
            try:
                optimizer.step()
            except torch.OutOfMemoryError as error:
                raise OutOfMemoryError("in the optimizer's step") from error
            _add(totals, found)
            steps += 1
    averaged = (torch.stack([value.double() for value in totals.values()]) / steps).tolist() if totals else []
    return {**dict(zip(totals, averaged, strict=True)), "optim/steps": float(steps)}


def _backward(
    policy: Policy,
    rollouts: Rollouts,
    batch: TokenBatch,
    phase: Phase,
    moving: Tensor,
    settings: Settings,
    norm: Tensor,
    temperature: float,
    rows: list[int],
) -> Metrics:
    """One pass: the gradient of these rows' share of the loss is added to what is there; their share of the metrics."""
    ix = send(rows, batch.mask.device)
    piece, responses = batch.rows(ix), rollouts.rows(rows)
    tokens = send(moving[rows].flatten().nonzero()[:, 0], ix.device)
    loss, metrics = policy_loss(
        policy.hidden(responses, tokens), piece, phase.rows(ix), settings, normalizer=norm,
        head=policy.head(temperature), targets=responses.tokens, tokens=tokens,
    )  # fmt: skip
    loss.backward()
    return metrics


def _in_memory(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    rollouts: Rollouts,
    rows: list[int],
    tokens: int,
    backward: Callable[[list[int]], Metrics],
) -> Metrics:
    """The gradient of a mini-batch, in as many passes as memory makes necessary, and its metrics.

    Where memory runs out, the mini-batch begins again: first with layers that are computed twice, then with ever fewer
    tokens per pass. What was found to be needed stays in force.
    """
    while True:
        bins = pack(rollouts, rows, policy.budget(tokens))
        optimizer.zero_grad(set_to_none=True)
        try:
            totals: Metrics = {}
            for part in bins:
                _add(totals, backward(part))
            return totals
        except torch.OutOfMemoryError:
            pass  # go on outside: in here, the error still holds on to what filled the memory
        optimizer.zero_grad(set_to_none=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if policy.save_memory():
            continue
        costs = [
            sum(rollouts.lengths[row] for row in part) + _prompts(rollouts, part) for part in bins if len(part) > 1
        ]
        if not costs:
            raise OutOfMemoryError("with a single response per pass")
        policy.most_tokens = max(costs) // 2


def _prompts(rollouts: Rollouts, rows: list[int]) -> int:
    """The tokens of the prompts of some rows, each counted once."""
    return sum(map(len, {tuple(rollouts.prompts[row]) for row in rows}))


def _add(totals: Metrics, more: Metrics) -> None:
    for name, value in more.items():
        totals[name] = totals[name] + value if name in totals else value


@torch.no_grad()
def score_all(policy: Policy, rollouts: Rollouts, temperature: float, micro_tokens: int) -> Tensor:
    """(B, T) log-probabilities of all responses under the policy as it is, without gradients."""
    logp = torch.zeros_like(rollouts.logp)
    for part in pack(rollouts, range(len(rollouts.prompts)), policy.budget(micro_tokens)):
        logp[send(part, logp.device)] = policy.score(rollouts.rows(part), temperature)[0].to(logp.dtype)
    return logp


def _shuffled(count: int, size: int, seed: int) -> list[list[int]]:
    """Row numbers of the mini-batches: all rows at once, or shuffled and cut."""
    if size == 0 or size >= count:
        return [list(range(count))]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return [order[i : i + size] for i in range(0, count, size)]
