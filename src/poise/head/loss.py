"""Loss and log-probabilities from hidden states, chunk by chunk: only one chunk of tokens has logits at a time.

A token's gradient depends only on its own row (new and old log-probability, advantage, weight). So the forward pass
already replaces the logits by their gradient and computes no logits twice. It needs three matrix products, the minimum:
``6·N·d·V`` FLOP. ``token_logp`` is for losses that couple several tokens, such as sequence-level ratios: its backward
pass recomputes the chunks, ``8·N·d·V`` FLOP.

Shapes: B responses, T response tokens (padded), N selected tokens, d hidden width, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from poise._lib import device as _device
from poise._lib.device import accumulator, multiply
from poise.batch import Phase, TokenBatch
from poise.head import rows
from poise.lm_head import Head, HeadLike, as_head
from poise.objective import Settings, active, terms
from poise.surrogates import Surrogate, Survey

CUDA_CHUNK = 288 << 20  # bytes of logits per chunk; the size of the weight if that is more
LARGE_CHUNK = 1 << 30  # the trainer's chunk on CUDA: small compared with the layers, large enough for few chunks
CPU_CHUNK = 4 << 20  # fits into a processor's caches
ALIGN = 128  # a chunk's rows are a multiple of this


def policy_loss(
    hidden: Tensor,
    batch: TokenBatch,
    phase: Phase,
    settings: Settings | None = None,
    *,
    normalizer: Tensor | float,
    head: HeadLike | None = None,
    targets: Tensor | None = None,
    tokens: Tensor | None = None,
    memory: int | None = None,
    survey: Survey | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``poise.objective.policy_loss`` from hidden states instead of log-probabilities: the same loss.

    ``hidden`` is (B, T, d), where hidden[b, t] predicts targets[b, t], or (N, d) for the active tokens
    (``poise.objective.active``) in row order; only these are computed. ``tokens`` (N,) are their flat indices
    ``b·T + t``: pass them if the host knows them; otherwise the host waits for the device. ``head`` and ``targets``
    default to the batch's. ``memory`` limits the bytes of logits per chunk; a single chunk is fastest. Gradients reach
    ``hidden``, and the head's weight (or master) and bias if these require one. This function computes the gradients,
    and ``backward`` only passes them on. Some surrogates need ``survey``: these rows of ``poise.objective.survey``,
    from the log-probabilities of ``token_logp`` or of a scoring pass. The metrics include KL and entropy only if the
    coefficient is not 0, and treat an inactive token as one whose probability has not changed.
    """
    settings = settings or Settings()
    linear = _linear(_of_batch(batch) if head is None else head)
    targets = batch.targets if targets is None else targets
    if targets is None:
        raise ValueError("policy_loss: targets are missing: pass targets=, or a batch that has them")
    if settings.kl_coef and batch.ref_logp is None:
        raise ValueError("policy_loss: kl_coef is not 0, so the batch needs ref_logp")
    _check_shapes(hidden, targets, batch, linear)
    if tokens is None:
        tokens = active(batch, phase, settings).flatten().nonzero()[:, 0]
    states = _computed(hidden.flatten(0, 1)[tokens] if hidden.dim() == 3 else hidden)
    if len(states) != len(tokens):
        raise ValueError(
            f"policy_loss: hidden has {len(states)} rows, but {len(tokens)} tokens are active: "
            "pass (B, T, d), or the states of objective.active(batch, phase, settings) in row order"
        )
    inputs = (states, _learns(linear), linear.bias)
    required = [x is not None and x.requires_grad and torch.is_grad_enabled() for x in inputs]
    gradients = _Gradients(states, linear, required)
    with torch.no_grad(), _no_autocast(states):
        products = _products(states, linear, memory)
        first = next(products, None)  # the device computes this while the host prepares the terms
        all_terms = terms(batch, phase, settings, normalizer, accumulator(states.dtype), survey)
        parts, active_targets = all_terms.at(tokens, ref=settings.kl_coef != 0), targets.flatten()[tokens]
        totals = states.new_zeros(len(rows.TALLY), dtype=parts.share.dtype)
        for part, product in chain([first] if first else [], products):
            row_pass = _row_pass(states, settings.rule)
            totals += row_pass.objective_gradient(product, active_targets[part], linear, parts.at(part), settings)
            gradients.add(part, product)
        absent = {"kl": not settings.kl_coef, "entropy": not settings.entropy_coef}
        metrics = {f"optim/{n}": value for n, value in zip(rows.TALLY, totals, strict=True) if not absent.get(n)}
    loss = metrics["optim/loss"]
    return _KnownGradients.apply(loss, gradients, *inputs), metrics  # type: ignore[no-untyped-call]


