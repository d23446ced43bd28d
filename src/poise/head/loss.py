"""Loss and log-probabilities straight from hidden states, in row chunks: logits exist for one chunk at a time.

A token's gradient depends on its own row alone (its log-probability, the old one, its advantage, its weight), so the
gradient of the logits is formed in the forward pass, in their place, and no logits are computed twice: ``6·N·d·V``
FLOP, the three products that there must be. ``token_logp`` is for losses that see more than a token at a time, such as
sequence-level ratios: there the chunks are computed again in the backward pass, ``8·N·d·V``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from poise._lib import triton as _triton
from poise._lib.float32 import accumulator, multiply
from poise.batch import Phase, TokenBatch
from poise.head import rows
from poise.lm_head import Head, HeadLike, as_head
from poise.objective import Settings, active, terms

CUDA_CHUNK = 288 << 20  # bytes of logits at a time, or as much as the weight if that is more
CPU_CHUNK = 4 << 20  # what a processor's caches like
ALIGN = 128  # rows


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
) -> tuple[Tensor, dict[str, Tensor]]:
    """``poise.objective.policy_loss`` from hidden states instead of log-probabilities: the same loss.

    ``hidden`` is (B, T, d), where hidden[b, t] predicts targets[b, t], or (n, d) for the tokens that
    ``poise.objective.active`` names, in row order; no others are computed. ``tokens`` (n,) are their flat indices
    ``b·T + t``: give them where the host knows them already, or it has to wait for the device. ``head`` and ``targets``
    are the batch's own unless given. ``memory`` bounds the bytes of logits that exist at a time: where they all fit
    there is one chunk, which is the fastest. Gradients reach ``hidden``, and the head's weight (or master) and bias
    where they want one; they are computed here, and ``backward`` only hands them on. Of the metrics, KL and entropy are
    there where they have a coefficient; a token that is not active counts as one whose probability has not changed.
    """
    settings = settings or Settings()
    linear = _linear(_of_batch(batch) if head is None else head)
    targets = batch.targets if targets is None else targets
    if targets is None:
        raise ValueError("policy_loss: targets are missing: give targets=, or a batch that has them")
    if settings.kl_coef and batch.ref_logp is None:
        raise ValueError("policy_loss: kl_coef is not 0, so the batch needs ref_logp")
    _check_shapes(hidden, targets, batch, linear)
    if tokens is None:
        tokens = active(batch, phase, settings).flatten().nonzero()[:, 0]
    states = _computed(hidden.flatten(0, 1)[tokens] if hidden.dim() == 3 else hidden)
    if len(states) != len(tokens):
        raise ValueError(
            f"policy_loss: hidden has {len(states)} rows, but {len(tokens)} tokens are active: "
            "give (B, T, d), or the states of objective.active(batch, phase, settings) in row order"
        )
    inputs = (states, _learns(linear), linear.bias)
    wanted = [x is not None and x.requires_grad and torch.is_grad_enabled() for x in inputs]
    gradients = _Gradients(states, linear, wanted)
    with torch.no_grad(), _as_it_is(states):
        products = _products(states, linear, memory)
        first = next(products, None)  # the device has work now, while the host goes on
        every = terms(batch, phase, settings, normalizer, accumulator(states.dtype))
        parts, chosen = every.at(tokens, ref=settings.kl_coef != 0), targets.flatten()[tokens]
        totals = states.new_zeros(len(rows.TALLY), dtype=parts.share.dtype)
        for part, product in chain([first] if first else [], products):
            totals += _row_pass(states).objective_gradient(product, chosen[part], linear, parts.at(part), settings)
            gradients.add(part, product)
        absent = {"kl": not settings.kl_coef, "entropy": not settings.entropy_coef}
        metrics = {f"optim/{n}": value for n, value in zip(rows.TALLY, totals, strict=True) if not absent.get(n)}
    loss = metrics["optim/loss"]
    return _KnownGradients.apply(loss, gradients, *inputs), metrics  # type: ignore[no-untyped-call]


def token_logp(hidden: Tensor, targets: Tensor, head: HeadLike, *, memory: int | None = None) -> tuple[Tensor, Tensor]:
    """(N,) log-probabilities of ``targets`` (N,) and entropies, with gradients, for any loss made of them.

    ``hidden`` is (N, d). Logits exist for one chunk of ``memory`` bytes at a time, and again in the backward pass.
    """
    linear = _linear(head)
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1] or hidden.shape[1] != linear.weight.shape[1]:
        expected = f"(N, {linear.weight.shape[1]}) and targets (N,)"
        raise ValueError(f"token_logp: hidden must be {expected}, got {tuple(hidden.shape)} and {tuple(targets.shape)}")
    return _TwoPass.apply(linear, targets.contiguous(), memory, _computed(hidden), _learns(linear), linear.bias)  # type: ignore[no-untyped-call,no-any-return]


class _KnownGradients(torch.autograd.Function):
    """A loss whose gradients are there already."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: _Gradients, *inputs: Tensor | None) -> Tensor:  # noqa: ARG004
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(None if found is None else _scaled(found, output) for found in ctx.gradients.take())


