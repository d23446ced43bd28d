"""Linear layers joined in compiled code: the same values, fewer products, and parameters that are still their own."""

import copy

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.nn.functional import linear

from poise.models.fused_projections import Joined, compiler, join_projections
from poise.models.master_weights import MasterWeights
from support.tiny_models import VOCABULARY, tiny

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.compile has many for its own code
IDS = torch.arange(1, 13)[None] % VOCABULARY


PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def compiled(trunk, seen):
    def look(graph, _):
        seen.extend(node for node in graph.graph.nodes if node.target in PRODUCTS)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = compiler(aot_autograd(fw_compiler=look, bw_compiler=look))
    for layer in trunk.layers:
        layer.forward = torch.compile(layer.forward, backend=backend, dynamic=True)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_the_same_states_by_fewer_products(name):
    policy = tiny(name)
    trunk = policy.trunk
    with torch.no_grad():
        before = trunk(IDS, use_cache=False).last_hidden_state
        join_projections(trunk)
        torch.testing.assert_close(trunk(IDS, use_cache=False).last_hidden_state, before, rtol=0, atol=0)
        products = []
        compiled(trunk, products)
        found = trunk(IDS, use_cache=False).last_hidden_state
    torch.testing.assert_close(found, before, rtol=1e-5, atol=1e-5)
    assert len(products) == 4  # one layer is traced for all: queries with keys and values, output, gate with up, down


def test_gradients_go_to_each_layers_own_weight():
    results = []
    for joined in (False, True):
        trunk = tiny("qwen2").trunk
        if joined:
            join_projections(trunk)
            compiled(trunk, [])
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
    layer = policy.trunk.layers[0].self_attn.k_proj
    assert isinstance(layer, Joined)
    x = torch.randn(3, layer.in_features, dtype=torch.bfloat16)
    part = linear(x, layer.whole)[:, layer.first : layer.first + layer.out_features]
    assert torch.equal(part, layer(x))


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


def test_models_alike_are_compiled_once():
    assert compiler("inductor") is compiler("inductor")
