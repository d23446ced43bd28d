"""The update: what is run through the model, in how many passes, and what happens when memory runs out."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from poise import Phase, regulators
from poise.models.layers import OutOfMemoryError
from poise.models.loading import load_policy
from poise.models.scoring import score_batch, score_min_p
from poise.objective import Settings, normalizer
from poise.training import config as configs
from poise.training.building import recomputed
from poise.training.update import UpdatePlan, averaged_in_parts, backward, mini_batches, update
from support.heads import SURROGATES
from support.small_runs import run
from support.tiny_models import exact, prompts, responses, tiny

ALL = slice(None)
SHAPE = [[7, 1, 12, 3], [1, 1], [20, 2, 5], [4, 4, 4, 4, 4], [9]]


def make(name="llama", **fields):
    """A policy in float64, plain gradient descent, and a batch with old log-probabilities near the policy's."""
    policy = exact(tiny(name))
    batch = responses(prompts(len(SHAPE)), SHAPE)
    g = torch.Generator().manual_seed(0)
    old = policy.score(batch)[0].detach().double() + 0.1 * torch.randn(batch.mask.shape, generator=g)
    advantages = torch.randn(len(batch.mask), generator=g, dtype=torch.float64)
    batch = replace(batch, **{"old_logp": old, "advantages": advantages} | fields)
    return policy, torch.optim.SGD(policy.model.parameters(), lr=1.0), batch


def after(made, **settings):
    policy, _, batch = made
    metrics = update(*made, [Phase.of(batch)], UpdatePlan(grad_clip=1e9, **settings))
    return metrics, {n: p.detach().clone() for n, p in policy.model.named_parameters()}


def assert_same(first, second, bound=1e-5):  # the head is scored in float32
    assert first[0] == pytest.approx(second[0], rel=bound, abs=1e-7)
    for name, value in first[1].items():
        assert (value - second[1][name]).norm() <= bound * second[1][name].norm(), name


@pytest.mark.parametrize("name", ["llama", "gemma2"])  # packed and padded
def test_the_size_of_a_pass_changes_nothing(name):
    start = dict(make(name)[0].model.named_parameters())
    whole = after(make(name))
    assert any((value - start[n]).norm() > 1e-3 * value.norm() for n, value in whole[1].items())
    for tokens in (1, 30, 60):
        assert_same(after(make(name), micro_tokens=tokens), whole)
    policy, batch = make(name)[0], responses(prompts(len(SHAPE)), SHAPE)
    torch.testing.assert_close(score_batch(policy, batch, 1.0, 30), score_batch(policy, batch, 1.0, 10**6))


def test_processes_that_share_a_mini_batch_add_up_to_it():
    policy, _, batch = make()
    phase, whole = Phase.of(batch), normalizer(batch, Settings())
    gradients = []
    for rows in (ALL, slice(0, 6), slice(6, None)):
        assert backward(policy, batch.rows(rows), phase.rows(rows), divisor=whole)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]))
    together, first, second = gradients
    assert (first + second - together).norm() < 1e-5 * together.norm()
    assert (first - together).norm() > 0.1 * together.norm()


@pytest.mark.parametrize("text", SURROGATES.values())
def test_the_size_of_a_pass_changes_nothing_with_any_surrogate(text):
    """Two phases and two mini-batches: ratios move, and choices are the mini-batch's, however it is cut."""
    results = []
    for tokens in (10**6, 30):
        policy, optimizer, batch = make()
        optimizer.param_groups[0]["lr"] = 0.1
        batch = replace(batch, min_p_logp=score_min_p(policy, batch, 1.0, 0.02, tokens).double())
        phases = regulators.parse("random-split(share=0.5)")(batch)
        plan = UpdatePlan(Settings(surrogate=text, kl_coef=0.0), mini_batch=8, micro_tokens=tokens, grad_clip=1e9)
        metrics = update(policy, optimizer, batch, phases, plan)
        assert metrics["optim/steps"] == 4
        assert ("optim/chosen" in metrics) == text.startswith(("kl-cov", "lp-reg"))
        results.append((metrics, {n: p.detach().clone() for n, p in policy.model.named_parameters()}))
    assert_same(*results)


def test_scoring_by_min_p_is_the_distribution_without_its_tail():
    policy, _, batch = make()
    logp = score_batch(policy, batch, 0.7)[0]
    filtered = score_min_p(policy, batch, 0.7, 0.05, 40)
    kept = batch.mask & filtered.isfinite()
    assert kept.any()
    assert (batch.mask & filtered.isneginf()).any()
    assert (filtered[kept] >= logp[kept] - 1e-5).all()  # the kept ones gain
    assert logp[kept].min() > logp[batch.mask & ~kept].min()
    assert not filtered[~batch.mask].any()