def token_logp(hidden: Tensor, targets: Tensor, head: HeadLike, *, memory: int | None = None) -> tuple[Tensor, Tensor]:
    """(N,) log-probabilities of ``targets`` (N,) and entropies, with gradients, for any loss.

    ``hidden`` is (N, d). Only one chunk of ``memory`` bytes has logits at a time; the backward pass recomputes them.
    """
    linear = _linear(head)
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1] or hidden.shape[1] != linear.weight.shape[1]:
        expected = f"(N, {linear.weight.shape[1]}) and targets (N,)"
        raise ValueError(f"token_logp: hidden must be {expected}, got {tuple(hidden.shape)} and {tuple(targets.shape)}")
    return _TwoPass.apply(linear, targets.contiguous(), memory, _computed(hidden), _learns(linear), linear.bias)  # type: ignore[no-untyped-call,no-any-return]


@torch.no_grad()
def min_p_logp(hidden: Tensor, targets: Tensor, head: HeadLike, min_p: float, *, memory: int | None = None) -> Tensor:
    """(N,) log-probabilities of ``targets`` under the distribution filtered by min-p, without gradients.

    The filter removes tokens less likely than ``min_p`` times the likeliest and renormalises the others. A removed
    target gets −inf.
    """
    linear, hidden = _linear(head), _computed(hidden)
    logp = _per_row(hidden)
    with _no_autocast(hidden):
        for part, product in _products(hidden, linear, memory):
            logp[part] = rows.min_p_logp(product.to(logp.dtype), targets[part], linear, min_p)
    return logp


