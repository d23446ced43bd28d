"""NTHR inside verl: scores from the workers' forward pass, weights and gradients as poise has them."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch
import transfer_queue as tq
from verl.trainer.ppo.utils import Role
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from poise import Head, Phase, TokenBatch, objective, regulators
from poise.integrations import verl_scores
from poise.integrations.demands import CannotRegulateError, probe
from poise.regulators import Scorer
from support import verl_cpu
from support.verl_cpu import HOT, fields, prepare, rollouts
from support.verl_runs import close, gradients

PROMPTS, GROUP = 4, 4
REWARDS = [1, 1, 0, 0, 1, 1, 1, 1, 0, -1, 0, 0, 1, 0, 1, 1]  # mixed, all right, all wrong, mixed
PACKED = {"actor_rollout_ref.model.use_remove_padding": True}
DYNAMIC = PACKED | {
    "actor_rollout_ref.actor.use_dynamic_bsz": True,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 226,
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": 226,
}
ADAPTER = {"actor_rollout_ref.model.lora_rank": 4, "actor_rollout_ref.model.target_modules": "all-linear"}


@pytest.fixture(autouse=True, scope="module")
def _queue():
    with verl_cpu.queue():
        yield


def config(method, settings=None):
    given = verl_cpu.OVERRIDES | {"actor_rollout_ref.rollout.n": GROUP, "actor_rollout_ref.actor.optim.lr": 0.0}
    given |= {"trainer.v1.trainer_mode": "poise_sync", "+trainer.v1.poise_sync.regulator": f"'{method}'"}
    return verl_cpu.composed([f"{key}={value}" for key, value in (given | (settings or {})).items()])


def batch_of(rewards=REWARDS):
    return rollouts(PROMPTS, GROUP, rewards=rewards)


def by_hand(built, batch, rewards=REWARDS):
    """The same batch from plain transformers calls, row by row, with hidden states; and log-probabilities."""
    model = built.actor_rollout_wg.engine.module
    data = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["input_ids", "responses"])
    stored = fields(batch, "response_mask", "old_log_probs", "advantages")
    hidden, chosen = [], []
    for ids, answer in zip(data["input_ids"].unbind(), data["responses"].unbind(), strict=True):
        out = model(input_ids=ids[None], output_hidden_states=True)
        part = slice(-len(answer) - 1, -1)
        pad = stored["response_mask"].shape[1] - len(answer)
        logp = (out.logits[0, part] / HOT).log_softmax(-1).gather(-1, answer[:, None])[:, 0]
        chosen.append(torch.nn.functional.pad(logp, (0, pad)))
        hidden.append(torch.nn.functional.pad(out.hidden_states[-1][0, part], (0, 0, 0, pad)))
    rewards = torch.tensor(rewards, dtype=torch.float32)
    whole = TokenBatch(
        stored["old_log_probs"],
        stored["response_mask"],
        stored["advantages"],
        groups=torch.arange(len(rewards)) // GROUP,
        rewards=rewards,
        correct=rewards == 1,
        hidden=torch.stack(hidden),
        head=Head(model.get_output_embeddings().weight, temperature=HOT),
        targets=fields(batch, "responses")["responses"],
    )
    return whole, torch.stack(chosen)


def phases_of(built, batch):
    tokens, _, regulator = built._token_batch(batch)
    return regulator(tokens)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("nthr", {}),
        ("nthr", PACKED),
        ("nthr(beta=0.5)", DYNAMIC),
        ("nthr(eta=0.0, self_inclusive=True)", {"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 1}),
        ("nthr | lopti(threshold=0.5)", DYNAMIC),
        ("ar(alpha=0.3) | nthr | nthr(beta=2.0, eta=0.5)", {}),
    ],
)
def test_weights_and_gradients_are_those_of_poise(method, settings):
    built = verl_cpu.assembled(config(method, settings))
    batch = prepare(built, batch_of(), {})
    whole, _ = by_hand(built, batch)
    ours, expected = phases_of(built, batch), regulators.parse(method)(whole)
    assert [phase.name for phase in ours] == [phase.name for phase in expected]
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine.policy, theirs.policy, rtol=0, atol=1e-5)
        assert torch.equal(mine.kl, theirs.kl)
        assert mine.metrics == theirs.metrics
        assert 0 < mine.metrics["flagged_share"] < 1
        assert mine.metrics["scored_share"] == 0.5
    built._update_actor(batch, {})
    whole, logp = by_hand(built, batch)  # again, since the optimizer has touched the weights, if only by 0
    parameters = list(built.actor_rollout_wg.engine.module.parameters())
    settings = objective.Settings(clip_low=0.2, clip_high=0.2)
    wanted = []
    for phase in expected:
        for rows in (slice(0, 8), slice(8, 16)):  # verl's mini-batches
            piece, part = whole.rows(rows), phase.rows(rows)
            if objective.active(piece, part, settings).any():
                norm = objective.normalizer(piece, settings)
                loss, _ = objective.policy_loss(logp[rows], piece, part, settings, normalizer=norm)
                found = torch.autograd.grad(loss, parameters, retain_graph=True)
                wanted.append(torch.cat([gradient.flatten() for gradient in found]))
    assert len(gradients(built)) == len(wanted) == 2 * len(probe(regulators.parse(method)).phases)
    assert all(close(one, other) for one, other in zip(gradients(built), wanted, strict=True))


def test_what_verl_computes_is_left_as_it_is():
    found = []
    for method in ("grpo", "nthr"):
        built = verl_cpu.assembled(config(method))
        loss, metrics = built.actor_rollout_wg.worker.loss_fn, {}
        batch = prepare(built, batch_of(), metrics)
        assert built.actor_rollout_wg.worker.loss_fn is loss
        assert not built.actor_rollout_wg.engine.module.get_output_embeddings()._forward_pre_hooks
        found.append((fields(batch, "old_log_probs", "entropy", "advantages"), metrics))
    (plain, before), (scored, after) = found
    assert all(torch.equal(plain[name], scored[name]) for name in ("old_log_probs", "entropy", "advantages"))
    assert before == after


def test_with_an_adapter():
    built = verl_cpu.assembled(config("nthr", ADAPTER))
    with torch.no_grad():  # an adapter that does something
        for name, weight in built.actor_rollout_wg.engine.module.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.02, generator=torch.Generator().manual_seed(0))
    batch = prepare(built, batch_of(), {})
    whole, _ = by_hand(built, batch)
    (mine,), (theirs,) = phases_of(built, batch), regulators.parse("nthr")(whole)
    torch.testing.assert_close(mine.policy, theirs.policy, rtol=0, atol=1e-5)
    assert mine.metrics["flagged_share"] > 0


# --- several workers


def test_a_group_goes_to_one_worker_and_comes_back_in_its_place():
    """One worker in the place of two: the rows reach it in another order."""
    built = verl_cpu.assembled(config("nthr"))
    (alone,) = phases_of(built, prepare(built, batch_of(), {}))
    built.actor_rollout_wg._dispatch_info = {"actor": [0, 1]}
    asked, run = [], built.actor_rollout_wg.compute_log_prob
    built.actor_rollout_wg.compute_log_prob = lambda batch: asked.append(batch.keys) or run(batch)
    dealt = batch_of()
    dealt.reorder(torch.randperm(16, generator=torch.Generator().manual_seed(0)).tolist())  # as verl balances it
    batch = prepare(built, dealt, {})
    assert batch.keys == dealt.keys != asked[0]
    owners = [key.split("_")[0] for key in asked[0]]
    assert not set(owners[:8]) & set(owners[8:])
    (mine,) = phases_of(built, batch)
    places = [batch.keys.index(key) for key in batch_of().keys]
    torch.testing.assert_close(mine.policy[places], alone.policy, rtol=0, atol=1e-5)


def test_a_group_that_had_to_be_cut_is_left_alone(monkeypatch):
    built = verl_cpu.assembled(config("nthr"))
    built.actor_rollout_wg._dispatch_info = {"actor": [0, 1]}
    monkeypatch.setattr(verl_scores, "together", lambda owners, *_: (list(range(len(owners))), ["a0"]))
    (phase,) = phases_of(built, prepare(built, batch_of(), {}))
    assert phase.metrics["scored_share"] == 0.25
    assert phase.policy[:4].unique().tolist() == [0, 1]
    assert (phase.policy[12:] == 0.5).any()


@pytest.mark.parametrize(
    ("sizes", "processes", "cut"),
    [
        ([4] * 8, 4, 0),
        ([4] * 4, 1, 0),
        ([3, 3, 2], 2, 1),
        ([4, 4, 1, 1, 1, 1], 3, 0),
        ([8], 4, 1),
        ([5, 3, 4, 4], 2, 0),
        ([6, 4, 4, 3, 3], 2, 0),  # by load alone the last group would find no place
    ],
)
def test_whole_groups_in_equal_blocks(sizes, processes, cut):
    owners = [f"g{number}" for number, size in enumerate(sizes) for _ in range(size)]
    mixed = [owners[row] for row in torch.randperm(len(owners), generator=torch.Generator().manual_seed(0))]
    load = [float(1 + row % 7) for row in range(len(mixed))]
    order, apart = verl_scores.together(mixed, load, processes)
    assert sorted(order) == list(range(len(mixed)))
    assert len(apart) == cut
    blocks = [order[first : first + len(order) // processes] for first in range(0, len(order), len(order) // processes)]
    for name in set(mixed) - set(apart):
        assert sum(any(mixed[row] == name for row in block) for block in blocks) == 1


def test_rows_that_verl_pads_with_push_no_group_out():
    """They all have one uid, and would be the largest group."""
    uids = [f"g{row // 4}" for row in range(32)] + ["pad"] * 8
    tags = [{}] * 32 + [{"is_padding": True}] * 8
    names = verl_scores.owners(SimpleNamespace(keys=[f"k{row}" for row in range(40)], tags=tags), uids)
    assert verl_scores.together(names, [1.0] * 40, 4)[1] == []


def test_the_load_of_the_blocks_is_even():
    owners = [f"g{row // 2}" for row in range(16)]
    order, _ = verl_scores.together(owners, [float(row // 2) for row in range(16)], 2)
    assert sum(row // 2 for row in order[:8]) == sum(row // 2 for row in order[8:])


def test_scores_do_not_depend_on_sharding(tmp_path):
    """Two processes with half of each weight and half of the groups, against one with all."""
    script = Path(__file__).parents[1] / "support/verl_sharded.py"
    running = [subprocess.Popen([sys.executable, script, tmp_path, str(rank), "2"]) for rank in range(2)]
    assert [process.wait(timeout=600) for process in running] == [0, 0]
    halves = [torch.load(tmp_path / f"scores-{rank}.pt") for rank in range(2)]
    built = verl_cpu.assembled(config("nthr"))
    batch = prepare(built, batch_of(), {})
    data = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["poise_scores0"])
    whole = data["poise_scores0"].values()
    for strategy in ("fsdp", "fsdp2"):
        found = torch.cat([half[strategy] for half in halves])
        torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5, equal_nan=True)


# --- the workers' class


def test_verls_own_actor_worker_scores():
    """Through the class that Ray starts on each GPU, in this process and without a rollout server."""
    made = config("nthr")
    built = verl_cpu.assembled(made)
    (phase,) = phases_of(built, prepare(built, batch_of(), {}))
    kind = built.role_worker_mapping[Role.ActorRollout].__ray_actor_class__
    assert issubclass(kind, ActorRolloutRefWorker)
    worker = kind(made.actor_rollout_ref, role="actor")
    worker.init_model()
    built.actor_rollout_wg.compute_log_prob = worker.compute_log_prob
    (mine,) = phases_of(built, prepare(built, batch_of(), {}))
    assert torch.equal(mine.policy, phase.policy)


def test_a_worker_class_of_the_users_own():
    class Theirs(ActorRolloutRefWorker):
        pass

    class Good(ActorRolloutRefWorker):
        actor_worker_cls = verl_scores.ScoringWorker

    with pytest.raises(CannotRegulateError, match="Theirs computes no scores: set its actor_worker_cls"):
        verl_scores.use_scoring_workers({Role.Actor: ray.remote(Theirs)})
    table = {Role.ActorRollout: ray.remote(Good), Role.Critic: ray.remote(TrainingWorker)}
    verl_scores.use_scoring_workers(table)
    assert [kind.__ray_actor_class__ for kind in table.values()] == [Good, TrainingWorker]


def test_a_model_that_does_more_behind_its_head_is_found_out():
    built = verl_cpu.assembled(config("nthr"))
    built.actor_rollout_wg.engine.module.get_output_embeddings().register_forward_hook(lambda _m, _i, out: out * 1.5)
    with pytest.raises(CannotRegulateError, match="does something at its output layer"):
        prepare(built, batch_of(), {})


# --- what is correct; regulators of one's own


def test_what_is_correct():
    rewards = torch.tensor([1.0, 0.0, -1.0])
    assert verl_scores.is_correct(rewards, None).tolist() == [True, False, False]
    assert verl_scores.is_correct(rewards, 0.0).tolist() == [True, True, False]
    with pytest.raises(CannotRegulateError, match=r"a reward is 0.5, .*set .*correct_at"):
        verl_scores.is_correct(torch.tensor([1.0, 0.5]), None)


def test_correct_at_is_a_setting():
    built = verl_cpu.assembled(config("nthr", {"+trainer.v1.poise_sync.correct_at": 0.5}))
    batch = prepare(built, batch_of([0.9 * reward for reward in REWARDS]), {})
    assert built._token_batch(batch)[0].correct.tolist() == [reward == 1 for reward in REWARDS]
    (phase,) = phases_of(built, batch)
    assert phase.metrics["scored_share"] == 0.5
    with pytest.raises(CannotRegulateError, match="correct_at is 'high': set it to a number"):
        verl_cpu.assembled(config("nthr", {"+trainer.v1.poise_sync.correct_at": "high"}))


@dataclass(frozen=True)
class Norms(Scorer):
    """One of a user's own: needs no verdict."""

    needs = frozenset({"hidden"})
    scope = "token"

    def scores(self, batch):
        return batch.hidden_of(torch.arange(len(batch.mask))).norm(dim=-1)

    def weigh(self, batch, scores):
        return [Phase.of(batch, scores)]


