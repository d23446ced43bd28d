"""The row pass in plain torch: from ``W h`` of some tokens to their log-probabilities, entropies and gradients.

This is the reference for the Triton kernels (``kernels.py`` has the same functions), and is used without CUDA. All
arithmetic is at least float32. Shapes: N tokens of one chunk, V vocabulary size.
"""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

from poise.lm_head import Head
from poise.objective import Settings, loss_and_metrics
from poise.surrogates import Terms

TALLY = ("loss", "policy_loss", "clip_low", "clip_high", "drift", "kl", "entropy")  # metrics, summed over tokens


def statistics(product: Tensor, targets: Tensor, head: Head, logp: Tensor, entropy: Tensor) -> None:
    """Write the log-probabilities and entropies (N,) of ``W h`` (N, V) into ``logp`` and ``entropy``."""
    token_logp, token_entropy = _logp_entropy(product.to(logp.dtype), targets, head)
    assert token_entropy is not None
    logp.copy_(token_logp)
    entropy.copy_(token_entropy)


def objective_gradient(product: Tensor, targets: Tensor, head: Head, parts: Terms, settings: Settings) -> Tensor:
    """Return the sums named by ``TALLY``; overwrite ``product`` (N, V) with the loss gradient at ``W h``."""
    with torch.enable_grad():
        leaf = product.to(parts.share.dtype).detach().requires_grad_()
        logp, entropy = _logp_entropy(leaf, targets, head, with_entropy=settings.entropy_coef != 0)
        loss, metrics = loss_and_metrics(logp, entropy, parts, settings)
        (gradient,) = torch.autograd.grad(loss, leaf)
    product.copy_(gradient)
    return torch.stack([metrics.get(f"optim/{name}", torch.zeros_like(loss)) for name in TALLY]).detach()


def upstream_gradient(
    product: Tensor, targets: Tensor, head: Head, grad_logp: Tensor, grad_entropy: Tensor | None
) -> None:
    """Overwrite ``product`` = ``W h`` (N, V) with its gradient.

    ``grad_logp`` and ``grad_entropy`` (N,) are the gradients of the log-probability and the entropy.
    """
    with torch.enable_grad():
        leaf = product.to(grad_logp.dtype).detach().requires_grad_()
        logp, entropy = _logp_entropy(leaf, targets, head, with_entropy=grad_entropy is not None)
        outputs = [(logp, grad_logp)]
        if entropy is not None and grad_entropy is not None:
            outputs.append((entropy, grad_entropy))
        (gradient,) = torch.autograd.grad([o for o, _ in outputs], leaf, [g for _, g in outputs])
    product.copy_(gradient)


def min_p_logp(product: Tensor, targets: Tensor, head: Head, min_p: float) -> Tensor:
    """(N,) log-probabilities of the targets under the distribution filtered by min-p; −inf for removed targets."""
    log_probs = head.finish(product).log_softmax(-1)
    left_out = log_probs < log_probs.amax(-1, keepdim=True) + log(min_p)
    log_probs = log_probs.masked_fill_(left_out, -torch.inf)
    return log_probs.gather(1, targets[:, None])[:, 0] - log_probs.logsumexp(-1)


def _logp_entropy(
    product: Tensor, targets: Tensor, head: Head, with_entropy: bool = True
) -> tuple[Tensor, Tensor | None]:
    log_probs = head.finish(product).log_softmax(-1)
    logp = log_probs.gather(1, targets[:, None])[:, 0]
    if not with_entropy:
        return logp, None
    finite = log_probs.clamp(min=torch.finfo(log_probs.dtype).min)  # a logit of -inf adds 0, not 0 · inf
    return logp, -torch.linalg.vecdot(log_probs.exp(), finite)
