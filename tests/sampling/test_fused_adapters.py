"""The fused step of a model with a LoRA adapter, on a CPU with plain torch in place of its kernels."""

from itertools import cycle, islice

import pytest
import torch
import transformers

from poise.models import adapters
from poise.models.loading import add_adapter
from poise.models.policy import Policy
from poise.sampling.native import engine as engines
from poise.sampling.native import graphs
from poise.sampling.native.engine import NativeEngine, layer_shapes
from poise.sampling.native.fused_step import FUSED, fused_step
from poise.training.config.groups import LoraConfig
from poise.training.frozen_models import Frozen, FrozenEngine
from support.native_engines import SlotEngine, StepEngine, UngraphedDecoder, without_kernels
from support.tiny_models import ARCHITECTURES, COMMON, Words, adapted, exact, prompts, sample, tiny

SMOLLM3 = {"smollm3": lambda: transformers.SmolLM3Config(**COMMON, no_rope_layer_interval=2)}
TARGETS = ["all-linear", ["q_proj", "v_proj"], ["o_proj", "gate_proj"]]


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    without_kernels(monkeypatch)
    monkeypatch.setattr("support.tiny_models.ARCHITECTURES", ARCHITECTURES | SMOLLM3)


@torch.no_grad()
def states(policy, step, count=10):
    """(count, 3, W) the hidden states of some steps; without ``step`` by the model's own code."""
    cache = graphs.graphed_decoder(policy, layer_shapes(policy), engines.TRIAL_CACHE).cache
    decoder = UngraphedDecoder(policy, cache, step)
    texts, prompt_of, tokens = engines._trial_texts(policy)
    engines._begin_trial(decoder, texts, prompt_of)
    found = []
    for row in islice(cycle((tokens, tokens[::-1])), count):
        decoder.forward(3, torch.tensor(row))
        found.append(decoder.hidden[:3].clone())
        decoder.cache.advance()
    return torch.stack(found)


@pytest.fixture
def room(monkeypatch):
    monkeypatch.setattr("poise._lib.device.free_bytes", lambda _: 1 << 34)


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("targets", TARGETS, ids=str)
@pytest.mark.parametrize("rank", [1, 8])
@pytest.mark.parametrize("name", sorted(FUSED))
def test_states_are_those_of_transformers_and_peft(name, rank, targets):
    policy = exact(adapted(tiny(name), r=rank, target_modules=targets))
    step, before = fused_step(policy), None
    for _ in range(2):
        found = states(policy, step)
        torch.testing.assert_close(found, states(policy, None), rtol=1e-11, atol=1e-11)
        assert before is None or (found - before).norm() > 0.01 * before.norm()
        before = found
        optimizer = torch.optim.AdamW(policy.parameters(), lr=0.1)
        policy.trunk(torch.arange(6, 20)[None], use_cache=False).last_hidden_state.square().sum().backward()
        optimizer.step()
    with policy.model.disable_adapter():
        without = states(policy, step)
        torch.testing.assert_close(without, states(policy, None), rtol=1e-11, atol=1e-11)
    assert (without - before).norm() > 0.01 * before.norm()


@pytest.mark.parametrize("targets", TARGETS, ids=str)
@pytest.mark.parametrize("name", sorted(FUSED))
def test_log_probabilities_are_the_trainers(name, targets):
    """Before and after optimizer steps, whose weights the step reads where they are."""
    policy = exact(adapted(tiny(name), r=3, target_modules=targets))
    engine = StepEngine(policy)
    assert engine.step is not None
    optimizer, before = torch.optim.AdamW(policy.parameters(), lr=0.05), None
    for _ in range(2):
        out = sample(engine, prompts(4), 3, max_tokens=24, temperature=0.8, seed=3)
        logp, entropy = policy.score(out.batch, 0.8)
        torch.testing.assert_close(out.logp[out.mask], logp.detach().float()[out.mask], atol=2e-6, rtol=0)
        torch.testing.assert_close(out.entropy[out.mask], entropy.detach().float()[out.mask], atol=2e-6, rtol=0)
        expected = sample(SlotEngine(policy), prompts(4), 3, max_tokens=24, temperature=0.8, seed=3)
        assert torch.equal(out.tokens, expected.tokens)
        assert before is None or not torch.equal(before, out.tokens)
        before = out.tokens
        optimizer.zero_grad()
        logp.sum().backward()
        optimizer.step()
    assert engine.step.usable


def test_the_policy_without_its_adapter_takes_the_step_of_its_base():
    policy, base = exact(adapted(tiny("qwen3"))), exact(tiny("qwen3"))
    own = StepEngine(policy)
    receiver = FrozenEngine(Frozen(policy, adapter=True), StepEngine(policy))
    before, found, after = (sample(e, prompts(4), 2, max_tokens=20, seed=0) for e in (own, receiver, own))
    expected = sample(StepEngine(base), prompts(4), 2, max_tokens=20, seed=0)
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.logp, expected.logp, atol=1e-6, rtol=0)
    assert torch.equal(before.tokens, after.tokens)
    assert not torch.equal(before.tokens, found.tokens)


class TestTheTrial:
    @pytest.fixture(autouse=True)
    def as_on_cuda(self, monkeypatch, room):  # noqa: ARG002
        monkeypatch.setattr(graphs, "usable", lambda *_: True)
        monkeypatch.setattr(graphs.GraphedDecoder, "run", UngraphedDecoder.run)

    def untrained(self):
        return Policy(add_adapter(tiny("llama").model, LoraConfig(rank=4), 0), Words())

    def test_an_untrained_adapter_passes_and_stays_zero(self):
        policy = self.untrained()
        assert NativeEngine(policy).step is not None
        ups = [value for name, value in policy.model.named_parameters() if "lora_B" in name]
        assert ups
        assert not any(up.any() for up in ups)

    def test_a_step_without_the_adapter_is_not_taken(self, monkeypatch):
        monkeypatch.setattr(adapters.JoinedAdapters, "add_to", lambda _, product, __: product)
        with pytest.warns(UserWarning, match="its hidden states differ"):
            assert NativeEngine(self.untrained()).step is None

    def test_a_variant_decodes_through_its_own_code(self):
        policy = adapted(tiny("llama"), use_dora=True)
        assert NativeEngine(policy).step is None
        policy = adapted(tiny("qwen2"), target_modules=["embed_tokens", "q_proj"])
        assert NativeEngine(policy).step is None
