"""Poise as a policy loss of verl: inside verl's own ppo_loss, on its own batches."""

from dataclasses import dataclass

import pytest
import torch
import verl_cpu
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, register_policy_loss
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding

from poise import Phase, Regulator
from poise.integrations import verl as ours
from poise.integrations.demands import CannotRegulateError
from poise.integrations.verl_checks import UNFIT, check_linear


@dataclass(frozen=True)
class SquareRoot(Regulator):
    """One of a user's own, as in CONTRIBUTING.md."""

    scope = "token"

    def phases(self, batch):
        return [Phase.of(batch, batch.prob.sqrt())]


BY_HAND = {  # the weight of a token with old probability p
    "test_loss.SquareRoot": lambda p: p.sqrt(),
    "grpo": lambda p: torch.ones_like(p),
    "ar(alpha=0.3)": lambda p: 0.3 * p + 0.7,
    "amplify(alpha=0.2)": lambda p: 1 + 0.2 * (1 - p),
    "tr-grpo(kl_weighted=False)": lambda p: (2 * (torch.sigmoid(p / 0.5) - 0.25)).clamp(0.5, 1.26),
    "constant(weight=0.5)": lambda p: torch.full_like(p, 0.5),
    "ar(alpha=0.3) | amplify(alpha=0.2)": lambda p: (0.3 * p + 0.7) * (1 + 0.2 * (1 - p)),
}
FIT = ["vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "cispo", "bypass_mode"]
MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


def actor(regulator=None, base="vanilla", **settings):
    """verl's dataclass for the actor, through its own way from the configuration."""
    prefix = "actor_rollout_ref.actor.policy_loss"
    given = verl_cpu.OVERRIDES | {f"actor_rollout_ref.actor.{key}": value for key, value in settings.items()}
    if regulator is None:
        given[f"{prefix}.loss_mode"] = base
    else:
        given |= {
            f"{prefix}._target_": "poise.integrations.verl.RegulatedPolicyLoss", f"{prefix}.loss_mode": "poise",
            f"+{prefix}.regulator": f"'{regulator}'", f"+{prefix}.base_loss": base,
        }  # fmt: skip
    composed = verl_cpu.composed([f"{key}={value}" for key, value in given.items()])
    return omega_conf_to_dataclass(composed.actor_rollout_ref.actor)


def micro_batch(weight=None):
    """A DataProto, padded left and right as rollouts are, taken to verl's packed form by verl; log-probabilities."""
    random = torch.Generator().manual_seed(0)
    rows, prompt, answer = 4, 3, 6
    ids = torch.randint(1, 50, (rows, prompt + answer), generator=random)
    attention = torch.ones_like(ids)
    attention[1, :2], attention[2, -3:] = 0, 0
    mask = attention[:, prompt:].clone()
    mask[0, 2] = 0
    old = -3 * torch.rand(rows, answer, generator=random)
    advantages = torch.randn(rows, 1, generator=random) * mask
    data = DataProto.from_dict(
        tensors={
            "input_ids": ids, "attention_mask": attention, "position_ids": attention.cumsum(1) - 1,
            "prompts": ids[:, :prompt], "responses": ids[:, prompt:], "response_mask": mask, "old_log_probs": old,
            "ref_log_prob": old + 0.1, "advantages": advantages if weight is None else advantages * weight(old.exp()),
        }
    )  # fmt: skip
    packed = left_right_2_no_padding(data.to_tensordict())
    tu.assign_non_tensor(packed, dp_size=1, batch_num_tokens=int(mask.sum()) + 5, global_batch_size=6)
    drift = 0.6 * (torch.rand(rows, answer, generator=random) - 0.5)  # off policy, so that clips matter
    full = torch.zeros(rows, prompt + answer)
    full[:, prompt - 1 : -1] = (old + drift).clamp(max=-1e-3)  # verl's engines: at the place that predicts the token
    values = full[attention.bool()].requires_grad_()
    return packed, values


def run(config, weight=None):
    packed, values = micro_batch(weight)
    logp = torch.nested.nested_tensor_from_jagged(values, packed["input_ids"].offsets())
    loss, metrics = ppo_loss(config, {"log_probs": logp}, packed)
    loss.backward()
    return loss.detach(), values.grad, metrics


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
    with pytest.raises(CannotRegulateError, match="not a sum over tokens"):
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
    with pytest.raises(CannotRegulateError, match=r"'squared'.*not a sum over tokens"):
        run(actor("ar(alpha=0.3)", "squared"))
