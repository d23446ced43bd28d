"""A loss that does not answer token weights is found out before the first update, and every other is left in peace."""

import copy
from types import SimpleNamespace

import pytest
import torch

trl = pytest.importorskip("trl", reason="TRL is not installed (extra 'trl')")

from trl.experimental.gmpo import GMPOTrainer  # noqa: E402

from poise.integrations import trl_checks  # noqa: E402
from poise.integrations.demands import CannotRegulateError  # noqa: E402
from poise.integrations.trl import KL_WEIGHTS, WEIGHTS, RegulatorMixin  # noqa: E402
from poise.integrations.trl_loss import check_loss  # noqa: E402
from support import trl_runs  # noqa: E402
from support.trl_runs import build, rollouts, weights  # noqa: E402

STOCK = trl.GRPOTrainer
LOSSES = ("dapo", "grpo", "bnpo", "dr_grpo", "sapo", "cispo", "luspo", "vespo")
VARIED = {"temperature": 3.0, "max_completion_length": 8, "more": {"rollout_func": trl_runs.ragged}}


class RegulatedGMPO(RegulatorMixin, GMPOTrainer):
    pass


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A trainer and a micro-batch with a reference, old log-probabilities and holes."""
    more = {"more": {"rollout_func": trl_runs.holed}}
    trainer = build(tmp_path_factory.mktemp("trl"), "ar", num_iterations=2, beta=0.1, epsilon_high=0.3, **VARIED | more)
    inputs = {name: value for name, value in rollouts(trainer).items() if name not in (WEIGHTS, KL_WEIGHTS)}
    assert {"tool_mask", "ref_per_token_logps", "old_per_token_logps"} <= inputs.keys()
    return trainer, inputs


def check(made, loss, inputs=None, *, kl=False):
    trainer, own = made
    return check_loss(trainer, loss.__get__(trainer), trainer.model, own if inputs is None else inputs, "ar", kl=kl)


# --- losses of one's own


def tokens(self, model, inputs):
    """What a loss of one's own begins with."""
    ids, mask = (torch.cat([inputs[f"{part}_{x}"] for part in ("prompt", "completion")], 1) for x in ("ids", "mask"))
    return self._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].shape[1])[0]


def sequence_level(self, model, inputs):
    """Advantages may be (B, T), but the ratio is the response's."""
    mask, advantages = inputs["completion_mask"], inputs["advantages"]
    log_ratio = tokens(self, model, inputs) - inputs["old_per_token_logps"]
    ratio = ((log_ratio * mask).sum(1) / mask.sum(1)).exp()[:, None]
    advantages = advantages[:, None] if advantages.dim() == 1 else advantages
    return -(ratio * advantages * mask).sum() / mask.sum()


def mean_advantage(self, model, inputs):
    advantages = inputs["advantages"]
    flat = advantages.mean(1) if advantages.dim() == 2 else advantages
    return STOCK._compute_loss(self, model, inputs | {"advantages": flat})


def normalised(self, model, inputs):
    advantages = inputs["advantages"]
    return STOCK._compute_loss(self, model, inputs | {"advantages": advantages / (advantages.std() + 1e-4)})


def signs(self, model, inputs):
    return STOCK._compute_loss(self, model, inputs | {"advantages": inputs["advantages"].sign()})


def responses_only(self, model, inputs):
    return -(inputs["advantages"] * (tokens(self, model, inputs) * inputs["completion_mask"]).sum(1)).sum()


def no_advantages(self, model, inputs):
    return -(tokens(self, model, inputs) * inputs["completion_mask"]).mean()


def own_forward(_self, model, inputs):
    return model(input_ids=inputs["completion_ids"]).logits.mean() * inputs["advantages"].sum()


