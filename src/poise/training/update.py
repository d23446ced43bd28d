"""Updates the policy from one rollout batch, in phases, mini-batches, packed passes and optimizer steps.

Shapes: B responses, T response tokens (padded), N active tokens of one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from poise._lib.device import is_planned, send
from poise.batch import Phase, Rows, TokenBatch
from poise.head.loss import LARGE_CHUNK, policy_loss
from poise.models.layers import OutOfMemoryError
from poise.models.policy import BUSY_TOKENS, Policy
from poise.models.scoring import largest_pass, score_batch, take_less
from poise.objective import Settings, active, normalizer, survey
from poise.surrogates import Survey
from poise.training.config.groups import OptimConfig
from poise.training.config.schema import Config

Metrics = dict[str, Tensor]


class NotFiniteError(RuntimeError):
    """The gradient or a probability of the model is NaN or infinite. The optimizer has not used this gradient."""


@dataclass(frozen=True)
class UpdatePlan:
    """How to divide a batch into optimizer steps and passes."""

    objective: Settings = Settings()  # noqa: RUF009 (frozen)
    temperature: float = 1.0
    mini_batch: int = 0  # responses per optimizer step; 0: all
    micro_tokens: int | None = None  # most tokens per pass; None: enough to keep the device busy
    grad_clip: float = OptimConfig().grad_clip
    same_order: bool = False  # every phase has the same mini-batches
    average_over: int = 0  # responses per chunk: average over each chunk's tokens, then over the chunks; 0: one chunk

    @classmethod
    def of(cls, config: Config) -> UpdatePlan:
        """Return the plan for a run's settings."""
        names = ("mini_batch", "micro_tokens", "grad_clip", "same_order", "average_over")
        own = {name: getattr(config.optim, name) for name in names}
        return cls(config.objective, config.rollout.temperature, **own)


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batch: TokenBatch,
    phases: Sequence[Phase],
    plan: UpdatePlan,
    seed: int = 0,
) -> dict[str, float]:
    """Run every phase as a complete pass over the batch; return ``optim/…`` metrics averaged over the optimizer steps.

    A mini-batch without active tokens takes no step: momentum alone must not move the model.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    totals: Metrics = {}
    unmoved: Metrics = {}  # the first mini-batch's: weights are unchanged, so only rounding can clip a token
    steps = 0
    for number, phase in enumerate(phases):
        active_BT = active(batch, phase, plan.objective).cpu()
        for rows in mini_batches(len(batch.mask), plan.mini_batch, seed if plan.same_order else seed + number):
            mini = batch.rows(rows)
            mini_phase = averaged_in_parts(mini, phase.rows(rows), plan.average_over)
            metrics = backward(policy, mini, mini_phase, plan, active_BT[rows])
            if metrics is None:
                continue
            unmoved = unmoved or {"optim/held_unmoved": metrics["optim/clip_low"] + metrics["optim/clip_high"]}
            metrics["optim/grad_norm"] = clip(parameters, plan.grad_clip, phase.name)
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


def set_learning_rate(optimizer: torch.optim.Optimizer, settings: OptimConfig, step: int) -> None:
    """Set the learning rate for this step. It rises linearly to ``lr`` over the first ``warmup_steps`` steps."""
    warmup = settings.warmup_steps
    for group in optimizer.param_groups:
        group["lr"] = settings.lr * (min(step / warmup, 1.0) if warmup else 1.0)


def backward(
    policy: Policy,
    batch: TokenBatch,
    phase: Phase,
    plan: UpdatePlan = UpdatePlan(),  # noqa: B008 (frozen)
    active_BT: Tensor | None = None,
    divisor: Tensor | None = None,
) -> Metrics | None:
    """Compute the gradient of a mini-batch's loss, store it in the policy's parameters, and return the metrics.

    If no token is active, return None and leave the gradients unchanged. Responses without active tokens do not run
    through the model, but count in the denominator. Pass ``active_BT``, the active tokens on the CPU, if you have
    already computed them. ``divisor`` is the denominator of a mini-batch that several processes share (the sum of
    their ``objective.normalizer``).
    """
    settings = plan.objective
    active_BT = active(batch, phase, settings).cpu() if active_BT is None else active_BT
    active_rows = active_BT.any(1).nonzero()[:, 0].tolist()
    if not active_rows:
        return None
    norm = normalizer(batch, settings) if divisor is None else divisor
    whole: Survey | None = None  # the surrogate's survey of the whole mini-batch
    if settings.rule.surveyed:
        whole = survey(score_batch(policy, batch, plan.temperature, plan.micro_tokens)[0], batch, settings)

    def run(rows: list[int]) -> Metrics:
        """Run one pass: add these rows' contribution to the gradient, and return their contribution to the metrics."""
        part, tokens_N = batch.rows(rows), send(active_BT[rows].flatten().nonzero()[:, 0], batch.mask.device)
        loss, metrics = policy_loss(
            policy.hidden(part, tokens_N),
            part,
            phase.rows(rows),
            settings,
            normalizer=norm,
            head=policy.head(plan.temperature),
            tokens=tokens_N,
            memory=LARGE_CHUNK if tokens_N.is_cuda else None,
            survey=None if whole is None else whole.rows(send(rows, batch.mask.device)),
        )
        loss.backward()
        return metrics

    metrics = within_memory(policy, batch, active_rows, plan.micro_tokens, run)
    if whole is not None and whole.chosen is not None:
        metrics["optim/chosen"] = whole.chosen.sum() / batch.mask.sum()
    return metrics


