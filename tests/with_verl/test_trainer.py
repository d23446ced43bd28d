"""Poise as a trainer of verl: verl's own trainer, queue, worker and engine, on the embedded model."""

import sys
from pathlib import Path

import pytest
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.single_controller.base.decorator import _split_args_kwargs_data_proto
from verl.trainer.ppo.v1.trainer_base import get_trainer_cls
from verl.utils.transferqueue_utils import batch_meta2kv_batch_meta

from poise import TokenBatch, objective, regulators
from poise.integrations import verl_trainer
from poise.integrations.demands import CannotRegulateError, probe
from poise.integrations.verl_checks import LENGTH_FREE, MASKABLE
from poise.models.policy import EMBEDDED
from poise.referee.report.token_files import TokenFiles
from support import verl_cpu
from support.verl_cpu import HOT, fields, prepare, rollouts, step, trainer
from support.verl_runs import close, gradients

sys.path.insert(0, str(Path(__file__).parents[2] / "examples/scale"))

import verl_kk

SPLITS = ("train", "test")
STILL = {"optim__lr": 0.0}
METHODS = [
    *sorted(regulators.TABLE.keys() - {"nthr", "constant", "grpo"}),
    "grpo(passes=2)",
    "constant(weight=0.5)",
    "ar(alpha=0.3) | lopti(threshold=0.5)",
    "clip-cov(share=0.3, low=0.0) | ar",
]


@pytest.fixture(autouse=True, scope="module")
def _queue():
    with verl_cpu.queue():
        yield


def by_hand(built, batch):
    """The same batch from plain transformers calls, row by row: log-probabilities with gradients, entropies."""
    model = built.actor_rollout_wg.engine.module
    data = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["input_ids", "responses"])
    width = max(len(row) for row in data["responses"].unbind())
    chosen, entropy = [], []
    for ids, answer in zip(data["input_ids"].unbind(), data["responses"].unbind(), strict=True):
        logits = model(input_ids=ids[None]).logits[0, -len(answer) - 1 : -1]
        logp = (logits / HOT).log_softmax(-1)
        pad = (0, width - len(answer))
        chosen.append(torch.nn.functional.pad(logp.gather(-1, answer[:, None])[:, 0], pad))
        entropy.append(torch.nn.functional.pad(-(logp.exp() * logp).sum(-1), pad))
    return torch.stack(chosen), torch.stack(entropy)


# --- verl is left as it is


@pytest.mark.parametrize("settings", [{}, {"use_kl_loss": True, "kl_loss_coef": 0.3, "entropy_coeff": 0.1}])
def test_grpo_is_stock_verl_bit_for_bit(settings):
    found = []
    for regulator in (None, "grpo"):
        built = trainer(regulator, optim__lr=1e-3, **settings)
        start = built.actor_rollout_wg.engine.parameters()
        for _ in range(3):
            metrics = step(built, rollouts())
        found.append((built.actor_rollout_wg.engine.parameters(), metrics))
    (stock, theirs), (ours, mine) = found
    assert not torch.equal(start, stock)
    assert torch.equal(ours, stock)
    measured = {key for key in theirs if not key.startswith("perf/") and "/perf/" not in key}
    assert {key: mine[key] for key in measured} == {key: theirs[key] for key in measured}
    assert mine["reg/all/weight_mean"] == 1


def test_the_queue_is_left_as_it_was():
    built = trainer("lopti", use_kl_loss=True)
    batch = prepare(built, rollouts(), {})
    names = ("advantages", "response_mask", "loss_mask", "returns")
    before = fields(batch, *names)
    seen = []
    update = built.actor_rollout_wg.update_actor
    built.actor_rollout_wg.update_actor = lambda piece: seen.append(fields(batch, *names)) or update(piece)
    built._update_actor(batch, {})
    after = fields(batch, *names)
    assert all(torch.equal(before[name], after[name]) for name in names)
    for during in seen:
        assert not torch.equal(during["advantages"], before["advantages"])
        assert not torch.equal(during["response_mask"], before["response_mask"])
        assert torch.equal(during["loss_mask"], before["loss_mask"])
    assert torch.equal(seen[0]["response_mask"] + seen[1]["response_mask"], before["response_mask"])


