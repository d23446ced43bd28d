"""A head, hidden states and a batch to test on; the loss by way of all logits, and fused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from poise import Head, Phase, TokenBatch, objective
from poise.head import policy_loss, token_logp
from poise.objective import Settings

D, V = 16, 50
SURROGATES = {  # by name, with settings of which every branch occurs in ``problem``
    "clip": "clip",
    "cispo": "cispo(low=0.8, high=1.2)",
    "gspo": "gspo(clip_low=0.02, clip_high=0.02)",
    "sapo": "sapo",
    "dppo": "dppo(delta=0.02, cap=1.1, square=0.01)",
    "kl-cov": "kl-cov(share=0.2)",
    "lp-reg": "lp-reg(share=0.5, clip_high=0.2)",
}
HEADS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "scaled": {"scale": 0.25, "temperature": 1.3},
    "softcap": {"softcap": 3.0, "temperature": 0.8},
    "bias": {"bias": True, "scale": 0.5, "softcap": 5.0},
}


def problem(
    dtype: torch.dtype = torch.float64, *, rows: int = 8, width: int = 12, seed: int = 0, **kind: Any
) -> tuple[Tensor, Head, TokenBatch]:
    """Hidden states, a head and a batch of sampled tokens whose policy has moved a little since."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight = normal(rows, width, D), normal(V, D)
    bias = (normal(V)).to(dtype).requires_grad_() if kind.pop("bias", False) else None
    head = Head(weight.to(dtype).requires_grad_(), bias, **kind)
    with torch.no_grad():
        logs = Head(weight, None if bias is None else bias.double(), **kind)(hidden.flatten(0, 1)).log_softmax(-1)
    targets = torch.multinomial(logs.exp(), 1, generator=generator)
    logp = logs.gather(1, targets).view(rows, width)
    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    lengths[0] = width
    entropy = -(logs.exp() * logs).sum(-1).view(rows, width)
    batch = TokenBatch(
        old_logp=(logp + 0.3 * normal(rows, width)).clamp(max=0).to(dtype),
        mask=torch.arange(width) < lengths[:, None],
        advantages=normal(rows).to(dtype),
        groups=torch.arange(rows) // 4,
        correct=torch.arange(rows) % 2 == 0,
        ref_logp=(logp + 0.3 * normal(rows, width)).to(dtype),
        entropy=entropy.to(dtype),
        hidden=hidden.to(dtype),
        head=head,
        targets=targets.view(rows, width),
        min_p_logp=(logp + 0.2 + 0.3 * torch.rand(rows, width, generator=generator)).to(dtype),
    )
    return hidden.to(dtype).requires_grad_(), head, batch


def plain(hidden: Tensor, head: Head, batch: TokenBatch, phase: Phase, settings: Settings) -> tuple[Tensor, Any]:
    """The same loss by way of all logits."""
    assert batch.targets is not None
    logs = head(hidden.flatten(0, 1)).view(*batch.mask.shape, -1).log_softmax(-1)
    logp = logs.gather(-1, batch.targets[..., None])[..., 0]
    entropy = -(logs.exp() * logs).sum(-1)
    return objective.policy_loss(
        logp, batch, phase, settings, normalizer=objective.normalizer(batch, settings),
        entropy=entropy if settings.entropy_coef else None, survey=objective.survey(logp, batch, settings),
    )  # fmt: skip


def fused(hidden: Tensor, head: Head, batch: TokenBatch, phase: Phase, settings: Settings, **kw: Any) -> Any:
    """The loss from hidden states, without all logits at once. A survey comes from ``token_logp``."""
    taken = None
    if settings.rule.surveyed:
        assert batch.targets is not None
        logp, _ = token_logp(hidden.detach().flatten(0, 1), batch.targets.flatten(), head)
        taken = objective.survey(logp.view(batch.mask.shape), batch, settings)
    return policy_loss(
        hidden, batch, phase, settings, normalizer=objective.normalizer(batch, settings), head=head, survey=taken, **kw
    )


def gradients(loss: Tensor, hidden: Tensor, head: Head) -> list[Tensor]:
    """The gradients of a loss: of hidden states, weight and, where there is one, bias."""
    return list(torch.autograd.grad(loss, [x for x in (hidden, head.weight, head.bias) if x is not None]))


def assert_same(
    found: tuple[Tensor, Any], expected: tuple[Tensor, Any], hidden: Tensor, head: Head, tol: float
) -> None:
    """Assert that two losses, their metrics and their gradients are the same within ``tol``."""
    torch.testing.assert_close(found[0], expected[0], rtol=tol, atol=tol)
    assert expected[1].keys() - found[1].keys() <= {"optim/kl"}  # which is left out where it has no coefficient
    for name, value in found[1].items():
        torch.testing.assert_close(value, expected[1][name], rtol=tol, atol=tol, msg=name)
    ours, theirs = gradients(found[0], hidden, head), gradients(expected[0], hidden, head)
    for mine, reference in zip(ours, theirs, strict=True):
        assert reference.abs().max() > 0
        assert error(mine, reference) < tol


def error(found: Tensor, reference: Tensor) -> float:
    """The relative error, in the Euclidean norm."""
    return float((found.double() - reference.double()).norm() / reference.double().norm())
