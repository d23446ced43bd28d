"""What TRL cannot be made to do with a regulator is refused, early and with the remedy."""

from types import SimpleNamespace

import pytest

trl = pytest.importorskip("trl", reason="TRL is not installed (extra 'trl')")

from poise import regulators  # noqa: E402
from poise.integrations import trl_checks  # noqa: E402
from poise.integrations.demands import CannotRegulateError, probe  # noqa: E402
from poise.integrations.trl import WEIGHTS, RegulatedGRPOTrainer, RegulatorMixin  # noqa: E402
from support import trl_runs  # noqa: E402
from support.trl_runs import DATA, build, config, rollouts  # noqa: E402

STOCK = trl.GRPOTrainer
TWO = {"num_iterations": 2}
REFUSED = [
    ("ar", {"importance_sampling_level": "sequence", "loss_type": "grpo"}, "collapse to their mean.*='token'"),
    ("tr-grpo", {"entropy_coef": 0.1}, "entropy_coef=0.*kl_weighted=False"),
    ("lopti", {"entropy_coef": 0.1} | TWO, "set entropy_coef=0"),
    ("lopti", {"use_adaptive_entropy": True} | TWO, "use_adaptive_entropy=False"),
    ("lopti", {}, r"2 phases \(low, high\).*num_iterations=2 in GRPOConfig, not 1"),
    ("lopti", {"num_iterations": 4}, "num_iterations=2 in GRPOConfig, not 4"),
    ("lopti", {"gradient_accumulation_steps": 2, "steps_per_generation": 1} | TWO, "mix the phases"),
    ("lopti", {"max_steps": 5} | TWO, r"max_steps \(5\) must be a multiple of 2"),
    ("lopti", {"save_strategy": "steps", "save_steps": 3} | TWO, r"save_steps \(3\) must be a multiple of 2"),
    ("lopti", {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "r"} | TWO,
     r"eval_steps \(3\) must be a multiple of 2"),
    ("lopti", {"optim": "adalomo"} | TWO, "another optimizer"),
    ("lopti", {"fp16": True, "max_grad_norm": 0} | TWO, "max_grad_norm"),
    ("nthr", {}, "pass correct="),
    ("lopty", {}, "did you mean 'lopti'"),
    ("constant(weight=0)", {}, "every token the weight 0"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "settings", "message"), REFUSED, ids=[f"{m}-{s}" for m, s, _ in REFUSED])
def test_refused_before_the_model_is_loaded(method, settings, message, tmp_path):
    args = config(tmp_path, **settings)
    with pytest.raises(ValueError, match=message):
        RegulatedGRPOTrainer("no/such-model", trl_runs.spread, args, DATA, regulator=method)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("grpo", {"importance_sampling_level": "sequence", "loss_type": "grpo", "beta": 0.1, "entropy_coef": 0.1}),
        ("tr-grpo(kl_weighted=False)", {"beta": 0.1, "loss_type": "grpo", "entropy_coef": 0.1}),
        ("grpo(passes=2)", {"beta": 0.1, "loss_type": "bnpo", "entropy_coef": 0.1} | TWO),
        ("lopti", {"loss_type": "grpo", "top_entropy_quantile": 0.2, "save_strategy": "epoch"} | TWO),
        ("ar", {"num_iterations": 3, "max_steps": 5}),
        ("tr-grpo", {"beta": 0.1}),
        *[("lopti", {"beta": 0.1, "loss_type": kind} | TWO) for kind in ("grpo", "sapo", "bnpo", "vespo")],
        ("lopti", {"beta": 0.1, "top_entropy_quantile": 0.2} | TWO),
        ("lopti", {"beta": 0.1, "off_policy_mask_threshold": 0.5} | TWO),
    ],
)
def test_what_can_be_done_is_not_refused(method, settings, tmp_path):
    regulator = regulators.parse(method)
    trl_checks.check_config(config(tmp_path, **settings), regulator, probe(regulator), method)


def needing(*fields):
    def mine(batch):
        return regulators.parse("ar")(batch)

    mine.needs = frozenset(fields)
    return mine


def test_a_reference_that_trl_does_not_have_is_missed_before_the_model_is_loaded(tmp_path):
    args = config(tmp_path)
    with pytest.raises(CannotRegulateError, match=r"needs ref_logp, .*set beta in GRPOConfig"):
        RegulatedGRPOTrainer("no/such-model", trl_runs.spread, args, DATA, regulator=needing("ref_logp"))


def test_the_samplers_log_probabilities_are_missed_before_anything_is_generated(tmp_path):
    with pytest.raises(CannotRegulateError, match=r"needs sampler_logp, .*use_vllm=True .*or from a rollout_func"):
        build(tmp_path, needing("sampler_logp"))
    trainer = build(tmp_path, needing("sampler_logp"), more={"rollout_func": trl_runs.ragged}, max_completion_length=6)
    with pytest.raises(CannotRegulateError, match="rollout_func returned logprobs=None"):
        rollouts(trainer)


def test_saves_by_share_are_checked_when_training_starts(tmp_path):
    trainer = build(tmp_path, "lopti", save_strategy="steps", save_steps=0.25, max_steps=4, **TWO)
    with pytest.raises(CannotRegulateError, match=r"save_steps \(1\) must be a multiple of 2"):
        trainer.train()