@pytest.mark.parametrize("method", ["grpo", "lopti(threshold=0.5)"])
def test_responses_and_tokens_are_exported(method, tmp_path):
    made = verl_cpu.config(method)
    for name, value in (("export", str(tmp_path / "tokens.jsonl")), ("export_every", 2)):
        OmegaConf.update(made, f"trainer.v1.poise_sync.{name}", value, force_add=True)
    built = verl_cpu.assembled(made)
    built.tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)  # verl's own start loads it
    seen, regulate = [], verl_trainer.RegulatorMixin._token_batch
    built._token_batch = lambda batch: seen.append(regulate(built, batch)) or seen[-1]
    for number in (1, 2, 3):
        built.global_steps = number
        step(built, rollouts(rewards=[1, 0] * 4))
    recording = TokenFiles(tmp_path / "tokens.jsonl")
    assert recording.steps() == [1, 2]
    assert recording.skipped() == []
    for number in (1, 2):
        records, arrays, texts = recording.read(number)
        batch, _, regulator = seen[number - 1]
        expected = {"logp": batch.old_logp, "advantage": batch.token_advantages, "entropy": batch.entropy}
        expected |= {f"weight/{phase.name}": phase.policy for phase in regulator(batch)}
        for name, values in expected.items():
            torch.testing.assert_close(arrays[name], values[batch.mask], rtol=1e-6, atol=1e-7)
        assert [record["reward"] for record in records] == [1, 0] * 4
        assert [record["group"] for record in records] == batch.groups.tolist()
        assert [record.get("environment") is not None for record in records] == [True] + [False] * 7
        question, answer = verl_cpu.sampled(4, 2)[1]
        assert records[1]["prompt"] == built.tokenizer.decode(question)
        assert records[1]["text"] == built.tokenizer.decode(answer)
        begin, end = arrays["start"][1:3].tolist()
        assert "".join(texts[i] for i in arrays["id"][begin:end].tolist()) == records[1]["text"]


@pytest.mark.parametrize(
    ("method", "terms", "read", "written", "writes"),
    [
        ("ar", False, 20, 8, 2),
        ("entropy", False, 24, 8, 2),
        ("nthr", False, 24, 8, 2),
        ("lopti", False, 20, 16, 4),
        ("lopti", True, 20, 48, 4),
    ],
)
def test_what_goes_through_the_queue_is_what_the_page_says(method, terms, read, written, writes, monkeypatch):
    """experiments/performance/scale-costs.md: bytes for each response token, and how many messages."""
    built = trainer(method, use_kl_loss=terms)
    batch = prepare(built, rollouts(rewards=[1, 0] * 4), {})
    got, put = [], []

    class Queue:
        def kv_batch_get(self, **given):
            got.append(tq.kv_batch_get(**given))
            return got[-1].copy()

        def kv_batch_put(self, **given):
            put.append(given["fields"])
            return tq.kv_batch_put(**given)

    monkeypatch.setattr(verl_trainer, "tq", Queue())
    built._update_actor(batch, {})
    tokens = len(got[0]["advantages"].values())

    def bytes_a_token(messages):
        tensors = [value for one in messages for value in one.values() if isinstance(value, torch.Tensor)]
        return sum(value.values().nbytes for value in tensors) / tokens

    assert (len(got), len(put)) == (1, writes)
    assert (bytes_a_token(got), bytes_a_token(put)) == (read, written)


# --- the update is the regulator's


