"""The fused head against float64 autograd of the plain formula, on the CPU (the Triton part is tested in tests/gpu)."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from poise import Head, Phase, objective, regulators
from poise.head import loss, min_p_logp, policy_loss, rows, token_logp
from poise.objective import AGGREGATIONS, KL_ESTIMATORS, Settings
from poise.surrogates import Clip, Sapo
from support.heads import HEADS, SURROGATES, D, V, assert_same, error, fused, gradients, plain, problem


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("memory", [None, 7 * V * 8, 1])
def test_gradients_equal_autograd(kind: str, memory: int | None) -> None:
    hidden, head, batch = problem(**HEADS[kind])
    settings = Settings(kl_coef=0.05, entropy_coef=0.02)
    phase = Phase.of(batch, torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(1)).double())
    found = fused(hidden, head, batch, phase, settings, memory=memory)
    assert_same(found, plain(hidden, head, batch, phase, settings), hidden, head, 1e-12)


@pytest.mark.parametrize(("aggregation", "kl"), list(product(AGGREGATIONS, KL_ESTIMATORS)))
@pytest.mark.parametrize("name", sorted(regulators.TABLE))
def test_every_regulator_and_aggregation(name: str, aggregation: str, kl: str) -> None:
    settings = Settings(kl=kl, kl_coef=0.01, aggregation=aggregation, max_length=12)
    hidden, head, batch = problem(seed=3)
    for phase in regulators.parse(name)(batch):
        found, expected = (way(hidden, head, batch, phase, settings) for way in (fused, plain))
        assert_same(found, expected, hidden, head, 1e-11)


@pytest.mark.parametrize("far", [0.0, 2.0])
@pytest.mark.parametrize("memory", [None, 7 * V * 8])
@pytest.mark.parametrize("name", SURROGATES)
def test_every_surrogate(name: str, memory: int | None, far: float) -> None:
    settings = Settings(surrogate=SURROGATES[name], kl_coef=0.05, entropy_coef=0.02)
    hidden, head, batch = problem(seed=3, rows=16)
    noise = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    batch = replace(batch, old_logp=(batch.old_logp + far * noise).clamp(max=0))
    phases = [*regulators.parse("ar | lopti")(batch), *regulators.parse("entropy(quantile=0.5)")(batch)]
    for phase in phases:  # with the last one, tokens without weight carry KL
        found = fused(hidden, head, batch, phase, settings, memory=memory)
        assert_same(found, plain(hidden, head, batch, phase, settings), hidden, head, 1e-11)


def test_a_surrogate_that_needs_a_survey_is_refused_without_one() -> None:
    hidden, head, batch = problem()
    with pytest.raises(ValueError, match="survey="):
        policy_loss(hidden, batch, Phase.of(batch), Settings(surrogate="gspo"), normalizer=1.0, head=head)


def test_a_kernel_without_the_surrogate_leaves_it_to_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels compute what they have; a surrogate of one's own must not come out as another."""
    kernels = SimpleNamespace(supports=lambda rule: isinstance(rule, Clip))
    monkeypatch.setitem(sys.modules, "poise.head.kernels", kernels)
    monkeypatch.setattr("poise.head.kernels", kernels, raising=False)
    monkeypatch.setattr("poise._lib.device.suits_triton", lambda _: True)
    states = torch.zeros(1)
    assert loss._row_pass(states, Clip()) is kernels
    assert loss._row_pass(states, Sapo()) is rows
    assert loss._row_pass(states) is kernels


@pytest.mark.parametrize("kind", HEADS)
def test_min_p(kind: str) -> None:
    """Against the definition; the likeliest word is always kept, and the kept words' probabilities add up to 1."""
    hidden, head, batch = problem(**HEADS[kind])
    states, targets = hidden.flatten(0, 1), batch.targets.flatten()
    probs = head(states).softmax(-1)
    kept = probs * (probs >= 0.1 * probs.amax(-1, keepdim=True))
    expected = (kept / kept.sum(-1, keepdim=True)).log().gather(1, targets[:, None])[:, 0]
    assert expected.isneginf().any()
    assert (expected > -3).any()
    torch.testing.assert_close(min_p_logp(states, targets, head, 0.1, memory=7 * V * 8), expected)
    torch.testing.assert_close(min_p_logp(states, targets, head, 1e-40), token_logp(states, targets, head)[0])


def test_sampler_correction_is_applied() -> None:
    hidden, head, batch = problem()
    batch = replace(batch, sampler_logp=batch.old_logp - 0.2, groups=None)
    phase = Phase.of(batch)
    assert_same(
        fused(hidden, head, batch, phase, Settings()),
        plain(hidden, head, batch, phase, Settings()),
        hidden,
        head,
        1e-12,
    )