def clip(parameters: Sequence[Tensor], limit: float, phase: str) -> Tensor:
    """Clip the gradient's norm to ``limit`` and return the unclipped norm. Raise NotFiniteError if it is not finite."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
    if not torch.isfinite(norm):
        for parameter in parameters:
            parameter.grad = None
        raise NotFiniteError(f"the gradient's norm is {norm.item()} in phase {phase!r}")
    return norm


def within_memory(
    policy: Policy, batch: TokenBatch, rows: list[int], micro_tokens: int | None, run: Callable[[list[int]], Metrics]
) -> Metrics:
    """Accumulate the gradient of a mini-batch in as many passes as memory requires; return the summed metrics.

    If memory runs out, the mini-batch starts again: first with fewer tokens per pass, while such passes keep the device
    busy; then with gradient checkpointing; then with fewer and fewer tokens. Later mini-batches keep these limits.
    """
    while True:
        bins = policy.passes(batch, rows, micro_tokens)
        _clear(policy)
        try:
            totals: Metrics = {}
            for bin_rows in bins:
                _add(totals, run(bin_rows))
            return totals
        except torch.OutOfMemoryError:
            pass  # retry outside of this block, where the error no longer references the tensors that filled the memory
        _clear(policy)
        largest = largest_pass(batch, bins)
        if largest >= BUSY_TOKENS or is_planned() or not policy.save_memory():
            take_less(policy, largest)


def averaged_in_parts(batch: TokenBatch, phase: Phase, size: int) -> Phase:
    """Scale a phase's weights, so that the mean over all tokens becomes the mean over chunks of each chunk's mean."""
    if not size:
        return phase
    parts = batch.mask.split(size)
    counts = torch.cat([part.sum().clamp(min=1).expand(len(part)) for part in parts])  # tokens in each response's chunk
    factor = (batch.mask.sum() / (len(parts) * counts))[:, None]
    return replace(phase, policy=phase.policy * factor, kl=phase.kl * factor)


def _clear(policy: Policy) -> None:
    """Clear the gradients of the optimizer's parameters and of the model; an aborted pass may leave some there."""
    for parameter in policy.parameters():
        parameter.grad = None
    policy.model.zero_grad(set_to_none=True)


def _add(totals: Metrics, more: Metrics) -> None:
    for name, value in more.items():
        totals[name] = totals[name] + value if name in totals else value


def mini_batches(count: int, size: int, seed: int) -> list[Rows]:
    """Shuffle the rows into mini-batches of at most ``size`` rows. With size 0: one slice, which copies nothing.

    The sizes differ by at most one, because a small last mini-batch would spend a whole optimizer step on few
    responses.
    """
    if size == 0 or size >= count:
        return [slice(None)]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return [rows.tolist() for rows in order.tensor_split(-(-count // size))]
