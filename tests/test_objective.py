"""The objective: golden values, gradients against finite differences and closed forms, and what no cut may change."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from poise import Phase, TokenBatch, regulators
from poise.objective import (
    AGGREGATIONS,
    Settings,
    active,
    importance_weights,
    kl_divergence,
    normalizer,
    policy_loss,
    surrogate,
)
from support.batches import fields_of, random_batch

FULL = {"kl_coef": 0.1, "entropy_coef": 0.05, "max_length": 16}


def current(batch, seed=1, spread=0.6):
    """Log-probabilities of a policy that has moved from the old one; NaN outside the mask."""
    g = torch.Generator().manual_seed(seed)
    return batch.old_logp + spread * torch.randn(batch.mask.shape, generator=g, dtype=torch.float64)


def loss_of(batch, phase, settings, logp=None, **kwargs):
    logp = current(batch) if logp is None else logp
    return policy_loss(logp, batch, phase, settings, normalizer=normalizer(batch, settings), **kwargs)


def loss_and_gradient(batch, phases, settings):
    logp = current(batch).requires_grad_()
    entropy = batch.entropy.clone().requires_grad_()
    loss = sum(loss_of(batch, phase, settings, logp, entropy=entropy)[0] for phase in phases)
    return loss.detach(), *torch.autograd.grad(loss, (logp, entropy), allow_unused=True)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, 2.0),
        (1.1, 2.0, 2.2),
        (1.5, 2.0, 2.48),  # clipped above at 1.24
        (0.5, 2.0, 1.0),  # never clipped: the minimum takes the raw one
        (0.5, -2.0, -1.6),  # clipped below at 0.8
        (1.5, -2.0, -3.0),
        (20.0, -2.0, -20.0),  # dual clip at 10·A
        (1.5, 0.0, 0.0),
    ],
)
def test_surrogate(ratio, advantage, expected):
    value = surrogate(torch.tensor(math.log(ratio)), torch.tensor(advantage), Settings())
    assert value.item() == pytest.approx(expected, rel=1e-6)


def test_without_dual_clip():
    value = surrogate(torch.tensor(math.log(20.0)), torch.tensor(-2.0), Settings(dual_clip=None))
    assert value.item() == pytest.approx(-40, rel=1e-6)


def test_kl_estimators():
    logp, ref = torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -0.5])
    assert kl_divergence(logp, ref, "k1").tolist() == [0.5, -0.5]
    assert kl_divergence(logp, ref, "k2").tolist() == [0.125, 0.125]
    expected = [math.exp(-0.5) + 0.5 - 1, math.exp(0.5) - 0.5 - 1]
    assert kl_divergence(logp, ref, "k3").tolist() == pytest.approx(expected, rel=1e-6)
    assert kl_divergence(torch.tensor([-9.0, -1.0]), torch.tensor([-1.0, -9.0])).tolist() == pytest.approx(
        [10.0, math.exp(-5) + 4], rel=1e-6
    )


def test_loss_by_hand():
    p_old, p_now = torch.tensor([[0.5, 0.25], [0.5, 0.8]]), torch.tensor([[0.5, 0.5], [0.6, 0.8]])
    batch = TokenBatch(p_old.log(), torch.tensor([[1, 1], [1, 0]]), torch.tensor([1.0, -1.0]), ref_logp=p_old.log())
    phase = Phase.of(batch, torch.tensor([[1.0, 0.5], [2.0, 7.0]]))
    terms = [[1.0, 1.24 * 0.5], [-1.2 * 2, 0]]
    sums = {
        "token-mean": (terms[0][0] + terms[0][1] + terms[1][0]) / 3,
        "seq-mean-token-mean": ((terms[0][0] + terms[0][1]) / 2 + terms[1][0]) / 2,
        "seq-mean-token-sum": (terms[0][0] + terms[0][1] + terms[1][0]) / 2,
        "fixed-length": (terms[0][0] + terms[0][1] + terms[1][0]) / 2 / 10,
    }
    for aggregation, expected in sums.items():
        settings = Settings(aggregation=aggregation, max_length=10)
        loss, metrics = loss_of(batch, phase, settings, p_now.log())
        assert loss.item() == pytest.approx(-expected, rel=1e-6)
        assert metrics["optim/policy_loss"].item() == pytest.approx(-expected, rel=1e-6)
    loss, metrics = loss_of(batch, phase, Settings(kl_coef=0.5), p_now.log())
    kl = [0.0, 0.5 - 1 + math.log(2), 5 / 6 - 1 + math.log(1.2)]
    assert metrics["optim/kl"].item() == pytest.approx(sum(kl) / 3, rel=1e-5)
    assert loss.item() == pytest.approx(-sums["token-mean"] + 0.5 * sum(kl) / 3, rel=1e-5)
    assert metrics["optim/clip_high"].item() == pytest.approx(1 / 3)
    assert metrics["optim/clip_low"].item() == 0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_gradcheck(aggregation, kl):
    batch = random_batch(prompts=1, group=3, length=5)
    batch = TokenBatch(**(fields_of(batch) | {"sampler_logp": batch.old_logp - 0.3}))
    settings = Settings(aggregation=aggregation, kl=kl, kl_coef=0.1, entropy_coef=0.05, max_length=8)
    (phase,) = regulators.get("tr-grpo")(batch)

    def loss(logp, entropy):
        return loss_of(batch, phase, settings, torch.where(batch.mask, logp, torch.nan), entropy=entropy)[0]

    logp = torch.where(batch.mask, current(batch), -1.0).requires_grad_()
    assert torch.autograd.gradcheck(loss, (logp, batch.entropy.nan_to_num(0.0).requires_grad_()))


def test_gradient_of_one_token_at_the_logits_is_the_closed_form():
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 3, 6, generator=g, dtype=torch.float64).requires_grad_()
    targets = torch.tensor([[4, 0, 2]])
    logp = logits.log_softmax(-1).gather(2, targets[..., None])[..., 0]
    old = logp.detach() - torch.tensor([[0.05, 0.0, -0.1]], dtype=torch.float64)
    batch = TokenBatch(old, torch.ones(1, 3), torch.tensor([1.7], dtype=torch.float64))
    weight = torch.tensor([[0.3, 1.0, 2.0]], dtype=torch.float64)
    loss, _ = loss_of(batch, Phase.of(batch, weight), Settings(), logp)
    (gradient,) = torch.autograd.grad(loss, logits)
    ratio = (logp - old).exp().detach()
    e_minus_pi = torch.nn.functional.one_hot(targets, 6) - logits.detach().softmax(-1)
    torch.testing.assert_close(gradient, -(weight * ratio * 1.7 / 3)[..., None] * e_minus_pi)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("text", ["lopti(threshold=0.3)", "lopti(order='high-first')", "random-split(share=0.4)"])
def test_phases_of_a_split_add_up_to_grpo(text, aggregation):
    batch = random_batch()
    settings = Settings(aggregation=aggregation, **FULL)
    whole = loss_and_gradient(batch, regulators.get("grpo")(batch), settings)
    parts = loss_and_gradient(batch, regulators.parse(text)(batch), settings)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weighting_the_advantage_is_weighting_the_policy_term(aggregation):
    """What lets a framework be served that takes per-token advantages, without touching its loss."""
    batch = random_batch()
    settings = Settings(aggregation=aggregation, max_length=16)
    (phase,) = regulators.get("ar", alpha=0.9)(batch)
    weighted = TokenBatch(**(fields_of(batch) | {"advantages": batch.token_advantages * phase.policy}))
    ours = loss_and_gradient(batch, [phase], settings)
    theirs = loss_and_gradient(weighted, regulators.get("grpo")(weighted), settings)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-12, atol=1e-15)


@given(
    seed=st.integers(0, 999), cuts=st.lists(st.integers(1, 11), max_size=5), aggregation=st.sampled_from(AGGREGATIONS)
)
def test_micro_batching_changes_nothing(seed, cuts, aggregation):
    batch = random_batch(seed)
    settings = Settings(aggregation=aggregation, **FULL)
    phase = regulators.get("lopti")(batch)[1]
    logp, entropy = current(batch).requires_grad_(), batch.entropy.clone().requires_grad_()
    norm = normalizer(batch, settings)
    whole, metrics = policy_loss(logp, batch, phase, settings, normalizer=norm, entropy=entropy)
    edges = [0, *sorted(set(cuts)), len(batch.mask)]
    total, summed = 0.0, dict.fromkeys(metrics, 0.0)
    for low, high in pairwise(edges):
        ix = slice(low, high)
        loss, part = policy_loss(
            logp[ix], batch.rows(ix), phase.rows(ix), settings, normalizer=norm, entropy=entropy[ix]
        )
        total = total + loss
        summed = {name: summed[name] + value for name, value in part.items()}
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-14)
    for a, b in zip(
        torch.autograd.grad(total, (logp, entropy)), torch.autograd.grad(whole, (logp, entropy)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)
    for name, value in metrics.items():
        torch.testing.assert_close(torch.as_tensor(summed[name]), value, rtol=1e-12, atol=1e-12)


def test_nothing_outside_the_mask_leaks():
    batch = random_batch()
    settings = Settings(**FULL)
    clean = TokenBatch(**{k: v.nan_to_num(0.0) if v is not None and v.is_floating_point() else v
                          for k, v in fields_of(batch).items()})  # fmt: skip
    for name in regulators.TABLE:
        loss, *gradients = loss_and_gradient(batch, regulators.get(name)(batch), settings)
        expected = loss_and_gradient(clean, regulators.get(name)(clean), settings)
        assert torch.equal(loss, expected[0]), name
        for gradient in gradients:
            assert torch.isfinite(gradient).all()
            assert not gradient[~batch.mask].any()


def test_a_token_of_weight_zero_takes_no_part_even_if_its_ratio_is_infinite():
    batch = TokenBatch(torch.full((1, 3), -1.0), torch.ones(1, 3), torch.ones(1), ref_logp=torch.full((1, 3), -1.0))
    one = torch.tensor([[1.0, 0.0, 0.0]])
    for kl in ("k1", "k2", "k3"):
        logp = torch.tensor([[-1.0, torch.nan, -torch.inf]], requires_grad=True)
        entropy = torch.tensor([[1.0, torch.nan, torch.inf]], requires_grad=True)
        settings = Settings(kl=kl, kl_coef=0.3, entropy_coef=0.6)
        loss, metrics = loss_of(batch, Phase.of(batch, one, one), settings, logp, entropy=entropy)
        loss.backward()
        assert loss.item() == pytest.approx(-1 / 3 - 0.6 / 3)
        assert metrics["optim/entropy"].item() == pytest.approx(1 / 3)
        assert logp.grad[0, 1:].tolist() == entropy.grad[0, 1:].tolist() == [0.0, 0.0]


def test_far_off_ratios_stay_finite():
    batch = TokenBatch(torch.tensor([[-100.0, -0.1]]), torch.ones(1, 2), torch.tensor([-1.0]))
    logp = torch.tensor([[-0.1, -1000.0]], requires_grad=True)
    loss, _ = loss_of(batch, Phase.of(batch), Settings(dual_clip=None, clip_low=0.2), logp)
    loss.backward()
    assert loss.item() == pytest.approx((math.exp(20) + 0.8) / 2, rel=1e-5)  # one ratio held at e^20, one clipped
    assert torch.isfinite(logp.grad).all()


def test_importance_weights_are_truncated_and_touch_the_policy_term_alone():
    batch = random_batch()
    sampler = batch.old_logp - torch.linspace(-1, 3, batch.mask.numel(), dtype=torch.float64).view_as(batch.old_logp)
    off = TokenBatch(**(fields_of(batch) | {"sampler_logp": sampler}))
    weights = importance_weights(off, Settings(importance_cap=2.0))
    expected = (off.old_logp - sampler).exp().clamp(max=2.0)
    torch.testing.assert_close(weights[off.mask], expected[off.mask])
    assert weights[off.mask].max() == 2.0
    settings, grpo = Settings(kl_coef=0.1), Phase.of(batch)
    weighted, _ = loss_of(batch, Phase.of(batch, torch.where(batch.mask, weights, 0.0)), settings)
    torch.testing.assert_close(loss_of(off, grpo, settings)[0], weighted)
    uncorrected = Settings(kl_coef=0.1, importance_cap=None)
    torch.testing.assert_close(loss_of(off, grpo, uncorrected)[0], loss_of(batch, grpo, settings)[0])


def test_drift_is_the_k3_distance_from_the_old_policy():
    gap = torch.tensor([[1e-4, -0.2]], dtype=torch.float64)
    old = torch.full((1, 2), -1.0, dtype=torch.float64)
    batch = TokenBatch(old, torch.ones(1, 2), torch.ones(1))
    _, metrics = loss_of(batch, Phase.of(batch), Settings(), old + gap)
    assert metrics["optim/drift"].item() == pytest.approx(float((torch.expm1(gap) - gap).mean()), rel=1e-9)


def test_a_phase_that_was_not_cut_with_its_batch_is_refused():
    batch = random_batch()
    phase = Phase.of(batch)
    for call in (active, loss_of):
        with pytest.raises(ValueError, match="slice both with the same rows"):
            call(batch.rows([0]), phase, Settings())


class TestActive:
    def test_a_token_needs_a_weight_and_an_advantage(self):
        batch = TokenBatch(torch.full((2, 2), -1.0), torch.tensor([[1, 1], [1, 0]]), torch.tensor([1.0, 0.0]))
        phase = Phase.of(batch, torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
        assert active(batch, phase, Settings()).tolist() == [[True, False], [False, False]]

    def test_groups_without_spread_still_carry_kl(self):
        batch = random_batch(advantages=torch.zeros(12))
        low, _ = regulators.get("lopti")(batch)
        assert not active(batch, low, Settings()).any()
        assert torch.equal(active(batch, low, Settings(kl_coef=0.1)), low.kl > 0)

    @pytest.mark.parametrize("settings", [Settings(), Settings(**FULL)])
    @pytest.mark.parametrize("text", ["lopti", "entropy", "constant(weight=0)"])
    def test_exactly_the_active_tokens_have_a_gradient(self, settings, text):
        batch = random_batch()
        for phase in regulators.parse(text)(batch):
            logp = batch.old_logp.clone().requires_grad_()  # on policy: nothing is clipped
            loss, _ = loss_of(batch, phase, settings, logp, entropy=batch.entropy)
            (gradient,) = torch.autograd.grad(loss, logp)
            assert torch.equal(gradient != 0, active(batch, phase, settings))


def test_responses_without_tokens_do_not_count():
    mask = torch.tensor([[1, 1], [0, 0]])
    batch = TokenBatch(torch.full((2, 2), -1.0), mask, torch.ones(2))
    for aggregation in AGGREGATIONS:
        settings = Settings(aggregation=aggregation, max_length=5)
        alone = batch.rows([0])
        both, one = loss_of(batch, Phase.of(batch), settings), loss_of(alone, Phase.of(alone), settings)
        torch.testing.assert_close(both[0], one[0], equal_nan=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Settings(aggregation="token_mean"), "did you mean 'token-mean'"),
        (lambda: Settings(kl="k4"), "unknown kl 'k4'"),
        (lambda: Settings(aggregation="fixed-length"), "needs max_length"),
        (lambda: Settings(clip_low=1.5), "clip_low must be between"),
        (lambda: Settings(dual_clip=1.0), "dual_clip must be between 1.001"),
        (lambda: Settings(max_length=2.5), "max_length must be a whole number"),
        (
            lambda: loss_of(random_batch(ref_logp=None), Phase.of(random_batch()), Settings(kl_coef=0.1)),
            "needs ref_logp",
        ),
        (lambda: loss_of(random_batch(), Phase.of(random_batch()), Settings(entropy_coef=0.1)), "pass entropy="),
        (
            lambda: loss_of(random_batch(), Phase.of(random_batch()), Settings(), torch.zeros(12, 8)),
            r"logp must be \(12, 9\)",
        ),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(ValueError, match=message):
        make()
