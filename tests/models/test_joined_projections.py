"""Linear layers joined in memory: the same values, and parameters that are still their own."""

import copy

import pytest
import torch

from poise.models.layers import can_join, join
from poise.models.master_weights import MasterWeights
from support.tiny_models import VOCABULARY, tiny

IDS = torch.arange(1, 13)[None] % VOCABULARY


def projections(layer):
    attention, mlp = layer.self_attn, layer.mlp
    return [attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]


def join_projections(trunk):
    return [[join(layers) for layers in projections(layer)] for layer in trunk.layers]


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
    (whole, _), *_ = join_projections(policy.trunk)
    masters = MasterWeights(policy.model)
    with torch.no_grad():
        for master in masters.parameters.values():
            master.mul_(1.5)
    masters.publish()
    layers, _ = projections(policy.trunk.layers[0])
    assert torch.equal(whole.weight, torch.cat([layer.weight for layer in layers]))
    assert whole.covers(layers)
    assert join(layers).covers(layers)
    assert join(layers).weight.data_ptr() == whole.weight.data_ptr()  # joined once


@pytest.mark.parametrize("name", ["llama", "qwen2"])  # without and with a bias
def test_one_product_is_that_of_all_layers(name):
    layers, _ = projections(tiny(name).trunk.layers[0])
    x = torch.randn(3, layers[0].in_features, generator=torch.Generator().manual_seed(0))
    expected = torch.cat([layer(x) for layer in layers], -1)
    torch.testing.assert_close(join(layers)(x), expected)


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
    (whole, _), *_ = join_projections(policy.trunk)
    policy.model.double()
    assert not whole.covers(projections(policy.trunk.layers[0])[0])
    policy.trunk(IDS, use_cache=False)


def test_a_copy_is_taken_apart():
    policy = tiny("llama")
    expected = policy.trunk(IDS, use_cache=False).last_hidden_state
    (whole, _), *_ = join_projections(policy.trunk)
    copied = copy.deepcopy(policy.trunk)
    assert not whole.covers(projections(copied.layers[0])[0])
    assert whole.covers(projections(policy.trunk.layers[0])[0])
    assert torch.equal(copied(IDS, use_cache=False).last_hidden_state, expected)
    with torch.no_grad():
        copied.layers[0].self_attn.q_proj.weight.zero_()
    assert policy.trunk.layers[0].self_attn.q_proj.weight.any()


def test_other_layers_cannot_be_joined():
    first, second = (projections(layer)[0] for layer in tiny("llama").trunk.layers[:2])
    assert can_join(first)
    assert not can_join([first[0], torch.nn.Sequential(first[1]), first[2]])  # as an adapter would wrap it
    assert not can_join([second[0], None])
    assert not can_join([second[0], copy.deepcopy(second[1]).double()])
