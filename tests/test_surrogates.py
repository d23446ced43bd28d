"""Surrogates: token by token against formulas written out here, their reductions, and what no cut may change."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from poise import Phase, TokenBatch, regulators, surrogates
from poise.diagnostics import ForwardLoop
from poise.objective import Settings, active, normalizer, policy_loss, survey
from support.batches import fields_of, random_batch

NAMES = tuple(surrogates.TABLE)
SURVEYED = ("gspo", "kl-cov", "lp-reg")
# Settings that make every branch of a surrogate occur in a small batch
BUSY = {
    "clip": "clip",
    "cispo": "cispo(low=0.8, high=1.2)",
    "gspo": "gspo(clip_low=0.05, clip_high=0.05)",
    "sapo": "sapo",
    "dppo": "dppo(delta=0.1, cap=1.5, square=0.01)",
    "kl-cov": "kl-cov(share=0.2, coef=0.5)",
    "lp-reg": "lp-reg(share=0.5, clip_high=0.5, coef=0.7)",
}
UNCLIPPED = {"clip_low": 1.0, "clip_high": 1e9, "dual_clip": None}


def batch_of(seed=0, **fields):
    """A batch with log-probabilities filtered by min-p, some of them −inf."""
    batch = random_batch(seed)
    g = torch.Generator().manual_seed(seed + 7)
    noise = torch.rand(batch.mask.shape, generator=g, dtype=torch.float64)
    filtered = torch.where(noise > 0.8, -torch.inf, (batch.old_logp + 0.5 * noise).clamp(max=0))
    return TokenBatch(**(fields_of(batch) | {"min_p_logp": filtered, "correct": None} | fields))


def current(batch, seed=1, spread=0.6):
    """Log-probabilities of a policy that has moved from the old one; NaN outside the mask."""
    g = torch.Generator().manual_seed(seed)
    return batch.old_logp + spread * torch.randn(batch.mask.shape, generator=g, dtype=torch.float64)


def weights_of(batch, seed=3):
    g = torch.Generator().manual_seed(seed)
    weights = torch.rand(batch.mask.shape, generator=g, dtype=torch.float64)
    return Phase.of(batch, weights * (weights > 0.2))


def loss_of(batch, phase, settings, logp, **kwargs):
    taken = survey(logp, batch, settings)
    norm = normalizer(batch, settings)
    return policy_loss(logp, batch, phase, settings, normalizer=norm, survey=taken, **kwargs)


def loss_and_gradient(batch, phase, settings, logp=None):
    logp = (current(batch) if logp is None else logp).clone().requires_grad_()
    loss, metrics = loss_of(batch, phase, settings, logp)
    (gradient,) = torch.autograd.grad(loss, logp)
    return loss.detach(), gradient, metrics


# The formulas, for one token. ``x`` is its log-probability, ``now`` the same where no gradient flows.


def clip_value(r, a, low, high):
    return min(r * a, min(max(r, 1 - low), 1 + high) * a)


def token_value(name, x, now, old, a, mean_gap, chosen, target):
    r = math.exp(x - old)
    if name == "clip":
        value = clip_value(r, a, 0.2, 0.24)
        return max(value, 10 * a) if a < 0 else value
    if name == "cispo":
        return min(max(math.exp(now - old), 0.8), 1.2) * a * math.exp(x - now)
    if name == "gspo":
        return clip_value(math.exp(mean_gap + x - now), a, 0.05, 0.05)
    if name == "sapo":
        tau = 1.0 if a > 0 else 1.05
        return a * 4 / tau / (1 + math.exp(-tau * (r - 1)))
    if name == "dppo":
        change = math.exp(now) - math.exp(old)
        dropped = (a > 0 and change > 0.1) or (a < 0 and change < -0.1)
        return (0 if dropped else a * min(math.exp(now - old), 1.5) * math.exp(x - now)) - 0.01 * (x - old) ** 2
    if name == "kl-cov":
        return r * a - chosen * 0.5 * abs(x - old)
    distance = min(math.exp(target - x) - 1 - (target - x), 10) if chosen else 0
    return clip_value(r, a, 1.0, 0.5) - 0.7 * distance


def choose(name, tokens, now, advantages, filtered):
    """The chosen tokens, as a set of places."""
    if name == "kl-cov":
        mean_a = sum(advantages[at] for at in tokens) / len(tokens)
        mean_x = sum(now[at] for at in tokens) / len(tokens)
        ranked = sorted(tokens, key=lambda at: -(advantages[at] - mean_a) * (now[at] - mean_x))
        return set(ranked[: int(0.2 * len(tokens))])
    if name == "lp-reg":
        wrong = sorted((at for at in tokens if advantages[at] < 0), key=lambda at: now[at])
        return {at for at in wrong[: int(0.5 * len(wrong))] if now[at] < filtered[at]}
    return set()


def reference(name, batch, phase, logp):
    """The loss as a function of the log-probabilities, and the frozen values it was built from."""
    now, old = logp.tolist(), batch.old_logp.tolist()
    weights, advantages = phase.policy.tolist(), batch.token_advantages.tolist()
    filtered = batch.min_p_logp.tolist()
    rows = [[t for t, own in enumerate(row) if own] for row in batch.mask.tolist()]
    tokens = [(b, t) for b, row in enumerate(rows) for t in row]
    at_now, at_a = {(b, t): now[b][t] for b, t in tokens}, {(b, t): advantages[b][t] for b, t in tokens}
    chosen = choose(name, tokens, at_now, at_a, {(b, t): filtered[b][t] for b, t in tokens})
    by_sequence = name in ("gspo", "sapo")

    def loss(changed):
        total = 0.0
        for b, row in enumerate(rows):
            mean_gap = sum(now[b][t] - old[b][t] for t in row) / len(row)
            for t in row:
                share = 1 / len(row) / len(rows) if by_sequence else 1 / len(tokens)
                if weights[b][t]:
                    x = changed.get((b, t), now[b][t])
                    here = (b, t) in chosen
                    values = (x, now[b][t], old[b][t], advantages[b][t], mean_gap, here, filtered[b][t])
                    total -= share * weights[b][t] * token_value(name, *values)
        return total

    return loss, tokens, chosen


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_the_formula_and_its_gradient(name, seed):
    batch = batch_of(seed)
    phase, logp, settings = weights_of(batch), current(batch), Settings(surrogate=BUSY[name])
    expected, tokens, chosen = reference(name, batch, phase, logp)
    loss, gradient, _ = loss_and_gradient(batch, phase, settings, logp)
    assert loss.item() == pytest.approx(expected({}), rel=1e-12)
    assert bool(chosen) == (name in ("kl-cov", "lp-reg"))
    step = 1e-6
    for b, t in tokens:
        x = float(logp[b, t])
        slope = (expected({(b, t): x + step}) - expected({(b, t): x - step})) / (2 * step)
        assert float(gradient[b, t]) == pytest.approx(slope, rel=1e-5, abs=1e-9)
    assert not gradient[~batch.mask].any()


@pytest.mark.parametrize(
    ("text", "objective"),
    [
        ("cispo(low=0, high=None)", UNCLIPPED),
        ("dppo(delta=1, cap=None)", UNCLIPPED),
        ("kl-cov(share=0)", UNCLIPPED),
        ("kl-cov(coef=0)", UNCLIPPED),
        ("lp-reg(share=0)", {"clip_low": 1.0, "clip_high": 9.0, "dual_clip": None}),
        ("lp-reg(coef=0)", {"clip_low": 1.0, "clip_high": 9.0, "dual_clip": None}),
    ],
)
def test_settings_that_are_the_plain_clip_exactly(text, objective):
    batch = batch_of()
    phase = weights_of(batch)
    logp = current(batch, spread=1.5).clamp(max=0)
    found = loss_and_gradient(batch, phase, Settings(surrogate=text), logp)
    expected = loss_and_gradient(batch, phase, Settings(**objective), logp)
    for mine, plain in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-12, atol=1e-15)


def test_gspo_of_one_token_is_the_clip():
    batch = batch_of()
    mask = torch.zeros_like(batch.mask)
    mask[:, 0] = True
    batch = replace(batch, mask=mask)
    found = loss_and_gradient(batch, Phase.of(batch), Settings(surrogate="gspo(clip_low=0.2, clip_high=0.24)"))
    expected = loss_and_gradient(batch, Phase.of(batch), Settings(dual_clip=None))
    for mine, plain in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-12, atol=1e-15)
    assert found[2]["optim/clip_high"] == expected[2]["optim/clip_high"] > 0


def test_sapo_with_a_low_temperature_is_the_ratio():
    batch = batch_of()
    gate = Settings(surrogate="sapo(positive=1e-4, negative=1e-4, sequence_mean=False)")
    found = loss_and_gradient(batch, weights_of(batch), gate)[1]
    torch.testing.assert_close(found, loss_and_gradient(batch, weights_of(batch), Settings(**UNCLIPPED))[1],
                               rtol=1e-6, atol=1e-12)  # fmt: skip


@pytest.mark.parametrize("text", ["grpo", "ar(alpha=0.7)", "lopti"])
@pytest.mark.parametrize("name", NAMES)
def test_at_ratio_one_all_but_lp_reg_are_the_plain_gradient(name, text):
    """One optimizer step per batch: the current policy is the old one."""
    batch = batch_of()
    settings = Settings(surrogate=name)
    for phase in regulators.parse(text)(batch):
        found = loss_and_gradient(batch, phase, settings, batch.old_logp)[1]
        plain = loss_and_gradient(batch, phase, Settings(aggregation=settings.averages_by), batch.old_logp)[1]
        torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-15)  # lp-reg chooses none of so few tokens
    if name == "lp-reg":
        busy = Settings(surrogate=BUSY["lp-reg"])
        both = (loss_and_gradient(batch, Phase.of(batch), each, batch.old_logp)[1] for each in (busy, Settings()))
        assert not torch.allclose(*both)


@given(seed=st.integers(0, 99), cuts=st.lists(st.integers(1, 11), max_size=5), name=st.sampled_from(NAMES))
def test_micro_batching_changes_nothing(seed, cuts, name):
    batch, settings = batch_of(seed), Settings(surrogate=BUSY[name], kl_coef=0.1)
    phase, logp = weights_of(batch), current(batch)
    whole, gradient, metrics = loss_and_gradient(batch, phase, settings, logp)
    logp.requires_grad_()
    taken, norm, parts = survey(logp, batch, settings), normalizer(batch, settings), []
    for low, high in pairwise([0, *sorted(set(cuts)), len(batch.mask)]):
        ix = slice(low, high)
        rows = None if taken is None else taken.rows(ix)
        parts.append(policy_loss(logp[ix], batch.rows(ix), phase.rows(ix), settings, normalizer=norm, survey=rows))
    total = torch.stack([loss for loss, _ in parts]).sum()
    torch.testing.assert_close(total.detach(), whole, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(torch.autograd.grad(total, logp)[0], gradient, rtol=1e-12, atol=1e-15)
    for key, value in metrics.items():
        torch.testing.assert_close(torch.stack([part[key] for _, part in parts]).sum(), value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("text", ["lopti", "random-split", "ar | lopti(threshold=0.5)"])
@pytest.mark.parametrize("name", NAMES)
def test_phases_add_up_to_the_whole(name, text):
    """The denominator and the survey are the mini-batch's, whatever the phase."""
    batch, settings = batch_of(), Settings(surrogate=BUSY[name], kl_coef=0.1)
    whole = regulators.parse(text.replace("lopti(threshold=0.5)", "grpo") if "|" in text else "grpo")(batch)
    found, expected = (
        torch.stack([loss_and_gradient(batch, phase, settings)[1] for phase in phases]).sum(0)
        for phases in (regulators.parse(text)(batch), whole)
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", NAMES)
def test_kl_and_entropy_terms_are_unchanged(name):
    batch, logp = batch_of(), current(batch_of())
    entropy = batch.entropy.clone().requires_grad_()
    silent = Phase.of(batch, 0.0)
    average = Settings(surrogate=name).averages_by
    full = {"kl_coef": 0.3, "entropy_coef": 0.2}
    found, _ = loss_of(batch, silent, Settings(surrogate=name, **full), logp, entropy=entropy)
    expected, _ = loss_of(batch, silent, Settings(aggregation=average, **full), logp, entropy=entropy)
    assert torch.equal(found, expected)
    assert found != 0


@pytest.mark.parametrize("name", NAMES)
def test_importance_weights_multiply_the_policy_term(name):
    batch, settings = batch_of(), Settings(surrogate=BUSY[name])
    off = replace(batch, sampler_logp=batch.old_logp - 0.3)
    found, expected = (loss_and_gradient(each, Phase.of(each), settings)[1] for each in (off, batch))
    torch.testing.assert_close(found, math.exp(0.3) * expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_outside_the_mask_leaks(name):
    batch, settings = batch_of(), Settings(surrogate=BUSY[name])
    clean = TokenBatch(**{
        key: value.nan_to_num(0.0, neginf=-torch.inf) if value is not None and value.is_floating_point() else value
        for key, value in fields_of(batch).items()
    })  # fmt: skip
    logp = current(batch)
    assert logp[~batch.mask].isnan().all()
    for a, b in zip(
        loss_and_gradient(batch, weights_of(batch), settings, logp)[:2],
        loss_and_gradient(clean, weights_of(clean), settings, logp.nan_to_num(-5.0))[:2],
        strict=True,
    ):
        assert torch.equal(a, b)
        assert a.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_far_off_ratios_stay_finite(name):
    gaps = torch.tensor([[900.0, -900.0, 25.0, -25.0, 0.0]] * 2)
    old = torch.tensor([[-1000.0, -0.1, -25.1, -0.1, -1.0]] * 2)
    batch = TokenBatch(old, torch.ones(2, 5), torch.tensor([1.0, -1.0]), min_p_logp=old + 0.1)
    for text in (name, BUSY[name]):
        loss, gradient, metrics = loss_and_gradient(batch, Phase.of(batch), Settings(surrogate=text), old + gaps)
        assert loss.isfinite()
        assert gradient.isfinite().all()
        assert all(value.isfinite() for value in metrics.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_other_dtypes(name, dtype):
    """The loss has at least float32; a bfloat16 log-probability is rounded before, and the gradient after."""
    batch, settings = batch_of(), Settings(surrogate=name)
    logp = current(batch, spread=0.05).to(dtype)
    loss, gradient, _ = loss_and_gradient(batch, Phase.of(batch), settings, logp)
    exact = loss_and_gradient(batch, Phase.of(batch), settings, logp.double())
    assert loss.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(loss.double(), exact[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), exact[1], rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_empty_phases_and_advantages_of_zero(name):
    batch = batch_of()
    settings = Settings(surrogate=BUSY[name])
    loss, gradient, _ = loss_and_gradient(batch, Phase.of(batch, 0.0), settings)
    assert loss == 0
    assert not gradient.any()
    level = replace(batch, advantages=torch.zeros(12))
    assert not active(level, Phase.of(level), settings).any()
    loss, gradient, _ = loss_and_gradient(level, Phase.of(level), settings)
    assert loss == 0
    assert not gradient.any()
    empty = replace(batch, mask=torch.zeros_like(batch.mask))
    assert loss_of(empty, Phase.of(empty), settings, current(empty))[0] == 0


def test_a_choice_is_of_the_whole_mini_batch_and_reads_no_weights():
    batch, logp = batch_of(), current(batch_of())
    for name in ("kl-cov", "lp-reg"):
        settings = Settings(surrogate=BUSY[name])
        taken = survey(logp, batch, settings)
        apart = [survey(logp[ix], batch.rows(ix), settings) for ix in (slice(0, 6), slice(6, 12))]
        assert not torch.equal(taken.chosen, torch.cat([part.chosen for part in apart]))
        assert set(taken.chosen.unique().tolist()) == {0.0, 1.0}
        assert not taken.chosen[~batch.mask].any()


def test_the_default_of_kl_cov_chooses_at_least_one_token_and_lp_reg_may_choose_none():
    batch, logp = batch_of(), current(batch_of())
    assert survey(logp, batch, Settings(surrogate="kl-cov")).chosen.sum() == 1
    assert survey(logp, batch, Settings(surrogate="lp-reg")).chosen.sum() == 0
    assert survey(logp, batch, Settings()) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_loop_with_a_forward_pass_takes_the_survey_itself(name):
    batch, settings = batch_of(), Settings(surrogate=BUSY[name])
    logp = current(batch).requires_grad_()
    ForwardLoop(batch, [logp], lambda: logp * 1.0, settings).gradient(Phase.of(batch))
    assert torch.equal(logp.grad, loss_and_gradient(batch, Phase.of(batch), settings)[1])


def test_the_metrics_say_what_was_held():
    old = torch.tensor([[0.1, 0.5, 0.5]], dtype=torch.float64).log()
    batch = TokenBatch(old, torch.ones(1, 3), torch.ones(1))
    logp = torch.tensor([[0.6, 0.6, 0.4]], dtype=torch.float64).log()
    held = {
        text: loss_and_gradient(batch, Phase.of(batch), Settings(surrogate=text), logp)[2]
        for text in ("clip", "cispo", "dppo", "sapo")
    }
    shares = {text: float(metrics["optim/clip_high"]) for text, metrics in held.items()}
    assert shares == pytest.approx({"clip": 1 / 3, "cispo": 1 / 3, "dppo": 1 / 3, "sapo": 0.0})
    assert len({float(metrics["optim/drift"]) for metrics in held.values()}) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Settings(surrogate="gpso"), "unknown surrogate 'gpso'; did you mean 'gspo'"),
        (lambda: Settings(surrogate="dppo(detla=0.1)"), "did you mean 'delta'"),
        (lambda: Settings(surrogate="dppo(0.1)"), r"dppo\(setting=value\)"),
        (lambda: Settings(surrogate="dppo(delta=2)"), "delta must be between 0.0 and 1.0, got 2"),
        (lambda: Settings(surrogate="clip(low=0.1)"), "clip_low, objective.clip_high and objective.dual_clip instead"),
        (lambda: Settings(surrogate="cispo(low=2, high=1)"), "high must be between 2"),
        (lambda: Settings(surrogate="gspo", aggregation="seq-mean-token-sum"), "sequence_mean=False"),
        (lambda: loss_without_survey("gspo"), "rows of the result as survey="),
        (lambda: survey(current(batch_of()), random_batch(), Settings(surrogate="lp-reg")), "needs TokenBatch.min_p"),
        (lambda: batch_of(min_p_logp=torch.full((12, 9), torch.nan)), "must be a number or −inf"),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def loss_without_survey(name):
    batch = batch_of()
    policy_loss(current(batch), batch, Phase.of(batch), Settings(surrogate=name), normalizer=1.0)


def test_a_survey_that_was_not_cut_with_its_batch_is_refused():
    batch, settings = batch_of(), Settings(surrogate="gspo")
    logp = current(batch)
    taken, part = survey(logp, batch, settings), batch.rows([0])
    with pytest.raises(ValueError, match="slice both with the same rows"):
        policy_loss(logp[:1], part, Phase.of(part), settings, normalizer=1.0, survey=taken)


def test_a_surrogate_of_ones_own():
    class Square(surrogates.Surrogate):
        def value(self, logp, parts):
            return parts.log_ratio(logp).square() * parts.advantages

    batch = batch_of()
    logp = current(batch)
    loss, _, _ = loss_and_gradient(batch, Phase.of(batch), Settings(surrogate=Square()), logp)
    gap = (logp - batch.old_logp)[batch.mask]
    assert loss.item() == pytest.approx(-(gap.square() * batch.token_advantages[batch.mask]).mean().item())


def test_a_field_of_an_own_surrogate_does_not_set_the_aggregation():
    @dataclass(frozen=True)
    class Mine(surrogates.Surrogate):
        sequence_mean: bool = True  # a name that two of poise's surrogates have

        def value(self, logp, parts):
            return parts.policy * logp

    assert Mine().aggregation is None
    assert surrogates.parse("gspo").aggregation == surrogates.parse("sapo").aggregation == surrogates.SEQUENCE_MEAN
    assert surrogates.parse("gspo(sequence_mean=false)").aggregation is None
