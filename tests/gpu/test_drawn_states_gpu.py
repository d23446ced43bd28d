"""Hidden states from sampling on CUDA: recorded inside the graphs, as near to exact ones as those of a forward pass."""

from dataclasses import replace

import pytest
import torch

from poise import regulators
from poise.algorithms import Grpo
from poise.algorithms.sampler import Sampler
from poise.engines.native import drawn_states
from poise.engines.native.engine import NativeEngine
from poise.engines.native.graphs import GraphedDecoder
from poise.models.policy import Policy, load_policy
from poise.rollout.sampling import Sampling
from poise.rollout.types import repeated
from poise.training.batches import release_hidden, stack, token_batch
from support.dialogues import dialogues
from support.tiny_models import prompts, tiny
from support.twice import Twice

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.compile has many for its own code

NAMES = ["llama", "qwen2", "qwen3", "mistral", "gemma3"]


def asked(policy, *, hidden=True, max_tokens=90):
    """Requests of different limits, so that rows end at different looks, move and are given to others."""
    requests = repeated(prompts(12), 4, max_tokens, policy.end_tokens)
    return [replace(r, max_tokens=max_tokens - 20 * (i % 4), hidden=hidden) for i, r in enumerate(requests)]


def error(found, exact):
    return float((found.float() - exact).norm() / exact.norm())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_states_err_no_more_than_twice_as_much_as_a_forward_pass(name, compiled):
    policy = tiny(name, "cuda", torch.bfloat16, compiled=compiled)
    whole = tiny(name, "cuda", torch.bfloat16)
    whole.model.float()  # the same weights
    engine = NativeEngine(policy, batch=20)
    out = engine.sample(asked(policy), Sampling(0.8), 0)
    assert isinstance(engine._decoder, GraphedDecoder)
    assert {recorded for _, _, recorded in engine._decoder.graphs} == {True}
    assert out.hidden.dtype == torch.bfloat16
    with torch.no_grad():
        forward, exact = policy.hidden(out), whole.hidden(out)
    assert error(out.hidden, exact) <= 2 * error(forward, exact)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, 0.9), Sampling(0.0)])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_keeping_states_changes_no_bit_of_what_is_sampled(name, sampling):
    policy = tiny(name, "cuda", torch.bfloat16)
    engine = NativeEngine(policy, batch=20)
    plain, kept, after = (engine.sample(asked(policy, hidden=wanted), sampling, 3) for wanted in (False, True, False))
    assert plain.hidden is after.hidden is None
    assert kept.hidden is not None
    for part in ("tokens", "mask", "logp", "entropy"):
        assert torch.equal(getattr(plain, part), getattr(kept, part))
        assert torch.equal(getattr(plain, part), getattr(after, part))


def test_in_float32_they_are_those_of_a_forward_pass():
    policy = tiny("llama", "cuda")
    out = NativeEngine(policy, batch=20).sample(asked(policy), Sampling(), 0)
    with torch.no_grad():
        torch.testing.assert_close(out.hidden, policy.hidden(out), rtol=1e-3, atol=1e-3)


def test_turns_that_continue_kept_keys(monkeypatch):
    policy = tiny("llama", "cuda", torch.bfloat16)
    engine = NativeEngine(policy, batch=6)
    run = engine.run
    monkeypatch.setattr(engine, "run", lambda requests, *rest: run([replace(r, hidden=True) for r in requests], *rest))
    turns, calls = dialogues(engine, Sampling(0.8), episodes=9, max_tokens=20, length=200)
    assert calls.continued > 0
    for out in turns:
        with torch.no_grad():
            assert error(out.hidden, policy.hidden(out).float()) < 0.05


def test_more_states_than_there_is_memory_for_are_not_kept(monkeypatch):
    policy = tiny("llama", "cuda", torch.bfloat16)
    monkeypatch.setattr(drawn_states, "SHARE", 0.0)
    assert NativeEngine(policy).sample(asked(policy), Sampling(), 0).hidden is None


def test_a_batch_takes_them_without_a_forward_pass_and_frees_them(monkeypatch):
    policy, whole = (load_policy("embedded", device="cuda", dtype="bfloat16") for _ in range(2))
    whole.model.float()  # the same weights
    task = Twice()
    sampler = Sampler(policy, NativeEngine(policy), task, max_tokens=40, hidden=True)
    samples, _ = Grpo(group=8).collect([next(task.problems("train", seed)) for seed in range(4)], sampler, 7)
    rollouts, nthr = stack(samples, policy, 1.0), regulators.get("nthr")

    def scores(batch):
        found = nthr.scores(batch)[rollouts.mask]
        return found[found.isfinite()]

    with torch.no_grad():
        exact = scores(token_batch(samples, rollouts, whole, hidden=True, recompute=True))
        forward = scores(token_batch(samples, rollouts, policy, hidden=True, recompute=True))
        monkeypatch.setattr(Policy, "padded_hidden", lambda *_: pytest.fail("a forward pass"))
        batch = token_batch(samples, rollouts, policy, hidden=True)
        found = batch.hidden_of(torch.arange(len(samples), device="cuda"))[rollouts.mask]
        assert error(found, policy.hidden(rollouts).float()) < 0.05
        assert 0 < error(scores(batch), exact) <= 2 * error(forward, exact)
    assert samples[0].drawn.parts[0].states.is_cuda
    assert release_hidden(samples, batch).hidden is None
    assert not any(sample.drawn.parts for sample in samples)
