"""What verl cannot be made to do with a regulator is refused, early and with the remedy."""

import re
from pathlib import Path

import pytest
import torch
import verl
from hydra.errors import InstantiationException
from verl.workers.config import PolicyLossConfig

from poise import Phase, regulator, regulators
from poise.integrations import doctor
from poise.integrations.demands import CannotRegulateError, probe
from poise.integrations.verl import RegulatedPolicyLoss
from poise.integrations.verl_checks import check_config
from poise.integrations.verl_trainer import RegulatedTrainer
from support import verl_cpu
from support.verl_runs import actor, run

KL = {"actor_rollout_ref.actor.use_kl_loss": True}
BONUS = {"actor_rollout_ref.actor.entropy_coeff": 0.1}
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
AVERAGE = "actor_rollout_ref.actor.loss_agg_mode"
REFUSED = [
    ("ar", {LOSS: "geo_mean"}, "collapse to their mean"),
    ("ar", {LOSS: "clip_cov"}, "use poise's 'clip-cov'"),
    ("ar", {LOSS: "kl_cov"}, "selects tokens by their advantages"),
    ("lopti", {LOSS: "dro"}, "does not depend on the advantage"),
    ("ar", {LOSS: "poise"}, "both weight the tokens"),
    ("tr-grpo", KL, r"tr-grpo\(kl_weighted=False\)"),
    ("tr-grpo", BONUS, r"entropy_coeff=0, or kl_weighted=False"),
    *[("lopti", terms | {LOSS: loss}, "use one of vanilla") for loss in ("gspo", "sapo") for terms in (KL, BONUS)],
    ("lopti", KL | {AVERAGE: "seq-mean-token-mean"}, "use one of token-mean"),
    ("lopti", {"actor_rollout_ref.actor.shuffle": True}, "set actor_rollout_ref.actor.shuffle=False"),
    ("lopti", {"distillation.enabled": True}, "distillation.enabled would act in every phase"),
    ("lopti", {"actor_rollout_ref.model.mtp.enable": True, "actor_rollout_ref.model.mtp.enable_train": True},
     "mtp.enable_train would act in every phase"),
    ("nthr", {"actor_rollout_ref.actor.strategy": "megatron"}, "strategy fsdp or fsdp2, not 'megatron'"),
    ("nthr", {"actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size": 2},
     r"actor\.fsdp_config\.ulysses_sequence_parallel_size=1"),
    ("nthr", {"actor_rollout_ref.actor.ulysses_sequence_parallel_size": 2}, r"actor\.ulysses_sequence_parallel_size=1"),
    ("nthr", {"actor_rollout_ref.rollout.n": 1}, "rollout.n to 2 or more"),
    ("nthr", {"+trainer.v1.poise_sync.corect_at": 0.5}, "did you mean correct_at"),
    ("nthr", {"+trainer.v1.poise_sync.correct_at": "nan"}, "correct_at is nan: set it to a number"),
    ("nthr", {"+reward.reward_kwargs.overlong_buffer_cfg.enable": True}, "set trainer.v1.poise_sync.correct_at"),
    ("nthr", {"reward.custom_reward_function.path": "my.py"}, r"your reward function .*my.py\).*poise_sync.correct_at"),
    ("nthr | lopti", {"actor_rollout_ref.model.use_fused_kernels": True}, "use_fused_kernels=False"),
    ("nthr", {"algorithm.rollout_correction.bypass_mode": True}, "rollout_correction.bypass_mode=False"),
    ("nthr", {"trainer.n_gpus_per_node": 8}, r"each of the 8 workers: set data.train_batch_size \(now 4\)"),
    (f"{__name__}.looks", {}, "derive it from poise.regulators.Scorer.*poise's own trainer, or TRL"),
    ("entropy", {"algorithm.rollout_correction.bypass_mode": True}, "bypass_mode=False"),
    ("ar", {"trainer.use_v1": False}, "set it to True"),
    ("lopty", {}, "did you mean 'lopti'"),
    ("", {}, r"\+trainer.v1.poise_sync.regulator="),
]  # fmt: skip


def composed(method, settings):
    given = verl_cpu.OVERRIDES | settings
    given |= {"trainer.v1.trainer_mode": "poise_sync", "+trainer.v1.poise_sync.regulator": f"'{method}'"}
    return verl_cpu.composed([f"{key}={value}" for key, value in given.items()])