def passes(policy):
    """The lengths of all packed sequences that are run through the model from now on."""
    seen = []
    policy.trunk.register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    return seen


def test_what_is_held_back_before_the_first_step_is_counted_apart():
    for off, held in ((1e-3, 1.0), (1e-5, 0.0)):  # log-probabilities of another rounding, gspo's bounds between
        policy, optimizer, batch = make()
        old = policy.score(batch)[0].detach().double() - off * batch.advantages.sign()[:, None]
        batch, plan = replace(batch, old_logp=old), UpdatePlan(Settings(surrogate="gspo"), mini_batch=8)
        metrics = update(policy, optimizer, batch, [Phase.of(batch)] * 2, plan)
        assert metrics["optim/steps"] == 4
        assert metrics["optim/held_unmoved"] == pytest.approx(held)


@pytest.mark.parametrize(
    ("dtype", "surrogate", "recomputes"),
    [("bfloat16", "gspo", True), ("float32", "gspo", False), ("bfloat16", "clip", False),
     ("bfloat16", "gspo(clip_low=0.1, clip_high=0.1)", False)],
)  # fmt: skip
def test_narrow_bounds_in_half_precision_recompute_old_log_probabilities(dtype, surrogate, recomputes):
    notes, config = [], configs.load("tiny", [f"objective.surrogate={surrogate}"])
    policy = load_policy("embedded", device="cpu", dtype=dtype)
    assert recomputed(config, policy, notes.append) is recomputes
    assert [("gspo" in note, "old log-probabilities are recomputed" in note) for note in notes] == [(1, 1)] * recomputes


@pytest.mark.parametrize(("engine", "recomputes"), [("auto", True), ("vllm", False)])
def test_what_vllm_samples_is_scored_once(engine, recomputes):
    """Its engine lets the policy score each response already."""
    config = configs.load("tiny", ["rollout.old_logp=recomputed", f"rollout.engine={engine}"])
    assert recomputed(config, load_policy("embedded", device="cpu"), print) is recomputes


def test_gspo_in_half_precision_holds_nothing_back_before_the_first_step(tmp_path):
    folder, _ = run(tmp_path, "objective.surrogate=gspo", "dtype=bfloat16", "steps=1", "evaluation=off")
    (line,) = folder.metrics()
    assert line["optim/steps"] == 1
    assert line["optim/held_unmoved"] == 0


def test_only_responses_with_a_gradient_are_run():
    advantages = torch.zeros(len([n for own in SHAPE for n in own]), dtype=torch.float64)
    advantages[[0, 3, 8]] = torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64)  # 7 and 3 tokens of one group; 5
    made = make(advantages=advantages)
    seen = passes(made[0])
    asked = prompts(len(SHAPE))
    assert after(made)[0]["optim/steps"] == 1
    assert seen == [len(asked[0]) + 6 + 2 + len(asked[2]) + 4]