def test_float32_is_within_1e5_of_float64() -> None:
    settings = Settings(kl_coef=0.01, entropy_coef=0.01)
    results = []
    for dtype in (torch.float32, torch.float64):
        hidden, head, batch = problem(torch.float32, rows=32, width=40)
        if dtype == torch.float64:
            hidden = hidden.detach().double().requires_grad_()
            head = Head(head.weight.detach().double().requires_grad_())
        loss, _ = fused(hidden, head, batch, Phase.of(batch), settings)
        results.append(gradients(loss, hidden, head))
    for mine, reference in zip(*results, strict=True):
        assert error(mine, reference) < 1e-5


def test_bfloat16_errs_no_more_than_twice_the_plain_path() -> None:
    settings = Settings(kl_coef=0.01)
    hidden, head, batch = problem(torch.bfloat16, rows=32, width=40)
    phase = Phase.of(batch)
    exact_hidden = hidden.detach().double().requires_grad_()
    exact_head = Head(head.weight.detach().double().requires_grad_())
    exact = gradients(plain(exact_hidden, exact_head, batch, phase, settings)[0], exact_hidden, exact_head)

    logs = head(hidden.flatten(0, 1)).float().view(*batch.mask.shape, -1).log_softmax(-1)
    logp = logs.gather(-1, batch.targets[..., None])[..., 0]
    loss, _ = objective.policy_loss(logp, batch, phase, settings, normalizer=objective.normalizer(batch, settings))
    naive = gradients(loss, hidden, head)
    ours = gradients(fused(hidden, head, batch, phase, settings)[0], hidden, head)
    for mine, theirs, reference in zip(ours, naive, exact, strict=True):
        assert error(mine, reference) <= 2 * error(theirs, reference)


def test_only_active_tokens_are_computed_and_asked_for() -> None:
    hidden, head, batch = problem()
    phase = regulators.parse("lopti")(batch)[0]
    tokens = objective.active(batch, phase, Settings())
    assert 0 < tokens.sum() < batch.mask.sum()
    whole = fused(hidden, head, batch, phase, Settings())
    few = fused(hidden[tokens], head, batch, phase, Settings())
    torch.testing.assert_close(whole[0], few[0])
    poisoned = hidden.detach().clone()
    poisoned[~tokens] = torch.nan
    torch.testing.assert_close(fused(poisoned, head, batch, phase, Settings())[0], whole[0])
    with pytest.raises(ValueError, match="tokens are active"):
        fused(hidden[tokens][:-1], head, batch, phase, Settings())


def test_frozen_parts_get_no_gradient() -> None:
    hidden, head, batch = problem()
    frozen = Head(head.weight.detach())
    loss, _ = fused(hidden, frozen, batch, Phase.of(batch), Settings())
    loss.backward()
    assert frozen.weight.grad is None
    assert hidden.grad is not None
    loss, _ = fused(hidden.detach(), head, batch, Phase.of(batch), Settings())
    loss.backward()
    reference = plain(hidden.detach(), head, batch, Phase.of(batch), Settings())[0]
    torch.testing.assert_close(head.weight.grad, torch.autograd.grad(reference, head.weight)[0])
    with torch.no_grad():
        assert not fused(hidden, head, batch, Phase.of(batch), Settings())[0].requires_grad


def test_a_master_gets_the_gradient_in_float32() -> None:
    hidden, head, batch = problem(torch.bfloat16)
    master = head.weight.detach().float().requires_grad_()
    with_master = Head(head.weight, master=master)
    loss, _ = fused(hidden, with_master, batch, Phase.of(batch), Settings(), memory=7 * V * 2)
    (3 * loss).backward()
    assert head.weight.grad is None
    assert master.grad is not None
    assert master.grad.dtype == torch.float32
    exact = Head(head.weight.detach().double().requires_grad_())
    reference, _ = plain(hidden.detach().double(), exact, batch, Phase.of(batch), Settings())
    assert error(master.grad, 3 * torch.autograd.grad(reference, exact.weight)[0]) < 0.02


def test_tied_embeddings_add_up() -> None:
    _, head, batch = problem()
    ids = torch.randint(V, batch.mask.shape, generator=torch.Generator().manual_seed(5))
    results = []
    for way in (fused, plain):
        hidden = torch.nn.functional.embedding(ids, head.weight)
        results.append(torch.autograd.grad(way(hidden, head, batch, Phase.of(batch), Settings())[0], head.weight)[0])
    torch.testing.assert_close(*results)