@dataclass(frozen=True)
class Deviations(Norms):
    """Another, which looks at a group."""

    scope = "group"

    def scores(self, batch):
        norms = super().scores(batch)
        return norms - norms[batch.mask].mean()

    def weigh(self, batch, scores):
        return [Phase.of(batch, torch.where(scores.isnan(), 1.0, 0.5))]


def test_a_scorer_of_ones_own_gets_no_scores_for_a_group_that_was_cut(monkeypatch):
    built = verl_cpu.assembled(config(f"{__name__}.Deviations"))
    built.actor_rollout_wg._dispatch_info = {"actor": [0, 1]}
    monkeypatch.setattr(verl_scores, "together", lambda owners, *_: (list(range(len(owners))), ["a0"]))
    batch = prepare(built, batch_of(), {})
    tokens, _, regulator = built._token_batch(batch)
    (phase,) = regulator(tokens)
    assert (phase.policy[:4][tokens.mask[:4]] == 1).all()
    assert (phase.policy[4:][tokens.mask[4:]] == 0.5).all()


def test_a_scorer_of_ones_own():
    built = verl_cpu.assembled(config(f"{__name__}.Norms"))
    batch = prepare(built, batch_of([0.3] * 16), {})
    whole, _ = by_hand(built, batch)
    (phase,) = phases_of(built, batch)
    expected = torch.where(whole.mask, whole.hidden.norm(dim=-1), 0)
    torch.testing.assert_close(phase.policy, expected, rtol=1e-5, atol=1e-5)