def clipped(self, model, inputs, width):
    """The clipped objective; ``width`` of the advantages is how far a ratio may go."""
    mask, advantages = inputs["completion_mask"] * inputs.get("tool_mask", 1), inputs["advantages"]
    advantages = advantages[:, None] if advantages.dim() == 1 else advantages
    ratio = (tokens(self, model, inputs) - inputs["old_per_token_logps"]).exp()
    bounded = torch.maximum(torch.minimum(ratio, 1 + width(advantages)), 1 - width(advantages))
    return -(torch.minimum(ratio * advantages, bounded * advantages) * mask).sum() / mask.sum()


def clips_by_advantage(self, model, inputs):
    return clipped(self, model, inputs, lambda advantages: 0.2 / (1 + advantages.abs()))


def kl_beside_advantages(self, model, inputs):
    """A KL term for tokens with an advantage alone: those with a weight of 0 would lose theirs."""
    new, advantages = tokens(self, model, inputs), inputs["advantages"]
    counts = (advantages[:, None] if advantages.dim() == 1 else advantages) != 0
    kl = (new - inputs["ref_per_token_logps"]).square() * counts * inputs["completion_mask"]
    return STOCK._compute_loss(self, model, inputs) + kl.mean()


def bounded(self, model, inputs):
    return STOCK._compute_loss(self, model, inputs | {"advantages": inputs["advantages"].clamp(-3, 3)})


BROKEN = {
    sequence_level: "not in proportion to its own advantage, or depends on other tokens' advantages",
    mean_advantage: "not in proportion",
    normalised: "not in proportion|are passed as",
    signs: "not in proportion",
    kl_beside_advantages: "not in proportion",
    responses_only: r"fails on advantages of shape \(B, T\), with RuntimeError|changes when",
    no_advantages: "does not depend on the advantages",
    own_forward: "not get its log-probabilities from self._get_per_token_logps_and_entropies",
}


@pytest.mark.parametrize("loss", BROKEN, ids=lambda loss: loss.__name__)
def test_a_loss_that_does_not_weight_tokens_is_refused(loss, made):
    with pytest.raises(CannotRegulateError, match=BROKEN[loss]) as caught:
        check(made, loss)
    assert "cannot be regulated by ar" in str(caught.value)


def test_a_loss_that_breaks_the_rule_only_where_it_clips_is_refused(made):
    many = {name: value.repeat_interleave(16, 0) if value.dim() else value for name, value in made[1].items()}
    assert check(made, lambda *given: clipped(*given, lambda advantages: 0.2 * torch.ones_like(advantages)), many)
    with pytest.raises(CannotRegulateError, match="not in proportion"):
        check(made, clips_by_advantage, many)


def test_a_bound_on_advantages_is_refused_where_the_batch_reaches_it(made):
    assert check(made, bounded)
    large = made[1]["advantages"] / made[1]["advantages"].abs().max() * 6
    with pytest.raises(CannotRegulateError, match="not in proportion"):
        check(made, bounded, made[1] | {"advantages": large})


def test_stock_at_the_level_of_sequences_is_refused(made, monkeypatch):
    monkeypatch.setattr(made[0], "importance_sampling_level", "sequence")
    with pytest.raises(CannotRegulateError, match="not in proportion"):
        check(made, STOCK._compute_loss)


@pytest.mark.parametrize("kind", LOSSES)
def test_stock_losses_pass_and_weight_kl_terms(kind, made, monkeypatch):
    monkeypatch.setattr(made[0], "loss_type", kind)
    assert check(made, STOCK._compute_loss)
    assert check(made, STOCK._compute_loss, kl=True)


def test_a_loss_with_a_kl_term_of_its_own_is_refused_if_that_term_has_weights(made):
    def own(self, model, inputs):
        return STOCK._compute_loss(self, model, inputs) + 0.0 * self.beta

    def other(self, model, inputs):
        beta, self.beta = self.beta, float(self.beta)  # not the one with weights
        loss = STOCK._compute_loss(self, model, inputs)
        self.beta = beta
        return loss

    assert check(made, own, kl=True)
    assert check(made, other)
    with pytest.raises(CannotRegulateError, match="not in proportion to its own advantage and, in its KL term, to"):
        check(made, other, kl=True)


