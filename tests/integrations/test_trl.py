"""Poise inside TRL, with the real TRL on the embedded model."""

import json
import shutil

import pytest
import torch

trl = pytest.importorskip("trl", reason="TRL is not installed (extra 'trl')")
peft = pytest.importorskip("peft")

from poise import TokenBatch, objective, regulators  # noqa: E402
from poise.head import Head  # noqa: E402
from poise.integrations.demands import CannotRegulateError, probe  # noqa: E402
from poise.integrations.trl import KL_WEIGHTS, USES, WEIGHTS, RegulatedGRPOTrainer, RegulatorMixin  # noqa: E402
from support import processes, trl_runs  # noqa: E402
from support.processes import close  # noqa: E402
from support.trl_runs import DATA, build, rollouts, weights  # noqa: E402

STOCK = trl.GRPOTrainer
PLAIN = ["grpo", "grpo(passes=2)"]
METHODS = [
    *PLAIN,
    *sorted(regulators.TABLE.keys() - {"grpo", "constant", "stare"}),
    "constant(weight=0.5)",
    "stare(max_entropy=None)",  # the model is too hot for the default
    "ar(alpha=0.3) | lopti(threshold=0.5)",
    "nthr | lopti",
]
HOT = 3.0  # as hot as it takes for the embedded model to hesitate: probabilities from 0 to 1
VARIED = {"temperature": HOT, "more": {"rollout_func": trl_runs.ragged}}
HOLED = VARIED | {"more": {"rollout_func": trl_runs.holed}}
TIMES = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second"}


def phases_of(method):
    return len(probe(regulators.parse(method)).phases)


def gradient(trainer, loss):
    trainer.model.zero_grad()
    loss.backward()
    return torch.cat(
        [p.grad.flatten() if p.grad is not None else p.new_zeros(p.numel()) for p in trainer.model.parameters()]
    )


# --- TRL is left as it is


