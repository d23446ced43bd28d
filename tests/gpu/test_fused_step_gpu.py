"""A decoding step in few kernels, against transformers' own code."""

import pytest
import torch

from poise.models.loading import add_adapter
from poise.models.policy import Policy
from poise.sampling.native import engine as engines
from poise.sampling.native.engine import NativeEngine
from poise.sampling.native.fused_step import fused_step
from poise.sampling.native.slot_cache import Rotation
from poise.training.config.groups import LoraConfig
from support.tiny_models import Words, adapted, prompts, sample, tiny

pytestmark = pytest.mark.filterwarnings("ignore")
USUAL = ["llama", "qwen2", "qwen3", "mistral"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", USUAL)
def test_usual_models_pass_the_trial(name, dtype):
    engine = NativeEngine(tiny(name, "cuda", dtype))
    assert engine.step is not None


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "granite"])
def test_other_models_decode_through_their_own_code(name):
    assert NativeEngine(tiny(name, "cuda", torch.bfloat16)).step is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", USUAL)
def test_usual_models_with_an_adapter_pass_the_trial(name, dtype):
    untrained = Policy(add_adapter(tiny(name).model, LoraConfig(rank=4), 0).to("cuda", dtype), Words())
    for policy in (untrained, adapted(tiny(name, "cuda", dtype), target_modules=["q_proj", "v_proj"])):
        assert NativeEngine(policy).step is not None
    assert not any(value.any() for key, value in untrained.model.named_parameters() if "lora_B" in key)


def test_layers_of_another_kind_decode_through_their_own_code():
    policy = tiny("llama", "cuda", torch.bfloat16)
    policy.trunk.layers[1].mlp.down_proj = torch.nn.Sequential(policy.trunk.layers[1].mlp.down_proj)
    assert fused_step(policy) is None


@pytest.mark.parametrize("adapter", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", USUAL)
def test_a_step_errs_no_more_than_twice_as_much_as_the_models_own_code(name, adapter):
    policy, whole = (with_adapter(tiny(name, "cuda", torch.bfloat16), adapter) for _ in range(2))
    whole.model.float()
    fused, own = NativeEngine(policy), NativeEngine(policy)
    own.step = None
    errors = []
    for engine in (fused, own):
        out = sample(engine, prompts(12), 4, max_tokens=40, temperature=0.8, seed=0)
        exact = whole.score(out.batch, 0.8)[0]
        errors.append(float((out.logp - exact)[out.mask].abs().mean()))
    assert errors[0] <= 2 * errors[1] + 1e-4


def with_adapter(policy, dtype):
    """With a trained adapter of this dtype, or as it is."""
    if dtype is None:
        return policy
    policy = adapted(policy, std=0.2)
    for name, parameter in policy.model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    return policy


@pytest.mark.parametrize("adapter", [None, torch.float32, torch.bfloat16])
def test_a_step_sees_an_update_in_place(adapter):
    policy = with_adapter(tiny("llama", "cuda", torch.bfloat16), adapter)
    engine = NativeEngine(policy)
    assert engine.step is not None
    before = sample(engine, prompts(4), 2, max_tokens=12, temperature=0.0, seed=0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(-0.7)
    after = sample(engine, prompts(4), 2, max_tokens=12, temperature=0.0, seed=0)
    fresh = sample(NativeEngine(policy), prompts(4), 2, max_tokens=12, temperature=0.0, seed=0)
    assert not torch.equal(before.tokens, after.tokens)
    assert torch.equal(after.tokens, fresh.tokens)


def test_heads_that_the_kernel_does_not_support_are_rotated_by_plain_torch(monkeypatch):
    """There the attention is torch's, which takes queries and keys that are rotated already."""
    policy, calls, query = tiny("qwen3", "cuda", torch.bfloat16), [], Rotation.query
    engine = NativeEngine(policy)
    monkeypatch.setattr("poise.sampling.native.kernels.suits", lambda *_: False)
    monkeypatch.setattr(Rotation, "query", lambda self, x: calls.append(x) or query(self, x))
    found = sample(engine, prompts(2), 1, max_tokens=20, temperature=0.0, seed=0)
    engine.release()
    engine.step = None
    expected = sample(engine, prompts(2), 1, max_tokens=20, temperature=0.0, seed=0)
    assert calls
    torch.testing.assert_close(found.logp[:, :2], expected.logp[:, :2], atol=5e-2, rtol=0)


def test_a_step_that_fails_its_trial_is_not_taken(monkeypatch):
    run = engines.FusedStep.run
    monkeypatch.setattr(engines.FusedStep, "run", lambda self, *args: run(self, *args) * 1.1)
    assert NativeEngine(tiny("llama", "cuda", torch.bfloat16)).step is None