def test_a_term_of_ones_own_beside_the_loss_passes(made):
    def bonus(self, model, inputs):
        norm = sum(parameter.square().sum() for parameter in model.parameters())
        return 0.5 * STOCK._compute_loss(self, model, inputs) + norm * torch.rand(())

    assert check(made, bonus)


def test_the_test_leaves_no_trace(made, monkeypatch):
    trainer, inputs = made
    calls = []
    monkeypatch.setattr(trainer.model, "forward", lambda *_, **__: calls.append(1))
    for collective in ("gather", "reduce", "gather_for_metrics"):  # other processes may be elsewhere
        monkeypatch.setattr(trainer.accelerator, collective, lambda *_, **__: calls.append(1))
    trainer.use_adaptive_entropy, trainer._entropy_bonus_enabled, trainer.diary = True, True, []

    def with_diary(self, model, inputs):
        self.diary.append(self.entropy_coef)
        self.once = True
        return STOCK._compute_loss(self, model, inputs)

    before, metrics = dict(vars(trainer)), copy.deepcopy(trainer._metrics)
    values, state = {k: v.clone() for k, v in inputs.items()}, torch.random.get_rng_state()
    assert check(made, with_diary)
    assert not calls
    assert trainer.diary == []
    assert vars(trainer) == before
    assert trainer._metrics == metrics
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(inputs[k], v) for k, v in values.items())
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_a_loss_that_adapts_its_entropy_bonus_is_not_refused(made, monkeypatch):
    """TRL changes the coefficient in every call of its loss, so that each trial would have another loss."""
    trainer, _ = made
    for name in ("use_adaptive_entropy", "_entropy_bonus_enabled"):
        monkeypatch.setattr(trainer, name, True)
    for name, value in {"entropy_target": 9.0, "entropy_coef_delta": 0.5, "entropy_coef_max": 9.0}.items():
        monkeypatch.setattr(trainer.args, name, value)
    assert check(made, STOCK._compute_loss)


@pytest.mark.parametrize("count", [0, 1])
def test_a_batch_that_cannot_tell_leaves_it_to_the_next(count, made):
    trainer, inputs = made
    few = torch.zeros_like(inputs["completion_mask"])
    few[:, :count] = 1
    short = inputs | {"completion_mask": few, "tool_mask": torch.ones_like(few)}
    assert not check(made, sequence_level, short)
    assert not check(made, STOCK._compute_loss, short)
    trainer._poise.loss_checked = False
    batch = {**short, WEIGHTS: few[:, None].float()}
    trainer._compute_loss(trainer.model, batch)
    assert not trainer._poise.loss_checked
    trainer._compute_loss(trainer.model, {**inputs, WEIGHTS: inputs["completion_mask"][:, None].float()})
    assert trainer._poise.loss_checked


def test_an_error_that_is_not_about_weights_says_where_it_came_up(made):
    def typo(_self, _model, inputs):
        return inputs["advantage"]

    with pytest.raises(KeyError) as caught:
        check(made, typo)
    assert "before any update" in caught.value.__notes__[0]


def test_one_process_that_finds_a_fault_stops_all(made, monkeypatch):
    trainer, _ = made
    monkeypatch.setattr(trainer, "accelerator", SimpleNamespace(num_processes=2))
    loss = SimpleNamespace(__get__=lambda _: lambda *_: torch.zeros(()))
    found = {"here": None}
    monkeypatch.setattr("poise.integrations.trl_loss._fault", lambda *_, **__: found["here"])
    monkeypatch.setattr("poise.integrations.trl_loss.gather_object", lambda own: [*own, found["there"]])
    for found["there"], tested in ((None, False), ("", True)):
        assert check(made, loss) is tested
    found["there"] = "it is broken"
    with pytest.raises(CannotRegulateError, match="it is broken"):
        check(made, loss)


# --- whole runs


