"""One update of the policy from one rollout batch: phases, mini-batches, packed passes, optimizer steps.

Shapes: B responses, T response tokens (padded), N active tokens of one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from poise._lib.device import send
from poise.batch import Phase, TokenBatch
from poise.head import policy_loss
from poise.models.layers import OutOfMemoryError
from poise.models.packing import pack
from poise.models.policy import Policy
from poise.models.scoring import BUSY_TOKENS, default_micro_tokens, largest_pass, score_all, take_less
from poise.objective import Settings, active, normalizer, survey
from poise.rollout.types import Rollouts
from poise.surrogates import Survey

Metrics = dict[str, Tensor]

HEAD_MEMORY = 1 << 30  # bytes of logits per chunk on CUDA: small beside the layers, large enough for few chunks


class NotFiniteError(RuntimeError):
    """The gradient, or a probability of the model, is NaN or infinite, and no optimizer step was taken."""


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
    """Run every phase as a complete pass over the batch; return ``optim/…`` metrics averaged over the optimizer steps.

    A mini-batch without active tokens takes no step: momentum alone must not move the model. Responses without active
    tokens are not run through the model, but count in the denominator.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    totals: Metrics = {}
    unmoved: Metrics = {}  # before the first optimizer step: what is held back there, rounding alone has moved
    steps = 0
    for number, phase in enumerate(phases):
        active_BT = active(batch, phase, settings).cpu()
        for rows in mini_batches(len(batch.mask), mini_batch, seed + number):
            metrics = accumulate(
                policy, parameters, rollouts, batch, phase, settings, rows, active_BT=active_BT,
                temperature=temperature, micro_tokens=micro_tokens,
            )  # fmt: skip
            if metrics is None:
                continue
            unmoved = unmoved or {"optim/held_unmoved": metrics["optim/clip_low"] + metrics["optim/clip_high"]}
            metrics["optim/grad_norm"] = clip(parameters, grad_clip, phase.name)
            try:
                optimizer.step()
            except torch.OutOfMemoryError as error:
                raise OutOfMemoryError("in the optimizer's step") from error
            _add(totals, metrics)
            steps += 1
    means = {name: value.double() / steps for name, value in totals.items()}
    values = means | {name: value.double() for name, value in unmoved.items()}
    numbers = torch.stack([*values.values()]).tolist() if values else []
    return {**dict(zip(values, numbers, strict=True)), "optim/steps": float(steps)}


def accumulate(
    policy: Policy,
    parameters: Sequence[Tensor],
    rollouts: Rollouts,
    batch: TokenBatch,
    phase: Phase,
    settings: Settings,
    rows: Sequence[int] | None = None,
    *,
    active_BT: Tensor | None = None,
    temperature: float = 1.0,
    micro_tokens: int | None = None,
) -> Metrics | None:
    """Set the gradients of ``parameters`` to those of a mini-batch's loss, and return its metrics.

    ``rows`` are the mini-batch, by default the whole batch. ``active_BT`` are the active tokens, on the host; computed
    here unless passed. None: no token of the mini-batch is active, and there is no gradient.
    """
    active_BT = active(batch, phase, settings).cpu() if active_BT is None else active_BT
    mini_batch = list(range(len(batch.mask))) if rows is None else list(rows)
    is_active_B = active_BT.any(1).tolist()
    active_rows = [row for row in mini_batch if is_active_B[row]]
    if not active_rows:
        return None
    norm = normalizer(batch.rows(send(mini_batch, batch.mask.device)), settings)
    taken = _survey(policy, rollouts, batch, settings, mini_batch, temperature, micro_tokens)
    place = {row: at for at, row in enumerate(mini_batch)}

    def backward(rows: list[int]) -> Metrics:
        seen = None if taken is None else taken.rows(send([place[row] for row in rows], batch.mask.device))
        return _backward(policy, rollouts, batch, phase, active_BT, settings, norm, temperature, seen, rows)

    tokens = micro_tokens or default_micro_tokens(policy)
    metrics = within_memory(policy, parameters, rollouts, active_rows, tokens, backward)
    if taken is not None and taken.chosen is not None:
        metrics["optim/chosen"] = taken.chosen.sum() / batch.mask[send(mini_batch, batch.mask.device)].sum()
    return metrics


def _survey(
    policy: Policy,
    rollouts: Rollouts,
    batch: TokenBatch,
    settings: Settings,
    mini_batch: list[int],
    temperature: float,
    micro_tokens: int | None,
) -> Survey | None:
    """The survey of a mini-batch, from a scoring pass over it, if the surrogate needs one."""
    if not settings.rule.surveyed:
        return None
    logp = score_all(policy, rollouts.rows(mini_batch), temperature, micro_tokens)[0]
    return survey(logp, batch.rows(send(mini_batch, batch.mask.device)), settings)


def clip(parameters: Sequence[Tensor], limit: float, phase: str) -> Tensor:
    """Clip the gradient's norm to ``limit``, and return the norm before; raise NotFiniteError if it is not finite."""
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
    active_BT: Tensor,
    settings: Settings,
    norm: Tensor,
    temperature: float,
    taken: Survey | None,
    rows: list[int],
) -> Metrics:
    """One pass: add these rows' share of the loss gradient, and return their share of the metrics."""
    ix = send(rows, batch.mask.device)
    responses = rollouts.rows(rows)
    tokens_N = send(active_BT[rows].flatten().nonzero()[:, 0], ix.device)  # flat indices into the rows' (B, T)
    loss, metrics = policy_loss(
        policy.hidden(responses, tokens_N), batch.rows(ix), phase.rows(ix), settings, normalizer=norm,
        head=policy.head(temperature), targets=responses.tokens, tokens=tokens_N,
        memory=HEAD_MEMORY if tokens_N.is_cuda else None, survey=taken,
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
    """Accumulate the gradient of a mini-batch in as many passes as memory requires, and return the summed metrics.

    When memory runs out, the mini-batch starts again: first with fewer tokens per pass, while those still keep the
    device busy; then with gradient checkpointing; then with ever fewer tokens. Later mini-batches keep these limits.
    """
    while True:
        bins = pack(rollouts, rows, policy.budget(tokens))
        _clear(policy, parameters)
        try:
            totals: Metrics = {}
            for bin_rows in bins:
                _add(totals, backward(bin_rows))
            return totals
        except torch.OutOfMemoryError:
            pass  # retry outside of this block: here the error still references the tensors that filled the memory
        _clear(policy, parameters)
        largest = largest_pass(rollouts, bins)
        if largest >= BUSY_TOKENS or not policy.save_memory():
            take_less(policy, largest)


def _clear(policy: Policy, parameters: Sequence[Tensor]) -> None:
    """Clear all gradients: the optimizer's, and those that an aborted pass left on the model."""
    for parameter in parameters:
        parameter.grad = None
    policy.model.zero_grad(set_to_none=True)


def _add(totals: Metrics, more: Metrics) -> None:
    for name, value in more.items():
        totals[name] = totals[name] + value if name in totals else value


def mini_batches(count: int, size: int, seed: int) -> list[list[int]]:
    """Row numbers of the mini-batches: all rows at once (size 0), or shuffled and cut into parts of at most ``size``.

    Part sizes differ by at most one: a small last part would spend a whole optimizer step on a few responses.
    """
    if size == 0 or size >= count:
        return [list(range(count))]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return [part.tolist() for part in order.tensor_split(-(-count // size))]