class _TwoPass(torch.autograd.Function):
    """Log-probabilities and entropies; the backward pass computes the logits again."""

    @staticmethod
    def forward(ctx: Any, head: Head, targets: Tensor, memory: int | None, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = inputs[0]  # beside it what learns, for autograd alone
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, targets, head.weight, head.bias)  # whoever changes them in between is told
        ctx.head, ctx.memory = head, memory
        logp, entropy = _per_row(hidden), _per_row(hidden)
        with _as_it_is(hidden):
            for part, product in _products(hidden, head, memory):
                _row_pass(hidden).statistics(product, targets[part], head, logp[part], entropy[part])
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logp: Tensor | None, of_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, targets, *_ = ctx.saved_tensors
        head, gradients = ctx.head, _Gradients(hidden, ctx.head, ctx.needs_input_grad[3:])
        slope = torch.zeros_like(_per_row(hidden)) if of_logp is None else of_logp.contiguous()
        spread = None if of_entropy is None else of_entropy.contiguous()
        with _as_it_is(hidden):
            for part, product in _products(hidden, head, ctx.memory):
                own = None if spread is None else spread[part]
                _row_pass(hidden).given_gradient(product, targets[part], head, slope[part], own)
                gradients.add(part, product)
        return None, None, None, *gradients.take()


class _Gradients:
    """Gradients for hidden states, weight and bias, gathered chunk by chunk. Sums over chunks are float32."""

    def __init__(self, states: Tensor, head: Head, wanted: Sequence[bool]) -> None:
        self.states, self.weight = states.detach(), head.weight.detach().to(states.dtype)
        places = (states, _learns(head), head.bias)
        self.places = [place if wants else None for place, wants in zip(places, wanted, strict=True)]
        self.found: list[Tensor | None] = [torch.empty_like(self.states) if wanted[0] else None, None, None]
        self.taken = False

    def add(self, part: slice, gradient: Tensor) -> None:
        """Take in the gradient of ``W h`` for a chunk of rows."""
        states = self.states[part]
        of_states, of_weight, of_bias = self.found
        if of_states is not None:
            torch.mm(gradient, self.weight, out=of_states[part])
        if self.places[1] is not None:
            if of_weight is None:
                whole = len(states) == len(self.states)  # nothing to sum: at once what is wanted
                kind = self.places[1].dtype if whole else accumulator(gradient.dtype)
                of_weight = self.found[1] = gradient.new_empty(self.weight.shape, dtype=kind)
            multiply(of_weight, gradient.T, states, add=part.start > 0)
        if self.places[2] is not None:
            total = gradient.sum(0, dtype=accumulator(gradient.dtype))
            self.found[2] = total if of_bias is None else of_bias.add_(total)

    def take(self) -> list[Tensor | None]:
        """The gradients, each in the dtype of what it is for. They are handed out once, not kept."""
        if self.taken:
            raise RuntimeError("the gradients of this loss are gone: backward() can only be called once on it")
        self.taken, found, self.found = True, self.found, [None, None, None]
        del self.states, self.weight
        for i, place in enumerate(self.places):
            gradient = found[i]
            found[i] = (
                None if place is None else torch.zeros_like(place) if gradient is None else gradient.to(place.dtype)
            )
        return found