@given(count=st.integers(1, 300), size=st.integers(0, 320), seed=st.integers(0, 99))
def test_mini_batches_are_of_one_size(count, size, seed):
    minis = [list(range(count))[part] if part == ALL else part for part in mini_batches(count, size, seed)]
    sizes = [len(mini) for mini in minis]
    assert sorted(row for mini in minis for row in mini) == list(range(count))
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= (size or count)
    assert len(minis) == (-(-count // size) if size else 1)
    if 0 < size < count and count % size == 0:  # as they have always been cut
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        assert minis == [part.tolist() for part in order.split(size)]


def test_mini_batches_cover_everything_and_an_idle_one_takes_no_step():
    made = make()
    seen = passes(made[0])
    assert after(made, mini_batch=4)[0]["optim/steps"] == 4
    assert len(seen) == 4
    made = make(advantages=torch.zeros(15, dtype=torch.float64))
    seen = passes(made[0])
    metrics = update(*made, [Phase.of(made[2])], UpdatePlan())
    assert metrics == {"optim/steps": 0.0}
    assert seen == []


class TestOutOfMemory:
    """A policy whose memory holds so many tokens; twice that where layers are computed again."""

    def limit(self, policy, tokens):
        seen = []

        def check(_module, _args, kwargs):
            size = kwargs["input_ids"].numel()
            seen.append(size)
            if size > tokens * (2 if policy.checkpointing else 1):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

        policy.trunk.register_forward_pre_hook(check, with_kwargs=True)
        return seen

    def test_layers_are_computed_twice_first(self):
        whole = after(make())
        made = make()
        seen = self.limit(made[0], 80)
        assert_same(after(made), whole)
        assert made[0].checkpointing
        assert made[0].most_tokens is None
        assert len(seen) == 2

    def test_then_passes_become_smaller_and_stay_so(self):
        whole = after(make())
        made = make()
        seen = self.limit(made[0], 30)
        assert_same(after(made), whole)
        assert made[0].checkpointing
        assert made[0].most_tokens < 100
        failed = sum(size > 60 for size in seen)
        assert failed >= 2
        after(made)
        assert sum(size > 60 for size in seen) == failed

    def test_large_passes_become_smaller_before_that(self, monkeypatch):
        monkeypatch.setattr("poise.training.update.BUSY_TOKENS", 60)
        whole = after(make(), micro_tokens=10**6)
        made = make()
        self.limit(made[0], 80)
        assert_same(after(made, micro_tokens=10**6), whole)
        assert not made[0].checkpointing
        assert made[0].most_tokens

    def test_gradients_of_the_failed_attempt_are_dropped(self):
        whole = after(make(), micro_tokens=40)
        made = make()
        sizes = []

        def third(_module, _args, kwargs):
            sizes.append(kwargs["input_ids"].numel())
            if len(sizes) == 3:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        made[0].trunk.register_forward_pre_hook(third, with_kwargs=True)
        assert_same(after(made, micro_tokens=40), whole)

    def test_a_model_that_is_run_padded_goes_straight_to_smaller_passes(self):
        whole = after(make("gemma2"))
        made = make("gemma2")
        self.limit(made[0], 60)
        assert_same(after(made), whole)
        assert not made[0].checkpointing
        assert made[0].most_tokens

    def test_where_nothing_helps_it_says_what_does(self):
        made = make()
        before = {n: p.detach().clone() for n, p in made[0].model.named_parameters()}
        self.limit(made[0], 3)
        with pytest.raises(OutOfMemoryError, match=r"single response.*lower rollout\.max_tokens"):
            after(made)
        for name, value in made[0].model.named_parameters():
            assert torch.equal(value, before[name])
            assert value.grad is None

    def test_in_the_optimizer(self):
        made = make()

        def full():
            raise torch.OutOfMemoryError("CUDA out of memory.")

        made[1].step = full
        with pytest.raises(OutOfMemoryError, match=r"in the optimizer's step.*lora"):
            after(made)


def test_a_token_mean_in_two_stages():
    """Parts of four responses: the mean over parts of each part's own token mean, for the KL term too."""
    made = make()
    policy, _, batch = made
    batch = replace(batch, ref_logp=batch.old_logp - 0.3)
    settings, phase = Settings(kl_coef=0.5), Phase.of(batch)
    whole, parts = (torch.zeros(sum(p.numel() for p in policy.parameters()), dtype=torch.float64) for _ in range(2))
    backward(policy, batch, averaged_in_parts(batch, phase, 4), UpdatePlan(settings))
    whole += torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
    cuts = [slice(start, start + 4) for start in range(0, len(batch.mask), 4)]
    assert len({int(batch.mask[rows].sum()) for rows in cuts}) > 1
    for rows in cuts:
        backward(policy, batch.rows(rows), phase.rows(rows), UpdatePlan(settings))
        parts += torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]) / len(cuts)
    assert (whole - parts).norm() < 1e-5 * parts.norm()
    backward(policy, batch, phase, UpdatePlan(settings))
    plain = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
    assert (whole - plain).norm() > 0.01 * plain.norm()
    assert averaged_in_parts(batch, phase, 0) is phase
    alike = averaged_in_parts(batch, phase, len(batch.mask))
    torch.testing.assert_close((alike.policy, alike.kl), (phase.policy, phase.kl))


@pytest.mark.parametrize("same", [True, False])
def test_phases_may_have_the_same_mini_batches(monkeypatch, same):
    policy, optimizer, batch = make()
    seen = []
    monkeypatch.setattr("poise.training.update.backward", lambda _, mini, *_rest: seen.append(mini.advantages.tolist()))
    update(policy, optimizer, batch, [Phase.of(batch)] * 2, UpdatePlan(mini_batch=4, same_order=same), seed=1)
    half = len(seen) // 2
    assert half > 1
    assert (seen[:half] == seen[half:]) is same
    for rows in (seen[:half], seen[half:]):
        assert sorted(chain.from_iterable(rows)) == sorted(batch.advantages.tolist())


def test_a_single_mini_batch_is_not_copied(monkeypatch):
    policy, optimizer, batch = make()
    seen = []
    monkeypatch.setattr("poise.training.update.backward", lambda _, *rest: seen.append(rest))
    phase = Phase.of(batch)
    update(policy, optimizer, batch, [phase], UpdatePlan())
    ((mini, mini_phase, _, _),) = seen
    assert mini.old_logp.data_ptr() == batch.old_logp.data_ptr()
    assert mini_phase.policy.data_ptr() == phase.policy.data_ptr()
