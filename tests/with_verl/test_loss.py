"""Poise as a policy loss of verl: inside verl's own ppo_loss, on its own batches."""

import pytest
import torch
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, register_policy_loss

from poise.integrations import verl as ours
from poise.integrations.demands import CannotRegulateError
from poise.integrations.verl_checks import UNFIT, check_linear
from support.verl_runs import actor, run

BY_HAND = {  # the weight of a token with old probability p
    "support.verl_runs.SquareRoot": lambda p: p.sqrt(),
    "grpo": lambda p: torch.ones_like(p),
    "ar(alpha=0.3)": lambda p: 0.3 * p + 0.7,
    "amplify(alpha=0.2)": lambda p: 1 + 0.2 * (1 - p),
    "tr-grpo(kl_weighted=False)": lambda p: (2 * (torch.sigmoid(p / 0.5) - 0.25)).clamp(0.5, 1.26),
    "constant(weight=0.5)": lambda p: torch.full_like(p, 0.5),
    "ar(alpha=0.3) | amplify(alpha=0.2)": lambda p: (0.3 * p + 0.7) * (1 + 0.2 * (1 - p)),
}
FIT = ["vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "cispo", "bypass_mode"]
MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


@pytest.mark.parametrize(
    ("method", "base"), [(method, "vanilla") for method in BY_HAND] + [("ar(alpha=0.3)", base) for base in FIT[1:]]
)
def test_it_is_verls_loss_with_weighted_advantages(method, base):
    settings = {"use_kl_loss": True, "kl_loss_coef": 0.3}
    loss, gradient, metrics = run(actor(method, base, **settings))
    expected, theirs, known = run(actor(None, base, **settings), BY_HAND[method])
    assert theirs.norm() > 0
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient, theirs, rtol=1e-6, atol=1e-7)
    assert metrics.keys() - known.keys() == {"reg/weight_mean"}


@pytest.mark.parametrize("mode", MODES)
def test_every_way_to_average(mode):
    method = "ar(alpha=0.3)"
    loss, gradient, _ = run(actor(method, loss_agg_mode=mode))
    expected, theirs, _ = run(actor(None, loss_agg_mode=mode), BY_HAND[method])
    plain, *_ = run(actor(None, loss_agg_mode=mode))
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient, theirs, rtol=1e-6, atol=1e-7)
    assert (loss - plain).abs() > 1e-3 * plain.abs()


def test_grpo_goes_with_any_loss():
    loss, gradient, _ = run(actor("grpo", "geo_mean"))
    expected, theirs, _ = run(actor(None, "geo_mean"))
    assert torch.equal(loss, expected)
    assert torch.equal(gradient, theirs)


def test_the_mean_weight_is_logged():
    _, _, metrics = run(actor("constant(weight=0.5)"))
    assert metrics["reg/weight_mean"].aggregate() == pytest.approx(0.5)


# --- which losses can carry weights


@pytest.mark.parametrize("base", FIT)
@pytest.mark.parametrize("mode", MODES)
def test_fit_losses_are_sums_over_tokens(base, mode):
    check_linear(POLICY_LOSS_REGISTRY[base], actor(None, base), base, mode)


@pytest.mark.parametrize("base", ["geo_mean", "dro"])
def test_unfit_losses_are_found_out(base):
    settings = {"policy_loss.dro_beta": 0.1} if base == "dro" else {}
    with pytest.raises(CannotRegulateError, match="not a sum of one term per token"):
        check_linear(POLICY_LOSS_REGISTRY[base], actor(None, base, **settings), base, "token-mean")


def test_all_losses_of_verl_are_known():
    assert set(POLICY_LOSS_REGISTRY) == {*FIT, *UNFIT, "poise"}


def test_a_loss_of_ones_own(monkeypatch):
    monkeypatch.setattr(ours, "_tried", set())
    monkeypatch.setattr("verl.trainer.ppo.core_algos.POLICY_LOSS_REGISTRY", POLICY_LOSS_REGISTRY | {})

    @register_policy_loss("mine")
    def mine(*, log_prob, advantages, response_mask, **_):
        return -(log_prob * advantages * response_mask).sum(), {}

    @register_policy_loss("squared")
    def squared(*, log_prob, advantages, response_mask, **_):
        return -(log_prob * advantages.square() * response_mask).sum(), {}

    loss, *_ = run(actor("ar(alpha=0.3)", "mine"))
    assert torch.allclose(loss, run(actor(None, "mine"), BY_HAND["ar(alpha=0.3)"])[0])
    with pytest.raises(CannotRegulateError, match=r"'squared'.*not a sum of one term per token"):
        run(actor("ar(alpha=0.3)", "squared"))
