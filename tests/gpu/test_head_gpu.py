"""The Triton row pass against float64 autograd, and bfloat16 against the plain bfloat16 path."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from poise import Head, Phase, TokenBatch, objective, regulators, surrogates
from poise.head import policy_loss, token_logp
from poise.objective import AGGREGATIONS, KL_ESTIMATORS, Settings
from support.heads import HEADS, SURROGATES, error, fused, gradients, plain, problem


def moved(batch: TokenBatch, dtype: torch.dtype | None = None) -> TokenBatch:
    """The batch on the GPU, without hidden states and head."""
    fields: dict[str, Any] = {}
    for name in TokenBatch.__dataclass_fields__:
        value = getattr(batch, name)
        if isinstance(value, Tensor) and name not in ("hidden", "head"):
            fields[name] = value.cuda().to(dtype) if dtype and value.is_floating_point() else value.cuda()
    return TokenBatch(**fields)


def on_gpu(dtype: torch.dtype, **kind: Any) -> tuple[Tensor, Head, TokenBatch]:
    hidden, head, batch = problem(dtype, **kind)
    bias = None if head.bias is None else head.bias.detach().cuda().requires_grad_()
    moved_head = Head(head.weight.detach().cuda().requires_grad_(), bias, head.temperature, head.scale, head.softcap)
    return hidden.detach().cuda().requires_grad_(), moved_head, moved(batch)


def exact(hidden: Tensor, head: Head) -> tuple[Tensor, Head]:
    bias = None if head.bias is None else head.bias.detach().double().requires_grad_()
    weight = head.weight.detach().double().requires_grad_()
    return hidden.detach().double().requires_grad_(), Head(weight, bias, head.temperature, head.scale, head.softcap)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("memory", [None, 7 * 50 * 4])
def test_float32_within_1e5_of_float64(kind: str, memory: int | None) -> None:
    settings = Settings(kl_coef=0.05, entropy_coef=0.02)
    hidden, head, batch = on_gpu(torch.float32, rows=32, width=40, **HEADS[kind])
    phase = Phase.of(batch, torch.rand(batch.mask.shape, device="cuda"))
    found = fused(hidden, head, batch, phase, settings, memory=memory)
    twin, twin_head = exact(hidden, head)
    expected = plain(twin, twin_head, batch, phase, settings)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name].double(), value.double(), rtol=1e-5, atol=1e-6, msg=name)
    for mine, reference in zip(gradients(found[0], hidden, head), gradients(expected[0], twin, twin_head), strict=True):
        assert error(mine, reference) < 1e-5


@pytest.mark.parametrize(("aggregation", "kl"), list(product(AGGREGATIONS, KL_ESTIMATORS)))
@pytest.mark.parametrize("name", sorted(set(regulators.TABLE) - {"nthr"}))
def test_every_regulator_and_aggregation(name: str, aggregation: str, kl: str) -> None:
    settings = Settings(kl=kl, kl_coef=0.01, aggregation=aggregation, max_length=12, dual_clip=1.5)
    hidden, head, batch = on_gpu(torch.float32, seed=3)
    twin, twin_head = exact(hidden, head)
    for phase in regulators.parse(name)(batch):
        found, expected = (
            gradients(way(h, w, batch, phase, settings)[0], h, w)
            for way, h, w in ((fused, hidden, head), (plain, twin, twin_head))
        )
        for mine, reference in zip(found, expected, strict=True):
            assert error(mine, reference) < 1e-5


@pytest.mark.parametrize("far", [0.0, 2.0, 8.0])
@pytest.mark.parametrize("name", SURROGATES)
def test_every_surrogate(name: str, far: float) -> None:
    """Loss, metrics and gradients, near the old policy and far from it."""
    settings = Settings(surrogate=SURROGATES[name], kl_coef=0.05, entropy_coef=0.02)
    from poise.head import kernels  # needs Triton, which a machine without CUDA may lack

    assert kernels.supports(settings.rule)
    hidden, head, batch = on_gpu(torch.float32, rows=32, width=40)
    noise = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(5)).cuda()
    batch = replace(batch, old_logp=(batch.old_logp + far * noise).clamp(max=0))
    twin, twin_head = exact(hidden, head)
    phases = [*regulators.parse("ar | lopti")(batch), *regulators.parse("entropy(quantile=0.5)")(batch)]
    for phase in phases:  # with the last one, tokens without weight carry KL
        found = fused(hidden, head, batch, phase, settings, memory=7 * 50 * 4)
        expected = plain(twin, twin_head, batch, phase, settings)
        for metric, value in found[1].items():
            torch.testing.assert_close(value.double(), expected[1][metric], rtol=1e-5, atol=1e-5, msg=metric)
        ours, theirs = gradients(found[0], hidden, head), gradients(expected[0], twin, twin_head)
        for mine, reference in zip(ours, theirs, strict=True):
            assert error(mine, reference) < 2e-5


def test_a_surrogate_of_ones_own_is_left_to_plain_torch() -> None:
    class Linear(surrogates.Surrogate):
        def value(self, logp: Tensor, parts: surrogates.Terms) -> Tensor:
            return parts.log_ratio(logp) * parts.advantages

    settings = Settings(surrogate=Linear(), kl_coef=0.05)
    from poise.head import kernels

    assert not kernels.supports(settings.rule)
    hidden, head, batch = on_gpu(torch.float32)
    twin, twin_head = exact(hidden, head)
    ours = gradients(fused(hidden, head, batch, Phase.of(batch), settings)[0], hidden, head)
    theirs = gradients(plain(twin, twin_head, batch, Phase.of(batch), settings)[0], twin, twin_head)
    for mine, reference in zip(ours, theirs, strict=True):
        assert error(mine, reference) < 1e-5


@pytest.mark.parametrize("far", [0.5, 3.0, 8.0])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_every_clip_is_the_objectives(far: float, dual_clip: float | None) -> None:
    """Ratios and KL gaps far outside the clips, the ±20 and the ±5 included."""
    settings = Settings(dual_clip=dual_clip, kl_coef=0.1)
    hidden, head, batch = on_gpu(torch.float32, rows=64)
    noise = far * torch.randn(batch.mask.shape, device="cuda")
    wild = TokenBatch(
        (batch.old_logp + noise).clamp(max=0) - (far > 5) * 15 * (noise > 8), batch.mask, batch.advantages,
        ref_logp=batch.ref_logp - noise, targets=batch.targets,
    )  # fmt: skip
    twin, twin_head = exact(hidden, head)
    mine = gradients(fused(hidden, head, wild, Phase.of(wild), settings)[0], hidden, head)
    reference = gradients(plain(twin, twin_head, wild, Phase.of(wild), settings)[0], twin, twin_head)
    assert error(mine[0], reference[0]) < 1e-5


@pytest.mark.parametrize(("vocabulary", "width"), [(49152, 576), (151936, 256), (8191, 64), (100, 32)])
@pytest.mark.parametrize("confidence", [1.0, 6.0])
def test_bfloat16_errs_no_more_than_twice_the_plain_path(vocabulary: int, width: int, confidence: float) -> None:
    """Gradients of hidden states, all and the confident ones alone, where 1 − p cancels, and of the weight."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    n = 512
    weight = (normal(vocabulary, width) * width**-0.5).bfloat16().requires_grad_()
    targets = torch.randint(vocabulary, (n,), generator=generator, device="cuda")
    # Half of the states point to their target, more or less: probabilities from 1e-6 to 1 − 1e-6.
    pull = (
        confidence
        * 6
        * torch.rand(n, 1, generator=generator, device="cuda")
        * (torch.arange(n, device="cuda") % 2)[:, None]
    )
    hidden = (normal(n, width) + pull * weight.detach()[targets].float()).bfloat16().requires_grad_()
    twin, twin_head = exact(hidden, Head(weight))
    logs = twin_head(twin).log_softmax(-1)
    logp = logs.gather(1, targets[:, None])[:, 0]
    batch = TokenBatch(
        (logp.detach() + 0.1 * normal(n)).float()[None], torch.ones(1, n, dtype=torch.bool, device="cuda"),
        normal(1, n), targets=targets[None],
    )  # fmt: skip
    phase, settings = Phase.of(batch), Settings(dual_clip=None)

    def loss(values: Tensor) -> Tensor:
        return objective.policy_loss(values[None], batch, phase, settings, normalizer=1.0)[0]

    reference = torch.autograd.grad(loss(logp), (twin, twin_head.weight))
    rough = (hidden @ weight.T).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    naive = torch.autograd.grad(loss(rough), (hidden, weight))
    for memory in (None, 100 * vocabulary * 2):
        value, _ = policy_loss(hidden[None], batch, phase, settings, normalizer=1.0, head=Head(weight), memory=memory)
        mine = torch.autograd.grad(value, (hidden, weight))
        for ours, theirs, truth in zip(mine, naive, reference, strict=True):
            assert error(ours, truth) <= 2 * error(theirs, truth)
        sure = logp > -0.01
        if sure.any():
            assert error(mine[0][sure], reference[0][sure]) <= 2 * error(naive[0][sure], reference[0][sure])


