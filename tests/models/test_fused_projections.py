"""Linear layers joined in memory: the same values, and parameters that are still their own."""

import copy

import pytest
import torch

from poise.models.layers import Joined, join_projections
from poise.models.master_weights import MasterWeights
from support.tiny_models import VOCABULARY, tiny

IDS = torch.arange(1, 13)[None] % VOCABULARY


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_states_stay_the_same(name):
    trunk = tiny(name).trunk
    with torch.no_grad():
        before = trunk(IDS, use_cache=False).last_hidden_state
        join_projections(trunk)
        assert torch.equal(trunk(IDS, use_cache=False).last_hidden_state, before)


def test_gradients_go_to_each_layers_own_weight():
    results = []
    for joined in (False, True):
        trunk = tiny("qwen2").trunk
        if joined:
            join_projections(trunk)
        trunk(IDS, use_cache=False).last_hidden_state.square().sum().backward()
        results.append({name: parameter.grad for name, parameter in trunk.named_parameters()})
    assert results[0].keys() == results[1].keys()
    for name, grad in results[0].items():
        torch.testing.assert_close(results[1][name], grad, rtol=1e-4, atol=1e-4)


def test_changes_in_place_are_seen_by_the_whole():
    policy = tiny("llama")
    policy.model.bfloat16()
    join_projections(policy.trunk)
    masters = MasterWeights(policy.model)
    with torch.no_grad():
        for master in masters.parameters.values():
            master.mul_(1.5)
    masters.publish()
    attention = policy.trunk.layers[0].self_attn
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert all(isinstance(layer, Joined) for layer in layers)
    assert torch.equal(layers[0].whole, torch.cat([layer.weight for layer in layers]))


def test_it_is_saved_and_loaded_as_ever(tmp_path):
    from transformers import LlamaForCausalLM

    policy = tiny("llama")
    expected = {name: value.clone() for name, value in policy.model.state_dict().items()}
    join_projections(policy.trunk)
    assert policy.model.state_dict().keys() == expected.keys()
    policy.model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    for name, value in again.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_a_model_that_moves_is_taken_apart():
    policy = tiny("llama")
    join_projections(policy.trunk)
    policy.model.double()
    assert not any(isinstance(module, Joined) for module in policy.trunk.modules())
    assert type(policy.trunk.layers[0].mlp.up_proj) is torch.nn.Linear
    policy.trunk(IDS, use_cache=False)
    assert not list(policy.trunk.layers[0].self_attn.named_buffers())


def test_a_copy_is_taken_apart():
    policy = tiny("llama")
    expected = policy.trunk(IDS, use_cache=False).last_hidden_state
    join_projections(policy.trunk)
    copied = copy.deepcopy(policy.trunk)
    assert not any(isinstance(module, Joined) for module in copied.modules())
    assert isinstance(policy.trunk.layers[0].self_attn.q_proj, Joined)
    assert torch.equal(copied(IDS, use_cache=False).last_hidden_state, expected)
    assert not list(copied.layers[0].self_attn.named_buffers())
    with torch.no_grad():
        copied.layers[0].self_attn.q_proj.weight.zero_()
    assert policy.trunk.layers[0].self_attn.q_proj.weight.any()


def test_other_layers_are_left_alone():
    policy = tiny("llama")
    attention = policy.trunk.layers[0].self_attn
    attention.k_proj = torch.nn.Sequential(attention.k_proj)  # as an adapter would wrap it
    join_projections(policy.trunk)
    assert type(attention.q_proj) is torch.nn.Linear
    assert isinstance(policy.trunk.layers[1].self_attn.q_proj, Joined)
