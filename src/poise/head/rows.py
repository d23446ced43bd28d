"""The row pass in plain torch: from ``W h`` of some tokens to their log-probabilities, entropies and gradients.

The reference for the Triton kernels, and what runs where there is no CUDA. Everything is at least float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from poise.lm_head import Head
from poise.objective import Settings, Terms, loss_and_metrics

TALLY = ("loss", "policy_loss", "clip_low", "clip_high", "drift", "kl", "entropy")  # metrics, added up over tokens


def statistics(product: Tensor, targets: Tensor, head: Head, logp: Tensor, entropy: Tensor) -> None:
    """Log-probabilities and entropies from ``W h``."""
    own, spread = _scores(product.to(logp.dtype), targets, head)
    assert spread is not None
    logp.copy_(own)
    entropy.copy_(spread)


def objective_gradient(product: Tensor, targets: Tensor, head: Head, parts: Terms, settings: Settings) -> Tensor:
    """The sums of what ``TALLY`` names; the gradient with respect to ``W h`` is left in its place."""
    with torch.enable_grad():
        leaf = product.to(parts.share.dtype).detach().requires_grad_()
        own, spread = _scores(leaf, targets, head, entropy=settings.entropy_coef != 0)
        loss, metrics = loss_and_metrics(own, spread, parts, settings)
        (gradient,) = torch.autograd.grad(loss, leaf)
    product.copy_(gradient)
    return torch.stack([metrics.get(f"optim/{name}", torch.zeros_like(loss)) for name in TALLY]).detach()


def given_gradient(product: Tensor, targets: Tensor, head: Head, slope: Tensor, spread: Tensor | None) -> None:
    """The gradient with respect to ``W h`` for given ones of log-probabilities and entropies, in its place."""
    with torch.enable_grad():
        leaf = product.to(slope.dtype).detach().requires_grad_()
        own, found = _scores(leaf, targets, head, entropy=spread is not None)
        outputs = [(own, slope)] if spread is None or found is None else [(own, slope), (found, spread)]
        (gradient,) = torch.autograd.grad([o for o, _ in outputs], leaf, [g for _, g in outputs])
    product.copy_(gradient)


def _scores(product: Tensor, targets: Tensor, head: Head, entropy: bool = True) -> tuple[Tensor, Tensor | None]:
    logs = head.finish(product).log_softmax(-1)
    own = logs.gather(1, targets[:, None])[:, 0]
    return own, -torch.linalg.vecdot(logs.exp(), logs) if entropy else None