class _KnownGradients(torch.autograd.Function):
    """A loss whose gradients were computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: _Gradients, *inputs: Tensor | None) -> Tensor:  # noqa: ARG004
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(None if grad is None else _scaled(grad, output) for grad in ctx.gradients.take())


class _TwoPass(torch.autograd.Function):
    """Log-probabilities and entropies whose backward pass computes the logits again."""

    @staticmethod
    def forward(ctx: Any, head: Head, targets: Tensor, memory: int | None, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = inputs[0]  # weight and bias follow: autograd needs to see them
        ctx.set_materialize_grads(False)
        # Autograd raises an error if one of these changes before the backward pass.
        ctx.save_for_backward(hidden, targets, head.weight, head.bias)
        ctx.head, ctx.memory = head, memory
        logp, entropy = _per_row(hidden), _per_row(hidden)
        with _no_autocast(hidden):
            for part, product in _products(hidden, head, memory):
                _row_pass(hidden).statistics(product, targets[part], head, logp[part], entropy[part])
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, targets, *_ = ctx.saved_tensors
        head, gradients = ctx.head, _Gradients(hidden, ctx.head, ctx.needs_input_grad[3:])
        grad_logp = torch.zeros_like(_per_row(hidden)) if grad_logp is None else grad_logp.contiguous()
        grad_entropy = None if grad_entropy is None else grad_entropy.contiguous()
        with _no_autocast(hidden):
            for part, product in _products(hidden, head, ctx.memory):
                part_entropy = None if grad_entropy is None else grad_entropy[part]
                _row_pass(hidden).upstream_gradient(product, targets[part], head, grad_logp[part], part_entropy)
                gradients.add(part, product)
        return None, None, None, *gradients.take()


class _Gradients:
    """Gradients of hidden states, weight and bias, accumulated over chunks in float32."""

    def __init__(self, states: Tensor, head: Head, required: Sequence[bool]) -> None:
        self.states, self.weight = states.detach(), head.weight.detach().to(states.dtype)
        inputs = (states, _learns(head), head.bias)
        self.inputs = [x if is_required else None for x, is_required in zip(inputs, required, strict=True)]
        self.gradients: list[Tensor | None] = [torch.empty_like(self.states) if required[0] else None, None, None]
        self.used_up = False

    def add(self, part: slice, gradient: Tensor) -> None:
        """Add the gradient of ``W h`` for a chunk of rows."""
        states = self.states[part]
        grad_states, grad_weight, grad_bias = self.gradients
        if grad_states is not None:
            torch.mm(gradient, self.weight, out=grad_states[part])
        if self.inputs[1] is not None:
            if grad_weight is None:
                single = len(states) == len(self.states)  # one chunk: nothing to sum, so directly in the final dtype
                dtype = self.inputs[1].dtype if single else accumulator(gradient.dtype)
                grad_weight = self.gradients[1] = gradient.new_empty(self.weight.shape, dtype=dtype)
            multiply(grad_weight, gradient.T, states, add=part.start > 0)
        if self.inputs[2] is not None:
            total = gradient.sum(0, dtype=accumulator(gradient.dtype))
            self.gradients[2] = total if grad_bias is None else grad_bias.add_(total)

    def take(self) -> list[Tensor | None]:
        """The gradients, each in the dtype of its input. A second call raises an error."""
        if self.used_up:
            raise RuntimeError("the gradients of this loss are used up: call backward() only once on a loss")
        self.used_up, gradients, self.gradients = True, self.gradients, [None, None, None]
        del self.states, self.weight
        for i, x in enumerate(self.inputs):
            gradient = gradients[i]
            gradients[i] = None if x is None else torch.zeros_like(x) if gradient is None else gradient.to(x.dtype)
        return gradients


def _products(hidden: Tensor, head: Head, memory: int | None) -> Iterator[tuple[slice, Tensor]]:
    """``W h`` for equal chunks of rows, each of at most ``memory`` bytes. All chunks reuse the same buffer."""
    weight, count = head.weight.detach().to(hidden.dtype), len(hidden)
    size = head.vocabulary * hidden.element_size()
    if memory is None:
        memory = max(CUDA_CHUNK, weight.nbytes) if hidden.is_cuda else CPU_CHUNK
    most = max(memory // size, 1)
    rows = -(-count // max(-(-count // most), 1))
    if ALIGN <= rows < count:
        rows = min(-(-rows // ALIGN) * ALIGN, most)
    buffer = hidden.new_empty(rows, head.vocabulary)
    for start in range(0, count, max(rows, 1)):
        part = slice(start, min(start + rows, count))
        yield part, torch.mm(hidden.detach()[part], weight.T, out=buffer[: part.stop - start])


def _row_pass(hidden: Tensor, surrogate: Surrogate | None = None) -> ModuleType:
    """The module for the row pass: the Triton kernels if they support tensor and surrogate, else plain torch."""
    if _device.suits_triton(hidden):
        from poise.head import kernels

        if surrogate is None or kernels.supports(surrogate):
            return kernels
    return rows


def _of_batch(batch: TokenBatch) -> HeadLike:
    if batch.head is None:
        raise ValueError("policy_loss: the head is missing: pass head=, or a batch that has one")
    if isinstance(batch.head, Tensor) and torch.is_grad_enabled():
        raise ValueError("policy_loss: a batch detaches its weight; pass head=weight, or a batch with a Head")
    return batch.head


def _check_shapes(hidden: Tensor, targets: Tensor, batch: TokenBatch, head: Head) -> None:
    rows, width = tuple(batch.mask.shape), head.weight.shape[1]
    if targets.shape != rows:
        raise ValueError(f"policy_loss: targets must be {rows} like the batch, got {tuple(targets.shape)}")
    if hidden.shape not in ((*rows, width), (len(hidden), width)):
        allowed = f"{(*rows, width)}, or (n, {width}) for the active tokens"
        raise ValueError(f"policy_loss: hidden must be {allowed}, got {tuple(hidden.shape)}")


def _no_autocast(values: Tensor) -> torch.autocast:
    """A context with autocast off: this module chooses the precision of each operation."""
    return torch.autocast(values.device.type, enabled=False)


def _linear(head: HeadLike) -> Head:
    linear = as_head(head)
    if not isinstance(linear, Head):
        raise TypeError("a head that is an opaque callable cannot be fused: pass its weight, or a poise.Head")
    return linear


def _learns(head: Head) -> Tensor:
    """The tensor that receives the gradient of the weight."""
    return head.weight if head.master is None else head.master


def _computed(hidden: Tensor) -> Tensor:
    """Convert float16 to float32: float16 cannot represent gradients of logits, which are as small as 1 / tokens."""
    return hidden.float() if hidden.dtype == torch.float16 else hidden


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    if _row_pass(gradient) is rows:
        return gradient.mul_(factor)
    return _row_pass(gradient).scale_(gradient, factor)  # type: ignore[no-any-return]


def _per_row(hidden: Tensor) -> Tensor:
    return torch.empty(len(hidden), dtype=accumulator(hidden.dtype), device=hidden.device)