@pytest.mark.parametrize("method", ["ar", "lopti"])
def test_a_subclass_with_such_a_loss_does_not_train(method, tmp_path):
    class Mine(RegulatorMixin, type("Base", (STOCK,), {"_compute_loss": sequence_level})):
        pass

    trainer = build(tmp_path, method, kind=Mine, num_iterations=2, max_completion_length=6)
    before = weights(trainer)
    with pytest.raises(CannotRegulateError, match=f"the loss of Base cannot be regulated by {method}"):
        trainer.train()
    assert torch.equal(weights(trainer), before)


@pytest.mark.slow
def test_gmpo_is_left_as_it_is_by_grpo_and_refused_by_others(tmp_path):
    settings = {"max_steps": 2, "num_iterations": 2, "max_completion_length": 8}  # as many tokens as responses
    stock = build(tmp_path, kind=GMPOTrainer, **settings)
    before = weights(stock)
    stock.train()
    ours = build(tmp_path, "grpo", kind=RegulatedGMPO, **settings)
    ours.train()
    assert not torch.equal(weights(stock), before)
    assert torch.equal(weights(ours), weights(stock))
    with pytest.raises(CannotRegulateError, match="the loss of GMPOTrainer cannot be regulated by ar"):
        build(tmp_path, "ar", kind=RegulatedGMPO, **settings).train()


SEQUENCE = {"importance_sampling_level": "sequence"}
VARIANTS = [
    {"loss_type": "vespo"}, {"loss_type": "sapo", "beta": 0.1}, {"loss_type": "cispo", "entropy_coef": 0.1},
    {"loss_type": "bnpo", "top_entropy_quantile": 0.5}, {"loss_type": "luspo"} | SEQUENCE,
    {"loss_type": "grpo", "beta": 0.1} | SEQUENCE, {"loss_type": "dapo", "off_policy_mask_threshold": 0.1} | SEQUENCE,
]  # fmt: skip


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
@pytest.mark.filterwarnings("ignore:.*luspo")
@pytest.mark.slow
def test_grpo_is_stock_trl_bit_for_bit_whatever_the_loss(settings, tmp_path):
    settings = settings | VARIED | {"max_steps": 2, "num_iterations": 2, "learning_rate": 1e-2, "epsilon": 0.01}
    stock = build(tmp_path, kind=STOCK, **settings)
    before = weights(stock)
    stock.train()
    ours = build(tmp_path, "grpo(passes=2)", **settings)
    ours.train()
    assert not torch.equal(weights(stock), before)
    assert torch.equal(weights(ours), weights(stock))
    for row, theirs in zip(ours.state.log_history[:-1], stock.state.log_history[:-1], strict=True):
        own = {name for name in row if name.startswith("reg/")} | {"step_time"}
        assert {k: v for k, v in row.items() if k not in own} == {k: v for k, v in theirs.items() if k != "step_time"}


def test_a_regulator_that_begins_to_regulate_is_refused_at_the_level_of_sequences(tmp_path):
    from poise import regulators

    def fickle(batch):
        return regulators.parse("grpo" if batch.mask.shape == (8, 16) else "ar")(batch)

    trainer = build(tmp_path, fickle, loss_type="grpo", max_completion_length=6, **SEQUENCE)
    with pytest.raises(CannotRegulateError, match="collapse to their mean"):
        rollouts(trainer)


def test_another_version_of_trl_trains_with_a_warning_if_its_loss_weights_tokens(monkeypatch, tmp_path):
    monkeypatch.setattr(trl, "__version__", "unknown")  # as that of a copy which is not installed
    with pytest.warns(UserWarning, match=r"tested with TRL 1.10 to 1.16, this is unknown"):
        trl_checks.check_trl(trl_runs.RegulatedGRPOTrainer)
    monkeypatch.setattr(trl, "__version__", "1.17.0")
    with pytest.warns(UserWarning, match=r"tested with TRL 1.10 to 1.16, this is 1.17.0"):
        trainer = build(tmp_path, "ar", max_steps=1, max_completion_length=6)  # its loss is tested, then it trains
    before = weights(trainer)
    trainer.train()
    assert not torch.equal(weights(trainer), before)
    assert trainer._poise.loss_checked
