"""LoRA adapters as the fused step multiplies with them, against peft's own forward pass."""

import copy
from contextlib import suppress

import peft
import pytest
import torch

from poise.models.adapters import adapter_of, base_layer, is_linear, untrained_adapters_filled
from poise.models.layers import can_join, join
from poise.models.loading import load_policy
from poise.models.master_weights import MasterWeights
from poise.training.config.groups import LoraConfig
from support.tiny_models import VOCABULARY, adapted, exact, tiny

IDS = torch.arange(1, 13)[None] % VOCABULARY


def groups(policy):
    for layer in policy.trunk.layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield [attention.q_proj, attention.k_proj, attention.v_proj]
        yield [attention.o_proj]
        yield [mlp.gate_proj, mlp.up_proj]
        yield [mlp.down_proj]


def random(rows, width, dtype=torch.float64):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


SETTINGS = [
    {},
    {"r": 1},
    {"r": 16, "lora_alpha": 5},
    {"target_modules": ["q_proj", "v_proj"]},
    {"target_modules": ["k_proj", "up_proj", "down_proj"]},
    {"rank_pattern": {"q_proj": 3, "v_proj": 7, "up_proj": 2}, "alpha_pattern": {"k_proj": 1}},
    {"use_rslora": True},
    {"init_lora_weights": "orthogonal"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen2"])  # without and with a bias
def test_joined_layers_compute_what_peft_does(name, settings):
    policy = exact(adapted(tiny(name), **settings))
    for layers in groups(policy):
        assert can_join(layers)
        x = random(5, layers[0].in_features)
        with torch.no_grad():
            expected = torch.cat([layer(x) for layer in layers], -1)
            plain = torch.cat([base_layer(layer)(x) for layer in layers], -1)
            assert torch.equal(expected, plain) == (not any(map(adapter_of, layers)))
            whole = join(layers)
            torch.testing.assert_close(whole(x), expected, rtol=1e-13, atol=1e-13)
            torch.testing.assert_close(torch.cat([layer(x) for layer in layers], -1), expected, rtol=1e-13, atol=1e-13)
            assert whole.covers(layers)
            assert join(layers).weight.data_ptr() == whole.weight.data_ptr()
            with policy.model.disable_adapter():
                torch.testing.assert_close(whole(x), plain, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
def test_adapters_of_either_dtype_err_no_more_than_pefts_own_code(own):
    """peft computes a float32 adapter on bfloat16 weights in float32, and rounds the sum."""
    policy = adapted(tiny("qwen2", dtype=torch.bfloat16))
    for name, parameter in policy.model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(own)
    for layers in groups(policy):
        x = random(64, layers[0].in_features, torch.bfloat16)
        twins = copy.deepcopy(layers)
        with torch.no_grad():
            theirs, ours = torch.cat([layer(x) for layer in layers], -1), join(layers)(x)
            expected = torch.cat([layer.double()(x.double()) for layer in twins], -1)
        assert ours.dtype is torch.bfloat16
        assert (ours - expected).norm() < 1.02 * (theirs - expected).norm()


def test_changes_in_place_are_seen():
    policy = adapted(tiny("llama", dtype=torch.bfloat16))
    for name, parameter in policy.model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.bfloat16()
    joined = [(join(layers), layers) for layers in groups(policy)]
    masters = MasterWeights(policy.model)
    assert len(masters.masters) == len(masters.parameters) == 2 * 7 * 3  # A and B of 7 layers, 3 times
    with torch.no_grad():
        for master in masters.parameters.values():
            master.mul_(-1.5)
    masters.publish()
    for whole, layers in joined:
        x = random(5, layers[0].in_features, torch.bfloat16)
        with torch.no_grad():
            expected = torch.cat([layer(x) for layer in layers], -1)
        torch.testing.assert_close(whole(x).detach(), expected, rtol=2e-2, atol=2e-2)
        assert whole.covers(layers)


def test_gradients_and_files_are_as_before(tmp_path):
    results = []
    for joined in (False, True):
        policy = adapted(tiny("qwen2"))
        if joined:
            for layers in groups(policy):
                join(layers)
        policy.trunk(IDS, use_cache=False).last_hidden_state.square().sum().backward()
        policy.model.save_pretrained(tmp_path / str(joined))
        saved = peft.load_peft_weights(str(tmp_path / str(joined)), device="cpu")
        results.append(({name: parameter.grad for name, parameter in policy.model.named_parameters()}, saved))
    (plain, plain_file), (found, file) = results
    assert {name for name, grad in found.items() if grad is not None} == {name for name in found if "lora_" in name}
    for name, grad in plain.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-4) if grad is not None else None
    assert plain_file.keys() == file.keys()
    assert all(torch.equal(value, file[name]) for name, value in plain_file.items())


def test_a_model_that_moves_or_gets_another_adapter_has_to_be_joined_again():
    policy = adapted(tiny("llama"))
    layers = next(groups(policy))
    whole = join(layers)
    other = copy.deepcopy(layers)
    assert not whole.covers(other)
    policy.model.delete_adapter("default")
    assert not whole.covers(layers)
    policy.model.add_adapter("default", peft.LoraConfig(r=2, target_modules="all-linear"))
    policy.model.set_adapter("default")
    assert can_join(layers)
    assert not whole.covers(layers)
    assert join(layers).covers(layers)
    policy.model.double()
    assert not whole.covers(layers)


def second(policy):
    policy.model.add_adapter("second", peft.LoraConfig(r=2, target_modules="all-linear"))


def one_dtype_each(policy):
    policy.trunk.layers[0].self_attn.q_proj.lora_A.bfloat16()


OTHERS = {
    "DoRA": ({"use_dora": True}, None),
    "dropout": ({"lora_dropout": 0.1}, None),
    "a bias": ({"lora_bias": True}, None),
    "merged": ({}, lambda policy: policy.model.merge_adapter()),
    "a second adapter": ({}, second),
    "two dtypes": ({}, one_dtype_each),
}


@pytest.mark.filterwarnings("ignore:`lora_bias=True`")
@pytest.mark.parametrize("case", OTHERS)
def test_other_adapters_are_left_to_peft(case):
    settings, change = OTHERS[case]
    policy = adapted(tiny("qwen2"), **settings)
    layers = next(groups(policy))
    assert change is None or can_join(layers)
    if change is not None:
        change(policy)
    assert not can_join(layers)


def test_other_kinds_of_adapter_are_left_to_peft():
    policy = tiny("llama")
    model = peft.get_peft_model(policy.model, peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"],
                                                             feedforward_modules=[]))  # fmt: skip
    layer = model.get_base_model().model.layers[0].self_attn.k_proj
    assert not is_linear(layer)
    assert adapter_of(layer) is None


def test_a_trial_sees_an_adapter_that_is_still_zero():
    policy = load_policy("embedded", device="cpu", lora=LoraConfig(rank=4))
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    random_state = torch.random.get_rng_state()

    def states():
        with torch.no_grad():
            return policy.trunk(IDS, use_cache=False).last_hidden_state

    plain = states()
    with suppress(KeyError), untrained_adapters_filled(policy.trunk):
        inside = states()
        raise KeyError
    assert (inside - plain).norm() > 0.05 * plain.norm()
    assert all(torch.equal(value, before[name]) for name, value in policy.model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), random_state)
    trained = adapted(tiny("llama"))
    with torch.no_grad():
        expected = trained.trunk(IDS, use_cache=False).last_hidden_state
        with untrained_adapters_filled(trained.trunk):  # which has none
            assert torch.equal(trained.trunk(IDS, use_cache=False).last_hidden_state, expected)


def test_a_merged_copy_in_bfloat16_would_lose_small_updates():
    """Why the fused step multiplies with the factors: poise/models/adapters.py."""
    generator = torch.Generator().manual_seed(0)
    width, out, rank, scale = 1024, 512, 16, 2.0
    weight = (0.02 * torch.randn(out, width, generator=generator, dtype=torch.float64)).bfloat16()
    down = (2 * torch.rand(rank, width, generator=generator, dtype=torch.float64) - 1) / width**0.5
    up = 1e-4 * torch.randn(out, rank, generator=generator, dtype=torch.float64).sign()  # ten Adam steps at 1e-5
    x = random(64, width)
    delta = scale * up @ down
    merged = (weight.double() + delta).bfloat16().double() - weight.double()
    factors = scale * (x @ down.bfloat16().double().T).bfloat16().double() @ up.bfloat16().double().T
    effect = x @ delta.T
    assert (x @ merged.T - effect).norm() > 0.8 * effect.norm()
    assert (factors - effect).norm() < 0.01 * effect.norm()