@pytest.mark.parametrize("method", METHODS)
def test_the_gradient_is_that_of_poise(method):
    built = trainer(method, clip_ratio_low=0.1, clip_ratio_high=0.2, clip_ratio_c=10.0, **STILL)
    batch = prepare(built, rollouts(), {})
    with torch.no_grad():  # off policy, so that ratios and clips matter
        for weight in built.actor_rollout_wg.engine.module.parameters():
            weight.mul_(1 + 0.03 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    built._update_actor(batch, {})
    data = fields(batch, "response_mask", "old_log_probs", "advantages", "entropy")
    logp, _ = by_hand(built, batch)
    groups = torch.arange(len(logp)) // 2
    whole = TokenBatch(
        data["old_log_probs"], data["response_mask"], data["advantages"], groups=groups, entropy=data["entropy"]
    )
    settings = objective.Settings(clip_low=0.1, clip_high=0.2, dual_clip=10.0)
    parameters = list(built.actor_rollout_wg.engine.module.parameters())
    expected = []
    for phase in regulators.parse(method)(whole):
        for rows in (slice(0, 4), slice(4, 8)):  # verl's mini-batches
            piece, part = whole.rows(rows), phase.rows(rows)
            if not objective.active(piece, part, settings).any():
                continue
            norm = objective.normalizer(piece, settings)
            loss, _ = objective.policy_loss(logp[rows], piece, part, settings, normalizer=norm)
            found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
            expected.append(torch.cat([g.flatten() for g in found]))
    assert len(gradients(built)) == len(expected) == 2 * len(probe(regulators.parse(method)).phases)
    assert all(close(ours, theirs) for ours, theirs in zip(gradients(built), expected, strict=True))


@pytest.mark.parametrize(
    ("method", "loss", "mode", "terms"),
    [("lopti(threshold=0.5)", loss, "token-mean", True) for loss in MASKABLE]
    + [("lopti(threshold=0.5)", "vanilla", mode, True) for mode in LENGTH_FREE[1:]]
    + [("lopti(threshold=0.5)", "vanilla", "seq-mean-token-mean", False)]
    + [("lopti(threshold=0.5)", loss, "token-mean", False) for loss in ("sapo", "gspo")]
    + [("random-split(share=0.3)", "vanilla", "token-mean", True)],
)
def test_phases_add_up_to_the_whole(method, loss, mode, terms):
    """KL and entropy included, where there are any: the normaliser is that of all tokens in every phase."""
    settings = {"policy_loss__loss_mode": loss, "loss_agg_mode": mode, **STILL}
    if terms:
        settings |= {"use_kl_loss": True, "kl_loss_coef": 0.5, "entropy_coeff": 0.2}
    built, full = trainer(method, **settings), trainer(None, **settings)
    batch = rollouts()
    step(built, batch)
    step(full, batch)
    low, high, whole = (
        torch.stack(gradients(b)[s]) for b, s in ((built, slice(2)), (built, slice(2, 4)), (full, slice(2)))
    )
    assert len(gradients(built)) == 4
    assert close(low + high, whole, 1e-5)
    assert low.norm() > 0
    assert high.norm() > 0


# --- the learning rate, and momentum


@pytest.mark.parametrize(("method", "ticks"), [("ar", 6), ("lopti", 12)])
def test_the_schedule_is_as_long_as_there_are_calls(method, ticks, tmp_path, monkeypatch):
    """verl counts its steps, and the schedule ticks in every phase: a cosine would be over half way."""
    monkeypatch.setattr(sys, "argv", ["verl_kk.py", str(tmp_path), "--train", "8", "--test", "4"])
    verl_kk.main()
    built = trainer(method)
    built.config.data.train_files, built.config.data.val_files = (str(tmp_path / f"{n}.parquet") for n in SPLITS)
    built.config.trainer.total_epochs = 3
    built._init_tokenizer()
    built._init_dataloader()
    assert built.total_training_steps == 6  # 8 prompts, 4 a step, 3 epochs
    assert built.config.actor_rollout_ref.actor.optim.total_training_steps == ticks
    assert built.config.critic.optim.total_training_steps == 6


def test_a_trainer_of_another_mode_is_found_out():
    class Mine(verl_trainer.RegulatorMixin, get_trainer_cls("colocate_async")):
        pass

    with pytest.raises(CannotRegulateError, match="does not inherit from verl's trainer 'sync': set base_mode"):
        Mine(verl_cpu.config("lopti"))
    Mine.base_mode = "colocate_async"
    assert Mine(verl_cpu.config("lopti")).trainer_mode == "colocate_async"


def test_a_mini_batch_without_a_token_takes_no_step():
    """The threshold is set below all probabilities of the first mini-batch but one of the second."""
    built = trainer("grpo", **STILL)
    batch = prepare(built, rollouts(), {})
    data = fields(batch, "old_log_probs", "response_mask", "advantages")
    prob = torch.where((data["response_mask"] == 1) & (data["advantages"] != 0), data["old_log_probs"].exp(), 2.0)
    low = prob.flatten(1).amin(1).view(2, 4).amin(1)
    threshold = float((low.min() + low.max()) / 2)
    built = trainer(f"lopti(threshold={threshold})", **STILL)
    step(built, batch)
    assert len(gradients(built)) == 3  # one in the low phase, two in the high
    alone = trainer("lopti(threshold=2.0)", **STILL)  # all tokens are low
    metrics = step(alone, batch)
    assert alone.actor_rollout_wg.updates == 1
    assert metrics["reg/high/zero_share"] == 1
    plain = trainer(None, **STILL)
    step(plain, batch)
    assert all(torch.equal(a, b) for a, b in zip(gradients(alone), gradients(plain), strict=True))


def test_rows_of_live_mini_batches_with_several_processes():
    """Each process has a run of rows, and takes its mini-batches from it in order."""
    built = trainer("lopti(threshold=0.5)", **STILL)
    built.actor_rollout_wg._dispatch_info = {"actor": [0, 0, 1, 1]}  # two model-parallel processes each
    low = torch.zeros(8, 3, dtype=torch.bool)
    low[6, 1] = True  # process 1, second mini-batch, which is rows 2, 3, 6, 7
    batch = TokenBatch(torch.where(low, -3.0, -0.1), torch.ones(8, 3), torch.ones(8))
    meta = rollouts()
    (halves,), _ = _split_args_kwargs_data_proto(2, meta)  # how verl divides a batch between processes
    assert [batch_meta2kv_batch_meta(half).keys for half in halves] == [meta.keys[:4], meta.keys[4:]]
    first, second = built.regulator(batch)
    assert built._live_rows(batch, first) == [2, 3, 6, 7]
    assert built._live_rows(batch, second) == list(range(8))


def test_metrics_of_every_phase_are_kept():
    metrics = step(trainer("lopti(threshold=0.5)"), rollouts())
    assert metrics["reg/high/actor/pg_loss"] == metrics["actor/pg_loss"] != metrics["reg/low/actor/pg_loss"]
    assert 0 < metrics["reg/low/weight_mean"] < 1


def test_padding_rows_of_verl_are_no_members_of_a_group():
    built = trainer("ar")
    batch = prepare(built, rollouts(), {})
    batch.tags[1]["is_padding"] = True
    assert built._token_batch(batch)[0].groups.tolist() == [0, 1, 2, 2, 3, 3, 4, 4]


def test_a_regulator_that_changes_its_mind_is_stopped():
    built = trainer("ar")
    batch = prepare(built, rollouts(), {})
    built.regulator = regulators.parse("lopti")
    with pytest.raises(CannotRegulateError, match="but one in the trial"):
        built._update_actor(batch, {})
