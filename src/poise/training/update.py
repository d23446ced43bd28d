"""One update of the policy from one rollout batch: phases, mini-batches, packed passes, optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from poise._lib.transfer import send
from poise.batch import Phase, TokenBatch
from poise.head import policy_loss
from poise.models.memory import OutOfMemoryError
from poise.models.packing import pack
from poise.models.policy import Policy
from poise.models.scoring import BUSY_TOKENS, default_micro_tokens
from poise.objective import Settings, active, normalizer
from poise.rollout.types import Rollouts

Metrics = dict[str, Tensor]

HEAD_MEMORY = 1 << 30  # bytes of logits at a time on CUDA: little beside the layers, and few chunks


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
    micro_tokens: int | None = None,
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
        for mini in mini_batches(len(batch.mask), mini_batch, seed + number):
            found = accumulate(
                policy, parameters, rollouts, batch, phase, settings, mini, moving=moving, temperature=temperature,
                micro_tokens=micro_tokens,
            )  # fmt: skip
            if found is None:
                continue
            found["optim/grad_norm"] = clip(parameters, grad_clip, phase.name)
            try:
                optimizer.step()
            except torch.OutOfMemoryError as error:
                raise OutOfMemoryError("in the optimizer's step") from error
            _add(totals, found)
            steps += 1
    averaged = (torch.stack([value.double() for value in totals.values()]) / steps).tolist() if totals else []
    return {**dict(zip(totals, averaged, strict=True)), "optim/steps": float(steps)}


def accumulate(
    policy: Policy,
    parameters: Sequence[Tensor],
    rollouts: Rollouts,
    batch: TokenBatch,
    phase: Phase,
    settings: Settings,
    rows: Sequence[int] | None = None,
    *,
    moving: Tensor | None = None,
    temperature: float = 1.0,
    micro_tokens: int | None = None,
) -> Metrics | None:
    """Leave the gradient of a mini-batch's loss, and nothing else, at ``parameters``, and return its metrics.

    ``rows`` are the mini-batch, by default the whole batch. ``moving`` (B, T) are the active tokens, on the host, where
    they are known. None where no token of the mini-batch is active: then there is no gradient.
    """
    moving = active(batch, phase, settings).cpu() if moving is None else moving
    mini = list(range(len(batch.mask))) if rows is None else list(rows)
    takes_part = moving.any(1).tolist()
    running = [row for row in mini if takes_part[row]]
    if not running:
        return None
    norm = normalizer(batch.rows(send(mini, batch.mask.device)), settings)
    backward = partial(_backward, policy, rollouts, batch, phase, moving, settings, norm, temperature)
    tokens = micro_tokens or default_micro_tokens(policy.device)
    return within_memory(policy, parameters, rollouts, running, tokens, backward)


def clip(parameters: Sequence[Tensor], limit: float, phase: str) -> Tensor:
    """Shorten the gradient to ``limit``, and return its norm before that; raise where that is not a finite number."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
    if not torch.isfinite(norm):
        for parameter in parameters:
            parameter.grad = None
        raise NotFiniteError(f"the gradient's norm is {norm.item()} in phase {phase!r}")
    return norm


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
        memory=HEAD_MEMORY if tokens.is_cuda else None,
    )  # fmt: skip
    loss.backward()
    return metrics


def within_memory(
    policy: Policy,
    parameters: Sequence[Tensor],
    rollouts: Rollouts,
    rows: list[int],
    tokens: int,
    backward: Callable[[list[int]], Metrics],
) -> Metrics:
    """The gradient of a mini-batch, in as many passes as memory makes necessary, and its metrics.

    Where memory runs out, the mini-batch begins again: with fewer tokens per pass, as long as those keep the device
    busy; then with layers that are computed twice; then with ever fewer tokens. What was found to be needed stays in
    force.
    """
    while True:
        bins = pack(rollouts, rows, policy.budget(tokens))
        _clear(policy, parameters)
        try:
            totals: Metrics = {}
            for part in bins:
                _add(totals, backward(part))
            return totals
        except torch.OutOfMemoryError:
            pass  # go on outside: in here, the error still holds on to what filled the memory
        _clear(policy, parameters)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        largest = max((_cost(rollouts, part) for part in bins if len(part) > 1), default=0)
        if largest < BUSY_TOKENS and policy.save_memory():
            continue
        if not largest:
            raise OutOfMemoryError("with a single response per pass")
        policy.most_tokens = largest // 2


def _clear(policy: Policy, parameters: Sequence[Tensor]) -> None:
    """No gradient is left, neither at the optimizer's weights nor, from a pass that was cut off, at the model's."""
    for parameter in parameters:
        parameter.grad = None
    policy.model.zero_grad(set_to_none=True)


def _cost(rollouts: Rollouts, rows: list[int]) -> int:
    """The tokens of a pass, each prompt counted once."""
    prompts = {tuple(rollouts.prompts[row]) for row in rows}
    return sum(rollouts.lengths[row] for row in rows) + sum(map(len, prompts))


def _add(totals: Metrics, more: Metrics) -> None:
    for name, value in more.items():
        totals[name] = totals[name] + value if name in totals else value


def mini_batches(count: int, size: int, seed: int) -> list[list[int]]:
    """Row numbers of the mini-batches: all rows at once (size 0), or shuffled and cut into parts of at most ``size``.

    Parts differ by one row at most: a small last one would take a whole optimizer step for a few responses.
    """
    if size == 0 or size >= count:
        return [list(range(count))]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return [part.tolist() for part in order.tensor_split(-(-count // size))]
