"""How many tokens a scoring pass takes: by default, as asked for, and when memory runs out."""

import sys
from types import SimpleNamespace

import pytest
import torch

from poise.batch import Prompt, padded_batch
from poise.models.layers import OutOfMemoryError
from poise.models.loading import load_policy
from poise.models.policy import BUSY_TOKENS, Policy
from poise.models.scoring import score_all
from poise.sampling import vllm_engine as vllm
from poise.sampling.choose import choose
from poise.sampling.draws import Sampling
from poise.sampling.requests import Request


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
    return score_all(policy, batch, 1.0, **how)[0]


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


def test_vllm_is_scored_in_passes_of_micro_tokens(monkeypatch):
    """vLLM itself is not needed: what it answers is made up."""
    seen = []
    monkeypatch.setattr(vllm, "check_installed", lambda: None)
    monkeypatch.setattr(vllm, "score_all", lambda _, batch, *how: seen.append(how) or (batch.old_logp, batch.old_logp))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **_: None))
    engine = choose(load_policy("embedded", device="cpu"), "vllm", note=lambda _: None, micro_tokens=77)
    output = SimpleNamespace(token_ids=[5, 6], finish_reason="stop", logprobs=SimpleNamespace(logprobs=[-1.0, -2.0]))
    engine._llm = SimpleNamespace(generate=lambda asked, *_, **__: [SimpleNamespace(outputs=[output]) for _ in asked])
    (found,) = engine._answer([Request([1, 2], 4)], Sampling(), 0)
    assert seen == [(1.0, 77)]
    assert (found.tokens.tolist(), found.sampler_logp.tolist(), found.finished) == ([5, 6], [-1.0, -2.0], True)
    assert engine._answer([Request([1, 2], 4)], Sampling(top_k=3), 0)[0].sampler_logp is None