def test_the_loss_can_be_scaled_but_not_walked_twice() -> None:
    hidden, head, batch = problem()
    loss, _ = fused(hidden, head, batch, Phase.of(batch), Settings())
    (loss / 4).backward(retain_graph=True)
    reference = plain(hidden, head, batch, Phase.of(batch), Settings())[0]
    torch.testing.assert_close(hidden.grad, torch.autograd.grad(reference / 4, hidden)[0])
    with pytest.raises(RuntimeError, match=r"call backward\(\) only once"):
        loss.backward()


def test_no_active_token_gives_a_loss_of_zero() -> None:
    hidden, head, batch = problem()
    loss, _ = fused(hidden, head, batch, Phase.of(batch, 0.0), Settings())
    loss.backward()
    assert loss == 0
    assert not hidden.grad.any()
    assert not head.weight.grad.any()


def test_what_cannot_be_fused_says_so() -> None:
    hidden, _, batch = problem()
    with pytest.raises(TypeError, match="opaque"):
        fused(hidden, lambda h: h, batch, Phase.of(batch), Settings())
    bare = replace(batch, head=None, targets=None, hidden=None)
    with pytest.raises(ValueError, match="head"):
        fused(hidden, None, bare, Phase.of(batch), Settings())
    with pytest.raises(ValueError, match="targets"):
        fused(hidden, Head(torch.zeros(V, D)), bare, Phase.of(batch), Settings())


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("parts", [("logp",), ("entropy",), ("logp", "entropy")])
def test_two_pass_for_any_loss(kind: str, parts: tuple[str, ...]) -> None:
    """A sequence-level ratio (GSPO), which no single token's gradient can be formed for in one pass."""
    hidden, head, batch = problem(**HEADS[kind])
    rows = hidden.flatten(0, 1)
    targets = batch.targets.flatten()

    def loss(logp: Tensor, entropy: Tensor) -> Tensor:
        gap = torch.where(batch.mask, logp.view(batch.mask.shape) - batch.old_logp, 0.0)
        ratio = (gap.sum(1) / batch.lengths).exp()
        pieces = {"logp": -(ratio * batch.advantages).sum(), "entropy": (entropy.sin()).sum()}
        return torch.stack([pieces[part] for part in parts]).sum()

    logs = head(rows).log_softmax(-1)
    plain_scores = logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)
    found = token_logp(rows, targets, head, memory=7 * V * 8)
    for mine, reference in zip(found, plain_scores, strict=True):
        torch.testing.assert_close(mine, reference)
    ours, theirs = (gradients(loss(*scores), hidden, head) for scores in (found, plain_scores))
    for mine, reference in zip(ours, theirs, strict=True):
        assert error(mine, reference) < 1e-12


def test_half_precision_that_would_underflow_is_computed_in_float32() -> None:
    hidden, head, batch = problem(torch.float16)
    norm = 1e7  # a gradient of 1e-7 is below what float16 can hold
    weight = head.weight.detach().float().requires_grad_()
    loss, _ = policy_loss(hidden, batch, Phase.of(batch), Settings(), normalizer=norm, head=Head(weight))
    (found,) = torch.autograd.grad(loss, weight)
    exact = Head(weight.detach().double().requires_grad_())
    expected = plain(hidden.detach().double(), exact, batch, Phase.of(batch), Settings())[0]
    scale = float(objective.normalizer(batch, Settings())) / norm
    assert error(found, scale * torch.autograd.grad(expected, exact.weight)[0]) < 1e-3
    logp, _ = token_logp(hidden.flatten(0, 1), batch.targets.flatten(), head.weight)
    assert logp.dtype == torch.float32


def test_tokens_without_advantage_count_as_unchanged() -> None:
    hidden, head, batch = problem()
    some = replace(batch, advantages=batch.advantages * (torch.arange(8) % 3 > 0), ref_logp=None, hidden=None)
    phase, settings = Phase.of(some), Settings()
    found, metrics = fused(hidden, head, some, phase, settings)
    expected, reference = plain(hidden, head, some, phase, settings)
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(gradients(found, hidden, head), gradients(expected, hidden, head), strict=True):
        assert error(mine, theirs) < 1e-12
    assert metrics["optim/drift"] < reference["optim/drift"]
    logs = head(hidden.flatten(0, 1)).view(*some.mask.shape, -1).log_softmax(-1)
    now = logs.gather(-1, some.targets[..., None])[..., 0].detach()
    unchanged = torch.where(some.token_advantages != 0, now, some.old_logp)
    norm = objective.normalizer(some, settings)
    _, same = objective.policy_loss(unchanged, some, phase, settings, normalizer=norm)
    for name, value in metrics.items():
        torch.testing.assert_close(value, same[name], msg=name)