@pytest.mark.parametrize(("method", "settings", "message"), REFUSED, ids=[f"{m}-{s}" for m, s, _ in REFUSED])
def test_refused_when_the_trainer_is_made(method, settings, message):
    with pytest.raises(ValueError, match=message):
        RegulatedTrainer(composed(method, settings))


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("grpo", {LOSS: "geo_mean", "actor_rollout_ref.actor.shuffle": True} | KL | BONUS),
        ("tr-grpo(kl_weighted=False)", {LOSS: "gspo", AVERAGE: "seq-mean-token-mean"} | KL | BONUS),
        ("tr-grpo", {LOSS: "cispo"}),
        ("lopti", {LOSS: "gspo", AVERAGE: "seq-mean-token-mean"}),
        ("lopti", KL | BONUS),
        ("entropy | clip-cov", {"distillation.enabled": True}),
        ("nthr", KL | BONUS | {"trainer.n_gpus_per_node": 2, "actor_rollout_ref.actor.strategy": "fsdp2"}),
        ("nthr | lopti", KL),
        ("nthr", {"+reward.reward_kwargs.overlong_buffer_cfg.enable": True, "+trainer.v1.poise_sync.correct_at": 0.9}),
    ],
)
def test_what_can_be_done_is_not_refused(method, settings):
    parsed = regulators.parse(method)
    check_config(composed(method, settings), parsed, probe(parsed), method)


@regulator
def looks(batch):
    return [Phase.of(batch, batch.hidden_of(torch.arange(len(batch.mask))).norm(dim=-1))]


looks.needs = frozenset({"hidden"})


@regulator
def mine(batch):
    return [Phase.of(batch, batch.prob)]


@pytest.mark.parametrize(
    ("method", "base", "message"),
    [
        ("lopti", "vanilla", r"has 2 phases.*trainer_mode=poise_sync \+trainer.v1.poise_sync.regulator=\"'lopti'\""),
        ("ar | entropy", "vanilla", "contains TopEntropy"),
        ("nthr", "vanilla", "contains NTHR"),
        ("blame", "vanilla", "blame needs entropy, but a policy loss sees"),
        (f"{__name__}.mine", "vanilla", "contains Function"),
        ("tr-grpo", "vanilla", r"tr-grpo\(kl_weighted=False\)"),
        ("ar", "geo_mean", "try 'vanilla'"),
        ("ar", "poise", "one of verl's"),
        ("", "vanilla", "regulator is missing"),
    ],
)
def test_what_a_policy_loss_cannot_do(method, base, message):
    with pytest.raises(CannotRegulateError, match=message):
        RegulatedPolicyLoss(regulator=method, base_loss=base)


def test_refused_where_verl_validates_its_configuration():
    """Through hydra, as main_ppo does before anything is started."""
    with pytest.raises(InstantiationException, match="has 2 phases"):
        actor("lopti")


def test_settings_that_would_have_no_effect():
    with pytest.raises(
        CannotRegulateError, match="would have no effect; set it to 'poise', and base_loss to 'vanilla'"
    ):
        RegulatedPolicyLoss(loss_mode="vanilla", regulator="ar")
    plain = actor(None, "poise")
    assert type(plain.policy_loss) is PolicyLossConfig
    with pytest.raises(CannotRegulateError, match=r"_target_ to poise.integrations.verl.RegulatedPolicyLoss"):
        run(plain)


def test_another_version_of_verl_is_refused_unless_the_user_wants_it(monkeypatch):
    monkeypatch.setattr(verl, "__version__", "0.10.0")
    with pytest.raises(CannotRegulateError, match=r"tested with verl 0.9.1, this is 0.10.0.*verl==0.9.1"):
        RegulatedPolicyLoss(regulator="ar")
    with pytest.raises(CannotRegulateError, match="tested with verl"):
        RegulatedTrainer(composed("ar", {}))
    said = []
    assert not doctor.verl(said.append)
    assert "set POISE_UNTESTED_VERL=1 on every node" in said[-1]
    monkeypatch.setenv("POISE_UNTESTED_VERL", "1")
    with pytest.warns(UserWarning, match=r"tested with verl 0.9.1, this is 0.10.0.*\(POISE_UNTESTED_VERL=1\)"):
        assert RegulatedTrainer(composed("ar", {})).regulator == regulators.parse("ar")


POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"


@pytest.mark.parametrize(
    ("settings", "fine", "message"),
    [
        (["trainer.v1.trainer_mode=mine", "+trainer.v1.mine.regulator=lopti"], True,
         "by the trainer mine, in 2 phase(?s:.*)the doctor cannot tell"),
        (["trainer.v1.trainer_mode=sync", "+trainer.v1.sync.regulator=lopti"], False, "without a regulator"),
        (["trainer.v1.poise_sync.regulator=null", f"{POLICY_LOSS}.loss_mode=poise", f"+{POLICY_LOSS}.regulator=ar",
          f"{POLICY_LOSS}._target_=poise.integrations.verl.RegulatedPolicyLoss"], False, "without a regulator"),
        (["trainer.use_v1=False"], False, "verl's old trainer, which ignores ar"),
        (["actor_rollout_ref.rollout.val_kwargs.do_sample=true", "actor_rollout_ref.rollout.temperature=0"], False,
         "REFUSED: .*temperature"),
    ],
)  # fmt: skip
def test_what_the_doctor_says_of_settings(settings, fine, message):
    said = []
    scale = Path(__file__).parents[2] / "examples/scale"
    assert doctor._check_settings(said.append, settings, scale, "verl-8gpu") is fine
    assert re.search(message, "\n".join(said))
