"""How many tokens a scoring pass takes: by default, as asked for, and when memory runs out."""

import sys
from types import SimpleNamespace

import pytest
import torch

from poise.batch import Prompt, padded_batch
from poise.models.layers import OutOfMemoryError
from poise.models.loading import load_policy
from poise.models.policy import BUSY_TOKENS, Policy
from poise.models.scoring import HiddenStates, score_batch
from poise.sampling import vllm_engine as vllm
from poise.sampling.choose import choose
from poise.sampling.draws import Sampling
from poise.sampling.requests import Request
from support.tiny_models import tiny


@pytest.mark.parametrize(
    ("device", "parameters", "tokens"),
    [
        ("cpu", 1_000_000, BUSY_TOKENS),
        ("cuda", 1_000_000, 4 * BUSY_TOKENS),
        ("cuda", 135_000_000, 4 * BUSY_TOKENS),
        ("cuda", 500_000_000, 2 * BUSY_TOKENS),
        ("cuda", 1_500_000_000, BUSY_TOKENS),
    ],
)
def test_on_cuda_a_pass_of_a_small_model_has_more_tokens(device, parameters, tokens):
    trunk = torch.nn.ParameterList([torch.empty(parameters, device="meta")])
    policy = SimpleNamespace(device=torch.device(device), trunk=trunk, most_tokens=None)
    assert Policy.budget(policy) == tokens


def scored(policy, **how):
    """Three responses, scored in passes of few tokens; the rows of every pass."""
    batch = padded_batch([Prompt((1, 2, 3))] * 3, torch.tensor([[4, 5], [6, 7], [8, 9]]).unbind(), policy.device)
    return score_batch(policy, batch, 1.0, **how)[0]


def test_when_memory_runs_out_scoring_takes_fewer_tokens(monkeypatch):
    policy = load_policy("embedded", device="cpu")
    expected, real, passes = scored(policy), policy.score, []

    def narrow(batch, temperature):
        passes.append(len(batch.mask))
        if len(batch.mask) > 1:
            raise torch.OutOfMemoryError("full")
        return real(batch, temperature)

    monkeypatch.setattr(policy, "score", narrow)
    assert torch.allclose(scored(policy), expected, atol=1e-5)
    assert passes[0] == 3
    assert passes[-3:] == [1, 1, 1]
    monkeypatch.setattr(policy, "score", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
    with pytest.raises(OutOfMemoryError, match="with a single response per pass"):
        scored(policy)


def answers():
    """Two prompts with four responses each."""
    tokens = torch.randint(6, 90, (8, 9), generator=torch.Generator().manual_seed(0))
    lengths = (9, 4, 1, 6, 7, 7, 2, 8)
    prompts = [Prompt((7, 8, 9))] * 4 + [Prompt((10, 11))] * 4
    return padded_batch(prompts, [row[:n] for row, n in zip(tokens, lengths, strict=True)], torch.device("cpu"))


@pytest.fixture
def passes(monkeypatch):
    """The rows of every forward pass."""
    seen, real = [], Policy.hidden
    monkeypatch.setattr(
        Policy, "hidden", lambda self, batch, *rest: seen.append(len(batch.mask)) or real(self, batch, *rest)
    )
    return seen


@pytest.mark.parametrize("wanted", [range(8), range(4, 8), (1, 6)])
def test_kept_states_are_those_of_a_separate_pass_bit_for_bit(wanted, passes):
    policy, batch, rows = tiny("qwen2"), answers(), torch.tensor(list(wanted)).flip(0)
    states = HiddenStates(policy, batch, wanted, most=1 << 20)
    passes.clear()
    logp, entropy = score_batch(policy, batch, 0.7, None, states)
    assert passes == [8]
    found = states(rows)
    assert passes == [8]
    with torch.no_grad():
        assert torch.equal(found, policy.padded_hidden(batch)[rows])
    assert all(torch.equal(x, y) for x, y in zip((logp, entropy), score_batch(policy, batch, 0.7), strict=True))


def test_only_wanted_states_are_kept_and_only_as_many_as_fit(passes):
    policy, batch = tiny("qwen2"), answers()
    bytes_of = [4 * 32 * extent.own for extent in batch.extents]
    states = HiddenStates(policy, batch, (4, 5, 6), most=sum(bytes_of[4:6]) + 1)
    score_batch(policy, batch, 1.0, None, states)
    assert set(states.kept) == {4, 5}
    assert sum(each.untyped_storage().nbytes() for each in states.kept.values()) == sum(bytes_of[4:6])
    passes.clear()
    found = states(torch.tensor([6, 4, 0]))  # one of them is kept
    assert passes == [2]
    with torch.no_grad():
        torch.testing.assert_close(found, policy.padded_hidden(batch)[[6, 4, 0]], rtol=1e-5, atol=1e-5)
    states.forget()
    passes.clear()
    assert torch.allclose(states(torch.tensor([4])), found[1], atol=1e-5)
    assert passes == [1]


def test_when_memory_runs_out_states_are_forgotten_first(monkeypatch, passes):
    policy, batch = tiny("qwen2"), answers()
    expected, real = score_batch(policy, batch, 1.0, 24), policy.score
    states = HiddenStates(policy, batch, range(8), 1e9)

    def full(part, temperature, known=None):
        if states.kept and known is not None:
            raise torch.OutOfMemoryError("full")
        return real(part, temperature, known)

    monkeypatch.setattr(policy, "score", full)
    passes.clear()
    found = score_batch(policy, batch, 1.0, 24, states)
    assert torch.equal(found[0], expected[0])
    assert not states.kept
    assert policy.most_tokens is None  # passes did not get smaller
    assert len(passes) > 2


def test_vllm_is_scored_in_passes_of_micro_tokens(monkeypatch):
    """vLLM itself is not needed: what it answers is made up."""
    seen = []
    monkeypatch.setattr(vllm, "check_installed", lambda: None)
    monkeypatch.setattr(
        vllm, "score_batch", lambda _, batch, *how: seen.append(how) or (batch.old_logp, batch.old_logp)
    )
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **_: None))
    engine = choose(load_policy("embedded", device="cpu"), "vllm", note=lambda _: None, micro_tokens=77)
    output = SimpleNamespace(token_ids=[5, 6], finish_reason="stop", logprobs=SimpleNamespace(logprobs=[-1.0, -2.0]))
    engine._llm = SimpleNamespace(generate=lambda asked, *_, **__: [SimpleNamespace(outputs=[output]) for _ in asked])
    (found,) = engine._answer([Request([1, 2], 4)], Sampling(), 0)
    assert seen == [(1.0, 77)]
    assert (found.tokens.tolist(), found.sampler_logp.tolist(), found.finished) == ([5, 6], [-1.0, -2.0], True)
    assert engine._answer([Request([1, 2], 4)], Sampling(top_k=3), 0)[0].sampler_logp is None