def test_confident_tokens_in_bfloat16() -> None:
    """Where 1 − p cancels: states that point at their targets, probabilities up to 1 − 1e-6."""
    hidden, head, batch = problem(torch.bfloat16, rows=16, width=20)
    pull = torch.linspace(0, 1, 320)[:, None] * head.weight.detach()[batch.targets.flatten()].float()
    sure = (hidden.detach().flatten(0, 1).float() * 0.3 + pull).bfloat16().view_as(hidden).requires_grad_()
    twin = Head(head.weight.detach().double().requires_grad_())
    truth_in = sure.detach().double().requires_grad_()
    phase, settings = Phase.of(batch), Settings(dual_clip=None, clip_high=1e9, clip_low=1.0)
    truth = gradients(plain(truth_in, twin, batch, phase, settings)[0], truth_in, twin)
    logs = head(sure.flatten(0, 1)).float().view(*batch.mask.shape, -1).log_softmax(-1)
    logp = logs.gather(-1, batch.targets[..., None])[..., 0]
    norm = objective.normalizer(batch, settings)
    rough = gradients(objective.policy_loss(logp, batch, phase, settings, normalizer=norm)[0], sure, head)
    ours = gradients(fused(sure, head, batch, phase, settings)[0], sure, head)
    confident = batch.mask & (logp > -1e-3)
    assert confident.sum() > 20
    assert error(ours[0][confident], truth[0][confident]) <= 2 * error(rough[0][confident], truth[0][confident])
    assert error(ours[1], truth[1]) <= 2 * error(rough[1], truth[1])


@pytest.mark.parametrize("memory", [None, 7 * V * 4])
def test_autocast_changes_nothing(memory: int | None) -> None:
    hidden, head, batch = problem(torch.float32)
    rows, targets = hidden.flatten(0, 1), batch.targets.flatten()
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss, metrics = fused(hidden, head, batch, Phase.of(batch), Settings(kl_coef=0.1), memory=memory)
            logp, entropy = token_logp(rows, targets, head, memory=memory)
        every = gradients(loss + (logp * entropy).sum(), hidden, head)
        results.append([loss, logp, entropy, *metrics.values(), *every])
    for off, on in zip(*results, strict=True):
        assert on.dtype == torch.float32
        torch.testing.assert_close(on, off, rtol=0, atol=0)


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    hidden, head, batch = problem()
    phase, settings = Phase.of(batch), Settings()
    with pytest.raises(ValueError, match="hidden must be"):
        fused(torch.cat([hidden, hidden[:, :1]], 1), head, batch, phase, settings)  # not shifted
    with pytest.raises(ValueError, match="hidden must be"):
        fused(hidden[..., 1:], head, batch, phase, settings)
    with pytest.raises(ValueError, match="targets must be"):
        fused(hidden, head, batch, phase, settings, targets=batch.targets[:, 1:])
    with pytest.raises(ValueError, match="token_logp"):
        token_logp(hidden.flatten(0, 1), batch.targets, head)
    with pytest.raises(ValueError, match="detaches its weight"):
        fused(hidden, None, replace(batch, head=head.weight), phase, settings)


def test_targets_may_be_any_view_and_weights_may_not_change_in_between() -> None:
    hidden, head, batch = problem()
    targets = torch.stack([batch.targets.flatten()] * 2, 1)[:, 1]
    logp, _ = token_logp(hidden.flatten(0, 1), targets, head)
    torch.testing.assert_close(logp, token_logp(hidden.flatten(0, 1), batch.targets.flatten(), head)[0])
    with torch.no_grad():
        head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logp.sum().backward()


def test_a_logit_of_minus_infinity_adds_nothing_to_entropy_and_gradient():
    bias = torch.zeros(5, dtype=torch.float64)
    bias[[1, 4]] = -torch.inf
    hidden = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 4, dtype=torch.float64)
    logp, entropy = token_logp(hidden, torch.tensor([0, 2, 3]), Head(weight, bias))
    kept = (hidden @ weight[[0, 2, 3]].T).log_softmax(-1)
    torch.testing.assert_close(logp, kept.diagonal())
    torch.testing.assert_close(entropy, -(kept.exp() * kept).sum(-1))
    found = torch.autograd.grad((logp + entropy).sum(), hidden, retain_graph=True)[0]
    expected = torch.autograd.grad((kept.diagonal() - (kept.exp() * kept).sum(-1)).sum(), hidden)[0]
    torch.testing.assert_close(found, expected)