def _products(hidden: Tensor, head: Head, memory: int | None) -> Iterator[tuple[slice, Tensor]]:
    """``W h`` for equal chunks of rows, each of at most ``memory`` bytes, one after the other in the same place."""
    weight, count = head.weight.detach().to(hidden.dtype), len(hidden)
    size = head.vocabulary * hidden.element_size()
    if memory is None:
        memory = max(CUDA_CHUNK, weight.nbytes) if hidden.is_cuda else CPU_CHUNK
    most = max(memory // size, 1)
    rows = -(-count // max(-(-count // most), 1))
    if ALIGN <= rows < count:
        rows = min(-(-rows // ALIGN) * ALIGN, most)
    place = hidden.new_empty(rows, head.vocabulary)
    for start in range(0, count, max(rows, 1)):
        part = slice(start, min(start + rows, count))
        yield part, torch.mm(hidden.detach()[part], weight.T, out=place[: part.stop - start])


def _row_pass(hidden: Tensor) -> ModuleType:
    """Triton's kernels on CUDA where Triton can be used, else plain torch."""
    if _triton.suits(hidden):
        from poise.head import kernels

        return kernels
    return rows


def _of_batch(batch: TokenBatch) -> HeadLike:
    if batch.head is None:
        raise ValueError("policy_loss: the head is missing: give head=, or a batch that has one")
    if isinstance(batch.head, Tensor) and torch.is_grad_enabled():
        raise ValueError("policy_loss: a batch cuts gradients off a weight; give head=weight, or a batch with a Head")
    return batch.head


def _check_shapes(hidden: Tensor, targets: Tensor, batch: TokenBatch, head: Head) -> None:
    rows, width = tuple(batch.mask.shape), head.weight.shape[1]
    if targets.shape != rows:
        raise ValueError(f"policy_loss: targets must be {rows} as the batch is, got {tuple(targets.shape)}")
    if hidden.shape not in ((*rows, width), (len(hidden), width)):
        allowed = f"{(*rows, width)}, or (n, {width}) for the active tokens"
        raise ValueError(f"policy_loss: hidden must be {allowed}, got {tuple(hidden.shape)}")


def _as_it_is(values: Tensor) -> torch.autocast:
    """No autocast inside: what is computed in which precision is decided here."""
    return torch.autocast(values.device.type, enabled=False)


def _linear(head: HeadLike) -> Head:
    found = as_head(head)
    if not isinstance(found, Head):
        raise TypeError("a head that is an opaque callable cannot be fused: give its weight, or a poise.Head")
    return found


def _learns(head: Head) -> Tensor:
    """Where the gradient of the weight goes."""
    return head.weight if head.master is None else head.master


def _computed(hidden: Tensor) -> Tensor:
    """float16 cannot hold the gradients of logits, which are as small as 1 / tokens: it is computed in float32."""
    return hidden.float() if hidden.dtype == torch.float16 else hidden


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    if _row_pass(gradient) is rows:
        return gradient.mul_(factor)
    return _row_pass(gradient).scale_(gradient, factor)  # type: ignore[no-any-return]


def _per_row(hidden: Tensor) -> Tensor:
    return torch.empty(len(hidden), dtype=accumulator(hidden.dtype), device=hidden.device)