def fake(**settings):
    args = SimpleNamespace(per_device_train_batch_size=2, steps_per_generation=1)
    return SimpleNamespace(
        **{
            "aux_loss_enabled": False, "is_deepspeed_enabled": False, "is_fsdp_enabled": False, "args": args,
            "accelerator": SimpleNamespace(num_processes=2, is_fsdp2=False), "num_generations": 4, "use_vllm": False,
        }
        | settings
    )  # fmt: skip


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("lopti", {"aux_loss_enabled": True}, "router_aux_loss_coef=0"),
        ("lopti", {"is_deepspeed_enabled": True}, "use FSDP or DDP"),
        ("nthr", {"is_fsdp_enabled": True}, "use FSDP2"),
        ("nthr", {"is_deepspeed_enabled": True}, "use FSDP2"),
        ("nthr", {}, "whole groups on each process"),
        ("nthr | entropy", {}, "TopEntropy may read the whole batch"),
    ],
)
def test_refused_once_the_trainer_is_known(method, settings, message):
    regulator = regulators.parse(method)
    with pytest.raises(CannotRegulateError, match=message):
        trl_checks.check_trainer(fake(**settings), regulator, probe(regulator), method)


def test_a_version_of_trl_without_what_poise_hooks_into_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(trl, "__version__", "2.0.0")
    monkeypatch.delattr(STOCK, "_calculate_rewards")
    with pytest.raises(CannotRegulateError, match=r"GRPOTrainer._calculate_rewards.* does not exist in TRL 2.0.0"):
        build(tmp_path, "grpo")


@pytest.mark.parametrize(
    ("module", "name", "reason"),
    [
        ("trl", "RLOOTrainer", "one ratio for a whole response"),
        ("trl.experimental.async_grpo", "AsyncGRPOTrainer", "for which poise has no adapter"),
        ("trl.experimental.online_dpo", "OnlineDPOTrainer", "pairs of whole responses"),
        ("trl", "SFTTrainer", "put RegulatorMixin before GRPOTrainer"),
    ],
)
def test_trainers_of_trl_that_are_no_grpo_trainer_get_their_reason(module, name, reason):
    class Mine(RegulatorMixin, getattr(pytest.importorskip(module), name)):
        pass

    with pytest.raises(CannotRegulateError, match=f"Mine does not inherit from .*{reason}") as caught:
        Mine(regulator="ar")
    assert "Unsloth" not in str(caught.value)


def test_a_patched_trainer_is_refused(monkeypatch, tmp_path):
    for name in ("GRPOTrainer", "UnslothGRPOTrainer"):  # the second is what Unsloth calls its own

        class Replaced(RegulatorMixin, type(name, (), {"__module__": "unsloth_cache"})):
            pass

        with pytest.raises(
            CannotRegulateError,
            match=f"not inherit from TRL's GRPOTrainer: .* such as Unsloth, has replaced GRPOTrainer by its own {name}",
        ):
            Replaced(regulator="ar")
    monkeypatch.setattr(STOCK, "compute_loss", lambda *_: None)
    with pytest.raises(
        CannotRegulateError, match=r"GRPOTrainer.compute_loss is not TRL's own but comes from .*test_trl"
    ):
        build(tmp_path, "ar")


def test_a_method_may_come_from_any_class_of_trl(monkeypatch):
    """As after a refactoring of TRL: what its trainers share moves to their base class."""
    base = STOCK.__mro__[1]
    monkeypatch.setattr(base, "_calculate_rewards", STOCK._calculate_rewards, raising=False)
    monkeypatch.delattr(STOCK, "_calculate_rewards")
    assert base.__module__.startswith("trl.")
    trl_checks.check_trl(RegulatedGRPOTrainer)


def test_a_loss_that_goes_past_poise_is_noticed(tmp_path):
    class Mine(RegulatedGRPOTrainer):
        def compute_loss(self, model, inputs, **_):
            return STOCK._compute_loss(self, model, inputs)

    class Other(RegulatedGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            return STOCK._generate_and_score_completions(self, inputs)

    with pytest.raises(RuntimeError, match="the loss bypassed poise, so ar had no effect"):
        build(tmp_path, "ar", kind=Mine).train()
    with pytest.raises(RuntimeError, match="carries no weights of ar"):
        build(tmp_path, "ar", kind=Other).train()


def test_what_is_correct_is_never_guessed(tmp_path):
    with pytest.raises(CannotRegulateError, match=r"'nobody' is not a reward function.*parity"):
        build(tmp_path, "nthr", correct="nobody", reward=trl_runs.parity)
    trainer = build(tmp_path, "nthr", correct="parity", reward=trl_runs.parity)
    with pytest.raises(CannotRegulateError, match="does not say what is correct"):
        rollouts(trainer)
    trainer._correct = lambda rewards: rewards[:, 0] > 2
    assert WEIGHTS in rollouts(trainer)


@pytest.mark.parametrize(
    ("then", "message"),
    [
        ("lopti", r"returned 2 phases \(low, high\), but 1 in the trial"),
        ("tr-grpo", "weights KL terms, but did not in the trial"),
    ],
)
def test_a_regulator_that_is_not_what_it_was_when_it_was_tried_is_refused(then, message, tmp_path):
    def fickle(batch):
        return regulators.parse("grpo" if batch.mask.shape == (8, 16) else then)(batch)

    trainer = build(tmp_path, fickle, beta=0.1)
    with pytest.raises(CannotRegulateError, match=message):
        rollouts(trainer)