@pytest.mark.parametrize("kind", HEADS)
def test_two_pass(kind: str) -> None:
    hidden, head, batch = on_gpu(torch.float32, rows=16, **HEADS[kind])
    assert batch.targets is not None
    targets = batch.targets.flatten()
    twin, twin_head = exact(hidden, head)
    logs = twin_head(twin.flatten(0, 1)).log_softmax(-1)
    expected = logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)
    found = token_logp(hidden.flatten(0, 1), targets, head, memory=7 * 50 * 4)
    for mine, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), reference, rtol=1e-5, atol=1e-5)
    ours = gradients((found[0].exp() + found[1].sin()).sum(), hidden, head)
    theirs = gradients((expected[0].exp() + expected[1].sin()).sum(), twin, twin_head)
    for mine, reference in zip(ours, theirs, strict=True):
        assert error(mine, reference) < 1e-5


def test_a_confident_token_keeps_its_digits() -> None:
    """p = 1 − 1e-9: in float32 log p and 1 − p come out right, not as 0."""
    weight = torch.eye(64, 64, device="cuda").requires_grad_()
    hidden = torch.zeros(1, 64, device="cuda")
    hidden[0, 3] = 25.0
    targets = torch.tensor([3], device="cuda")
    logp, entropy = token_logp(hidden.requires_grad_(), targets, weight)
    logs = (hidden.detach().double() @ weight.detach().double().T).log_softmax(-1)
    torch.testing.assert_close(logp.double(), logs[:, 3], rtol=1e-5, atol=0)
    torch.testing.assert_close(entropy.double(), -(logs.exp() * logs).sum(-1), rtol=1e-5, atol=0)
    (gradient,) = torch.autograd.grad(logp.sum(), hidden)
    torch.testing.assert_close(gradient[0, 3].double(), 1 - logs[0, 3].exp(), rtol=1e-5, atol=0)


def test_a_scaled_loss_scales_its_gradients() -> None:
    hidden, head, batch = on_gpu(torch.bfloat16)
    results = []
    for factor in (1.0, 2.0):
        loss, _ = fused(hidden, head, batch, Phase.of(batch), Settings())
        results.append(gradients(factor * loss, hidden, head))
    for once, twice in zip(*results, strict=True):
        torch.testing.assert_close(2 * once, twice, rtol=0, atol=0)