@pytest.mark.parametrize(("steps", "dropout"), [(4, None), pytest.param(3, 0.3, marks=pytest.mark.slow)])
def test_grpo_is_stock_trl_bit_for_bit(steps, dropout, tmp_path):
    settings = {"max_steps": steps, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    if dropout:
        settings["more"] = {"peft_config": peft.LoraConfig(r=4, lora_dropout=dropout, target_modules="all-linear")}
    stock = build(tmp_path, kind=STOCK, **settings)
    before = weights(stock)
    stock.train()
    ours = build(tmp_path, "grpo", **settings)  # after that run: making a trainer seeds torch
    ours.train()
    assert not torch.equal(before, weights(stock))
    assert torch.equal(weights(ours), weights(stock))
    for row, theirs in zip(ours.state.log_history, stock.state.log_history, strict=True):
        own = {name for name in row if name.startswith("reg/")}
        assert own or "train_runtime" in row
        assert {k: v for k, v in row.items() if k not in TIMES | own} == {
            k: v for k, v in theirs.items() if k not in TIMES
        }


def test_evaluation_is_stock_trl(tmp_path):
    found = []
    for kind, regulator in ((STOCK, None), (RegulatedGRPOTrainer, "lopti")):
        trainer = build(tmp_path, regulator, kind=kind, num_iterations=2, more={"eval_dataset": DATA.select(range(4))})
        found.append({k: v for k, v in trainer.evaluate().items() if "time" not in k and "per_second" not in k})
    assert found[0] == found[1]
    assert "eval_reward" in found[0]


def test_inputs_are_not_mutated(tmp_path):
    trainer = build(tmp_path, "lopti", num_iterations=2, beta=0.1)
    inputs = rollouts(trainer)
    before = {name: value.clone() for name, value in inputs.items()}
    trainer._compute_loss(trainer.model, inputs)
    assert inputs.keys() == before.keys()
    assert all(torch.equal(inputs[name], before[name]) for name in before.keys() - {USES})
    assert torch.equal(inputs[USES], before[USES] + 1)


# --- the update is the regulator's


def by_hand(trainer, inputs, hot=HOT):
    """The same batch from plain transformers calls: log-probabilities with gradients, entropies, hidden states."""
    length = inputs["completion_ids"].shape[1]
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    out = trainer.model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    logp = (out.logits[:, -length - 1 : -1] / hot).log_softmax(-1)
    chosen = logp.gather(-1, inputs["completion_ids"][..., None])[..., 0]
    return chosen, -(logp.exp() * logp).sum(-1), out.hidden_states[-1][:, -length - 1 : -1]


@pytest.mark.parametrize("method", METHODS)
def test_the_gradient_is_that_of_poise(method, tmp_path):
    trainer = build(
        tmp_path, method, correct="spread", num_iterations=max(phases_of(method), 2), epsilon=0.1, epsilon_high=0.2,
        **VARIED,
    )  # fmt: skip
    state = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    inputs = rollouts(trainer, count=3)
    moved = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.model.load_state_dict(state)
    with torch.no_grad():
        old_logp, entropy, hidden = by_hand(trainer, inputs)
    trainer.model.load_state_dict(moved)
    theirs = inputs["old_per_token_logps"]  # to the bit, since methods that draw lots are seeded with it
    assert torch.allclose(old_logp[inputs["completion_mask"] == 1], theirs[inputs["completion_mask"] == 1], atol=1e-4)
    batch = TokenBatch(
        theirs, inputs["completion_mask"], inputs["advantages"], groups=torch.arange(12) // 4, entropy=entropy,
        correct=torch.arange(12) % 2 == 1, hidden=hidden, head=Head(state["lm_head.weight"], temperature=HOT),
        targets=inputs["completion_ids"],
    )  # fmt: skip
    settings = objective.Settings(clip_low=0.1, clip_high=0.2, dual_clip=None)
    phases = regulators.parse(method)(batch)
    if method in PLAIN:
        assert not {WEIGHTS, KL_WEIGHTS} & inputs.keys()  # the batch is as TRL made it
    else:
        assert len(phases) == inputs[WEIGHTS].shape[1]
        assert not (inputs[WEIGHTS] == inputs["completion_mask"][:, None]).all()
    for phase in phases:
        logp, _, _ = by_hand(trainer, inputs)
        loss, metrics = objective.policy_loss(logp, batch, phase, settings, normalizer=batch.mask.sum())
        expected = gradient(trainer, loss)
        assert metrics["optim/drift"] > 1e-4  # the ratio is live
        ours = trainer._compute_loss(trainer.model, inputs)
        assert torch.isclose(ours, loss, rtol=1e-5, atol=1e-6)
        assert close(gradient(trainer, ours), expected)


@pytest.mark.parametrize("method", ["tr-grpo", "tr-grpo | lopti(threshold=0.5)"])
@pytest.mark.parametrize("settings", [{}, {"top_entropy_quantile": 0.5}, {"loss_type": "grpo"}], ids=str)
def test_kl_terms_have_weights(method, settings, tmp_path):
    """The gradient with KL is that without, and the KL terms' own: with weights, computed by hand."""
    trainer = build(
        tmp_path, method, num_iterations=max(phases_of(method), 2) if "lopti" in method else 1, beta=0.3,
        more={"rollout_func": trl_runs.ragged}, **{"loss_type": "dapo"} | settings,
    )  # fmt: skip
    inputs = rollouts(trainer, count=2)
    mask = inputs["completion_mask"]
    share = 1 / mask.sum() if not settings.get("loss_type") else 1 / mask.sum(1, keepdim=True) / len(mask)
    found = set()
    for phase in range(inputs[KL_WEIGHTS].shape[1]):
        weights = inputs[KL_WEIGHTS][:, phase]
        found |= set(weights[mask == 1].tolist())
        both = gradient(trainer, trainer._compute_loss(trainer.model, inputs))
        trainer.beta = 0.0
        inputs[USES] -= 1 if "lopti" in method else 0
        alone = gradient(trainer, trainer._compute_loss(trainer.model, inputs))
        trainer.beta = 0.3
        logp = by_hand(trainer, inputs, hot=trainer.temperature)[0]
        gap, old = inputs["ref_per_token_logps"] - logp, inputs.get("old_per_token_logps", logp.detach())
        kl = 0.3 * (weights * (logp - old).exp() * (gap.exp() - gap - 1) * mask * share).sum()  # TRL's, corrected
        assert close(both - alone, gradient(trainer, kl), 1e-4)
    assert len(found - {0.0, 1.0}) > 2


def test_old_log_probabilities_are_computed_where_trl_has_none(tmp_path):
    trainer = build(tmp_path, "ar(alpha=0.5)", **VARIED)
    moved = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    inputs = rollouts(trainer)
    assert "old_per_token_logps" not in inputs  # so that TRL's loss is as it was
    trainer.model.load_state_dict(moved)
    with torch.no_grad():
        prob = by_hand(trainer, inputs)[0].exp()
    expected = (0.5 + 0.5 * prob) * inputs["completion_mask"]
    assert torch.allclose(inputs[WEIGHTS][:, 0], expected, atol=1e-5)
    assert expected.std() > 0.1


def test_the_samplers_and_the_references_log_probabilities_reach_the_regulator(tmp_path):
    def with_logp(prompts, trainer):
        made = trl_runs.ragged(prompts, trainer)
        values = [[-0.5 - 0.01 * place for place in range(len(ids))] for ids in made["completion_ids"]]
        values[0][1] = float("nan")  # as vLLM has it now and then
        return {**made, "logprobs": values}

    seen = []

    def mine(batch):
        seen.append(batch)
        return regulators.parse("ar")(batch)

    mine.needs = {"sampler_logp", "ref_logp"}
    trainer = build(tmp_path, mine, beta=0.1, temperature=HOT, more={"rollout_func": with_logp})
    rollouts(trainer)
    batch = seen[-1]  # the first was made up
    expected = (-0.5 - 0.01 * torch.arange(batch.mask.shape[1])).expand(batch.mask.shape).clone()
    expected[0, 1] = batch.old_logp[0, 1]
    assert torch.allclose(batch.sampler_logp[batch.mask], expected[batch.mask])
    assert torch.allclose(batch.ref_logp[batch.mask], batch.old_logp[batch.mask], atol=1e-4)  # it has not moved yet


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo", "sapo", "cispo", "luspo", "vespo"])
def test_the_phases_of_lopti_add_up_to_trl(loss_type, beta, tmp_path):
    trainer = build(tmp_path, "lopti", num_iterations=2, loss_type=loss_type, beta=beta, **HOLED)
    inputs = rollouts(trainer)
    assert 0 < inputs["tool_mask"].float().mean() < 1
    assert (KL_WEIGHTS in inputs) == (beta != 0)
    full = STOCK._compute_loss(trainer, trainer.model, inputs)
    expected = gradient(trainer, full)
    if beta:
        assert trainer._metrics["train"]["kl"][-1] > 0
    total, parts = 0.0, []
    for _ in range(2):
        loss = trainer._compute_loss(trainer.model, inputs)
        parts.append(gradient(trainer, loss))
        total = total + loss.detach()
    assert min(part.norm() for part in parts) > 1e-3 * expected.norm()
    assert torch.isclose(total, full.detach(), rtol=1e-5, atol=1e-6)
    assert close(sum(parts), expected)


def test_gradient_accumulation_changes_nothing(tmp_path):
    found = []
    for rows in (8, 4, 2):
        trainer = build(
            tmp_path, "ar | lopti(threshold=0.9)", num_iterations=2, beta=0.1, reward=trl_runs.parity, optim="sgd",
            learning_rate=0.1, per_device_train_batch_size=rows, gradient_accumulation_steps=8 // rows,
            more={"rollout_func": trl_runs.injected},
        )  # fmt: skip
        before = weights(trainer)
        trainer.train()
        found.append(weights(trainer) - before)
    assert close(found[1], found[0], 1e-4)
    assert close(found[2], found[0], 1e-4)


def test_lora(tmp_path):
    adapter = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = build(
        tmp_path, "nthr | lopti(threshold=0.9)", correct="spread", num_iterations=2, beta=0.1, temperature=0.9,
        more={"peft_config": adapter},
    )  # fmt: skip
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    for name, value in trainer.model.named_parameters():
        assert torch.equal(value, before[name]) == ("lora" not in name)
    assert 0 < trainer.state.log_history[0]["reg/low/weight_mean"] < 1
    assert "reg/high/flagged_share" in trainer.state.log_history[0]


# --- phases and TRL's loop


class Watched(RegulatedGRPOTrainer):
    """Writes down when rollouts are made, and which phase follows."""

    def _generate_and_score_completions(self, inputs):
        self.seen = [*getattr(self, "seen", []), "rollouts" if self.model.training else "evaluation"]
        return super()._generate_and_score_completions(inputs)

    def _next_phase(self, inputs):
        self.seen.append(super()._next_phase(inputs))
        return self.seen[-1]


def test_evaluation_between_phases_leaves_them_alone(tmp_path):
    trainer = build(
        tmp_path, "lopti", kind=Watched, num_iterations=2, eval_strategy="steps", eval_steps=1,
        per_device_train_batch_size=4, more={"eval_dataset": DATA.select(range(2))},
    )  # fmt: skip
    trainer.train()
    assert trainer.seen == ["rollouts", 0, "evaluation", 1, "evaluation"] * 2


@pytest.mark.slow
def test_fresh_rollouts_begin_in_the_first_phase_also_after_resume(tmp_path):
    settings = {
        "regulator": "lopti", "kind": Watched, "num_iterations": 2, "steps_per_generation": 2, "max_steps": 8,
        "per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 4,
    }  # fmt: skip
    trainer = build(tmp_path, **settings)
    trainer.train()
    assert trainer.seen == ["rollouts", 0, 0, 1, 1] * 2
    whole = weights(trainer)

    again = build(tmp_path, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert again.seen == ["rollouts", 0, 0, 1, 1]
    assert torch.allclose(weights(again), whole, atol=1e-6)

    again._step = 3  # as a run leaves it that was stopped
    again.seen = []
    again.train()
    assert again.seen == ["rollouts", 0, 0, 1, 1] * 2

    broken = shutil.copytree(tmp_path / "checkpoint-4", tmp_path / "checkpoint-6")
    state = json.loads((broken / "trainer_state.json").read_text())
    (broken / "trainer_state.json").write_text(json.dumps(state | {"global_step": 6}))
    with pytest.raises(CannotRegulateError, match=r"between the phases of lopti.*Resume from checkpoint-4"):
        build(tmp_path, **settings).train(resume_from_checkpoint=str(broken))


@pytest.mark.parametrize("threshold", [0, 2])
def test_a_phase_without_a_token_does_not_move_the_model(threshold, tmp_path):
    """Adam has momentum and weight decay: a step without a gradient would show."""
    stock = build(tmp_path, kind=STOCK, max_steps=2, per_device_train_batch_size=4)
    before = weights(stock)
    stock.train()
    ours = build(
        tmp_path, f"lopti(threshold={threshold})", num_iterations=2, max_steps=4, per_device_train_batch_size=4
    )
    ours.train()
    assert close(weights(ours) - before, weights(stock) - before, 1e-4)
    idle = [row["reg/idle_steps"] for row in ours.state.log_history[:-1]]
    assert idle == ([1.0, 0.0] if threshold == 0 else [0.0, 1.0]) * 2


def test_rollouts_without_a_spread_do_not_move_the_model(tmp_path):
    def same(completions, **_):
        return [1.0 for _ in completions]

    trainer = build(tmp_path, "lopti", reward=same, num_iterations=2, per_device_train_batch_size=4, max_steps=2)
    before = weights(trainer)
    trainer.train()
    assert torch.equal(weights(trainer), before)
    assert [row["reg/idle_steps"] for row in trainer.state.log_history[:-1]] == [1.0, 1.0]


@pytest.mark.long
@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    alone = trl_runs.train_together(tmp_path, processes=1)
    processes.launch(trl_runs.__file__, tmp_path)
    together = torch.load(tmp_path / "result.pt")
    for method, (change, logged) in alone.items():
        assert min(logged[0][f"reg/{phase}/weight_mean"] for phase in ("low", "high")) > 0.05
        assert close(together[method][0], change, 1e-4)
        if not method.startswith("nthr"):  # whose figures are an average over processes
            for row, other in zip(logged, together[method][1], strict=True):
                assert row == pytest.approx(other, rel=1e-4)
        one, two = (exported(tmp_path / f"tokens-{method[:4]}-{count}.jsonl") for count in (1, 2))
        assert len(one) == 2 * trl_runs.TOGETHER[method]
        for name in ("step", "tokens", "group", "reward", "correct"):
            assert [line[name] for line in one] == [line[name] for line in two]
        assert one[-1]["logp"] == pytest.approx(two[-1]["logp"], rel=1e-3)


def exported(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("auxiliary", "still"), [(False, True), (True, False)])
def test_an_auxiliary_loss_moves_the_model_where_no_token_does(auxiliary, still, tmp_path, monkeypatch):
    own = STOCK._compute_loss

    def loss(self, model, inputs):
        term = sum(weight.square().sum() for weight in model.parameters())
        return own(self, model, inputs | {"advantages": torch.zeros(8)}) + (term if auxiliary else 0)

    loss.__module__ = own.__module__
    monkeypatch.setattr(STOCK, "_compute_loss", loss)
    trainer = build(tmp_path, "grpo(passes=2)", num_iterations=2, max_steps=2)
    before = weights(trainer)
    trainer.train()
    assert torch.equal(weights(trainer), before) is still


class Corrected(RegulatedGRPOTrainer):
    """After the first generation batch TRL sets every response or token to 0, by one of its own corrections."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        later, mask = self.state.global_step > 0, output["completion_mask"]
        if self.off_policy_mask_threshold is not None:  # drops responses with a negative advantage
            return output | {"advantages": torch.full((len(mask),), -1.0)} if later else output
        if self.top_entropy_quantile < 1:  # drops tokens without a high entropy
            _, entropy, _ = self._old_policy(output)
            low = (entropy < entropy[mask.bool()].median()).float()
            return output | {"advantages": low} if later else output
        return output | {"importance_sampling_ratio": torch.full((len(mask), 1), float(not later))}

    def _compute_loss(self, model, inputs):
        self.use_vllm = self.vllm_importance_sampling_correction = "importance_sampling_ratio" in inputs
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self.use_vllm = False


@pytest.mark.parametrize(
    ("method", "correction"),
    [
        ("grpo(passes=2)", {}), ("lopti", {}), ("grpo(passes=2)", {"off_policy_mask_threshold": -1.0}),
        ("entropy(quantile=1.0) | grpo(passes=2)", {"top_entropy_quantile": 0.1}),
    ],
)  # fmt: skip # the method entropy: TRL then computes entropies
def test_a_step_whose_tokens_are_all_corrected_to_nothing_is_idle(method, correction, tmp_path):
    """Their advantages are not 0, but there is no gradient: momentum alone would move the model."""
    ends = []
    for steps in (2, 4):
        trainer = build(tmp_path, method, kind=Corrected, num_iterations=2, max_steps=steps, **correction)
        trainer.train()
        ends.append(weights(trainer))
    assert [row["reg/idle_steps"] for row in trainer.state.log_history[:-1]] == [0.0, 0.0, 1.0, 1.0]
    assert torch.equal(*ends)


def test_the_share_of_tokens_that_trl_corrects_to_nothing_is_logged(tmp_path):
    """As TRL's modes for sequences and for tokens do it, with a ratio of 0."""
    trainer = build(tmp_path, "ar")
    output = STOCK._generate_and_score_completions(trainer, [DATA[0]] * 4 + [DATA[1]] * 4)
    mask = output["completion_mask"]
    of_rows, of_tokens = torch.ones(8, 1), torch.ones(mask.shape)
    of_rows[:2], of_tokens[:, :3] = 0, 0
    for ratio, expected in ((of_rows, mask[:2].sum() / mask.sum()), (of_tokens, mask[:, :3].sum() / mask.sum())):
        trainer._weights(output | {"importance_sampling_ratio": ratio})
        assert trainer._metrics["train"]["reg/dropped_share"][-1] == pytest.approx(float(expected))


def test_a_batch_counts_its_uses_itself(tmp_path):
    """TRL's step counter plays no part, and a further use is refused."""
    trainer = build(tmp_path, "lopti", num_iterations=2)
    inputs = rollouts(trainer)
    trainer._step = 7
    used = [trainer._next_phase(inputs)]
    with pytest.raises(RuntimeError, match="in the middle of the phases of lopti"):
        rollouts(trainer)
    used.append(trainer._next_phase(inputs))
    assert used == [0, 1]
    rollouts(trainer)
    with pytest.raises(RuntimeError, match=r"used more often than lopti has phases \(2\)"):
        trainer._next_phase(inputs)


class ReplayBuffer(STOCK):
    """Replaces a response after it was scored."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        output["completion_ids"][0, 0] += 1
        return output


class Replaying(RegulatorMixin, ReplayBuffer):
    pass


def test_rewards_of_other_responses_are_not_those_of_the_batch(tmp_path):
    seen = []

    def mine(batch):
        seen.append(batch.rewards)
        return regulators.parse("ar")(batch)

    rollouts(build(tmp_path, mine))
    assert seen[-1].tolist() == [0.0, 1.0] * 4
    rollouts(build(tmp_path, mine, kind=Replaying))
    assert seen[-1] is None
    mine.needs = {"rewards"}
    with pytest.raises(
        CannotRegulateError, match=r"needs rewards, but the batch's .* TRL scored: Replaying replaces responses"
    ):
        rollouts(build(tmp_path, mine, kind=Replaying))
    with pytest.raises(CannotRegulateError, match="nthr needs correct, but the batch's responses are not"):
        rollouts(build(tmp_path, "nthr", correct="spread", kind=Replaying))


class Second:
    """The second of two processes, of which the first has the same rows: an accelerator that notes what is sent."""

    num_processes, process_index = 2, 1

    def __init__(self, accelerator):
        self.accelerator, self.sizes, self.sent = accelerator, [], []

    def __getattr__(self, name):
        return getattr(self.accelerator, name)

    def pad_across_processes(self, values, dim):
        self.sizes.append(dim)
        return values

    def gather(self, values):
        self.sent.append(values)
        return torch.cat([values, values])


@pytest.mark.parametrize(("method", "bytes_a_place", "gathers"), [("ar", 12, 3), ("entropy", 16, 4)])
def test_what_is_gathered_is_what_the_page_says(method, bytes_a_place, gathers, tmp_path):
    """experiments/performance/scale-costs.md. A place is one of the padded batch; sizes: all but the advantages."""
    trainer = build(tmp_path, method, **VARIED)
    output = trainer._generate_and_score_completions([DATA[0]] * 8)
    trainer._poise.rewards = trainer._poise.rewards.repeat(2, 1)
    trainer.accelerator = Second(trainer.accelerator)
    batch, rows = trainer._token_batch(output)
    assert rows == slice(8, 16)
    assert len(batch.mask) == 16
    sent = trainer.accelerator.sent
    assert (len(sent), len(trainer.accelerator.sizes)) == (gathers, gathers - 1)
    places = output["completion_mask"].numel()
    assert sum(values.nbytes for values in sent) == bytes_a_place * places + 4 * 8  # and the advantages
