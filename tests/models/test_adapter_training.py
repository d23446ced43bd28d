"""The update of a LoRA adapter: nothing is computed, or kept, for the frozen weights."""

import copy
import math
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
import transformers
from torch._dynamo.testing import CompileCounter
from torch.utils.flop_counter import FlopCounterMode

from poise import Phase
from poise.models import loading
from poise.models.adapters import use_lean_forward
from poise.models.layers import compile_layers
from poise.models.loading import add_adapter
from poise.models.location import ModelError
from poise.models.master_weights import MasterWeights
from poise.models.packing import layout, own_tokens
from poise.models.policy import Policy
from poise.runs.folder import RunFolder
from poise.training.building import build
from poise.training.config.groups import LoraConfig
from poise.training.config.schema import load
from poise.training.frozen_models import Frozen
from poise.training.update import UpdatePlan, backward
from support.tiny_models import COMMON, Words, adapted, exact, prompts, responses, tiny

LENGTHS = [[5, 6], [9], [3, 3, 3], [12]]


def some_responses(seed=0):
    batch = responses(prompts(4, seed), LENGTHS, seed)
    advantages = torch.randn(len(batch.mask), generator=torch.Generator().manual_seed(seed))
    return replace(batch, old_logp=torch.full(batch.mask.shape, -4.0), advantages=advantages)


def with_lora(dtype=torch.float32, own=None, **settings):
    """A policy as ``load_policy`` makes it, with master weights; its adapter is not zero. ``own``: another dtype."""
    config = transformers.Qwen2Config(**COMMON | {"hidden_size": 64, "intermediate_size": 160, "head_dim": 16})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to(dtype)
    policy = Policy(add_adapter(model, LoraConfig(rank=4, **settings), 0), Words())
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)  # about as much as the weights do
        for parameter in trained(policy).values():
            parameter.data = parameter.data.to(own or dtype)
    policy.master_weights = MasterWeights(policy.model)
    return policy


def trained(policy):
    return {name: value for name, value in policy.model.named_parameters() if "lora_" in name}


class TestTheLeanForward:
    @pytest.mark.parametrize("shape", [(7, 32), (2, 5, 32), (1, 1, 32)])
    @pytest.mark.parametrize("name", ["q_proj", "k_proj", "o_proj"])  # with and without a bias
    def test_values_and_gradients_are_pefts(self, name, shape):
        policy = exact(adapted(tiny("qwen2"), r=3))
        lean = getattr(policy.trunk.layers[0].self_attn, name)
        theirs = copy.deepcopy(lean)
        use_lean_forward(lean)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        pull = torch.randn((*shape[:-1], lean.out_features), generator=torch.Generator().manual_seed(1)).double()
        for needed in (True, False):
            results = []
            for layer in (lean, theirs):
                given = x.clone().requires_grad_(needed)
                out = layer(given)
                parameters = [value for value in layer.parameters() if value.requires_grad]
                assert len(parameters) == 2
                results.append([out, *torch.autograd.grad(out, [*parameters, *([given] if needed else [])], pull)])
            assert "AdaptedLinear" in results[0][0].grad_fn.name() or x.dim() == 3
            for ours, expected in zip(*results, strict=True):
                torch.testing.assert_close(ours, expected, rtol=1e-13, atol=1e-13)

    def test_other_layers_run_pefts_code(self, monkeypatch):
        policy, calls = adapted(tiny("llama")), []
        layer = policy.trunk.layers[0].self_attn.q_proj
        kind = type(layer)
        use_lean_forward(policy.model)
        x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
        ours, forward = layer(x), kind.forward
        monkeypatch.setattr(kind, "forward", lambda *args: calls.append(1) or forward(*args))
        layer(x)
        assert not calls
        with policy.model.disable_adapter():
            assert torch.equal(layer(x), layer.base_layer(x))
        assert len(calls) == 1
        torch.testing.assert_close(layer(x.double().float()), ours)
        policy.model.merge_adapter()
        torch.testing.assert_close(layer(x), ours, rtol=1e-4, atol=1e-4)
        policy.model.unmerge_adapter()
        assert len(calls) == 2
        layer.lora_A.double()
        layer.lora_B.double()
        torch.testing.assert_close(layer(x), ours, rtol=1e-4, atol=1e-4)  # of another dtype than the layer
        assert len(calls) == 3
        variant = adapted(tiny("llama"), use_dora=True)
        use_lean_forward(variant.model)
        assert type(variant.trunk.layers[0].self_attn.q_proj) is kind

    def test_a_copy_and_a_merged_model_are_as_with_peft(self):
        policy = with_lora()
        ids = torch.arange(6, 16)[None]
        with torch.no_grad():
            expected = policy.model(ids).logits
            other = copy.deepcopy(policy.model)
            for value in policy.model.parameters():
                value.zero_()
            torch.testing.assert_close(other(ids).logits, expected)
            torch.testing.assert_close(other.merge_and_unload()(ids).logits, expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.long
    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore")  # torch.compile has many for its own code
    def test_all_compiled_layers_share_their_code(self):
        counts = []
        for layers in (2, 6):
            config = transformers.LlamaConfig(**COMMON | {"num_hidden_layers": layers})
            torch.manual_seed(0)
            model = add_adapter(transformers.LlamaForCausalLM(config).eval(), LoraConfig(rank=4), 0)
            policy = Policy(model, Words())
            plain = gradients_of(policy)
            torch._dynamo.reset()
            counter = CompileCounter()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("poise.models.layers.FEWEST_TOKENS", 1)
                compile_layers(policy.trunk, backend=counter)
                gradients = gradients_of(policy)
            counts.append(counter.frame_count)
            for name, value in plain.items():
                torch.testing.assert_close(gradients[name], value, rtol=1e-3, atol=1e-5)
        assert counts[0] == counts[1] > 0


def gradients_of(policy):
    policy.model.zero_grad()
    policy.score(some_responses())[0].sum().backward()
    return {name: value.grad for name, value in trained(policy).items()}


class TestTheUpdate:
    @pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "v_proj")])
    def test_it_takes_four_flop_per_frozen_weight_and_token(self, targets):
        """2 forward and 2 for the gradient of the input; 6 per weight of the adapter; the head 4 per response token."""
        policy, batch = with_lora(targets=targets), some_responses()

        def flop(_sum, a, b, **_):
            return 2 * a[0] * a[1] * b[1]

        with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: flop}) as counter:
            backward(policy, batch, Phase.of(batch))
        products = ("aten.mm", "aten.addmm", "aten.addmm_")
        counts = counter.get_flop_counts()["Global"]
        found = sum(count for kind, count in counts.items() if str(kind) in products)
        tokens, own = layout(batch).ids.shape[1], len(own_tokens(batch))
        sizes = {name: value.numel() for name, value in policy.trunk.named_parameters() if value.dim() == 2}
        frozen = sum(size for name, size in sizes.items() if "lora_" not in name and "embed" not in name)
        adapter = sum(size for name, size in sizes.items() if "lora_" in name)
        head = policy.head().weight.numel()
        # Below the first adapters there is nothing to train, so their layers' inputs get no gradient.
        first = {name: size for name, size in sizes.items() if ".0.self_attn" in f".{name}" and "o_proj" not in name}
        unneeded = sum(size for name, size in first.items() if "lora_B" not in name)
        assert found == tokens * (4 * frozen + 6 * adapter - 2 * unneeded) + 4 * own * head

    def test_a_scoring_pass_without_the_adapter_computes_nothing_of_it(self):
        policy, batch = with_lora(), some_responses()
        with FlopCounterMode(display=False) as counter:
            Frozen(policy, adapter=True).logp(batch, 1.0, None)
        counts = counter.get_flop_counts()["Global"]
        found = sum(count for kind, count in counts.items() if str(kind) in ("aten.mm", "aten.addmm"))
        sizes = {name: value.numel() for name, value in policy.trunk.named_parameters() if value.dim() == 2}
        frozen = sum(size for name, size in sizes.items() if "lora_" not in name and "embed" not in name)
        tokens, own = layout(batch).ids.shape[1], len(own_tokens(batch))
        assert found == 2 * (tokens * frozen + own * policy.head().weight.numel())

    def test_no_gradient_reaches_a_frozen_weight(self):
        policy, batch = with_lora(torch.bfloat16), some_responses()
        assert set(map(id, policy.master_weights.masters)) == set(map(id, trained(policy).values()))
        backward(policy, batch, Phase.of(batch))
        assert all(value.grad is not None and value.grad.any() for value in policy.parameters())
        assert all(value.grad is None for value in policy.model.parameters())  # of adapters, the masters have it

    def test_it_keeps_less_than_training_all_weights(self):
        kept = {}
        for case in ("all weights", "adapter", "float32 adapter"):
            policy = with_lora(torch.bfloat16, torch.float32 if case == "float32 adapter" else None)
            if case == "all weights":
                policy = Policy(policy.model.merge_and_unload().requires_grad_(True), Words())
            own = {value.untyped_storage().data_ptr() for value in policy.model.parameters()}
            found = {}

            def keep(x, found=found):
                found[x.untyped_storage().data_ptr()] = x
                return x

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                policy.hidden(some_responses())
            kept[case] = sum(x.untyped_storage().nbytes() for place, x in found.items() if place not in own)
        assert kept["adapter"] < 1.02 * kept["all weights"]
        assert kept["float32 adapter"] > 1.3 * kept["adapter"]  # peft's default

    def test_in_bfloat16_a_gradient_errs_as_with_a_float32_adapter(self):
        half, wide, full = (with_lora(torch.bfloat16, own) for own in (None, torch.float32, torch.float32))
        full = exact(full)
        for policy in (wide, full):
            for value, rounded in zip(trained(policy).values(), trained(half).values(), strict=True):
                value.data.copy_(rounded)
        ratios = []
        for seed in range(48):
            batch, kept = some_responses(seed), []
            for policy in (half, wide, full):
                backward(policy, batch, Phase.of(batch), UpdatePlan())
                kept.append(torch.cat([value.grad.flatten().double() for value in policy.parameters()]))
            ratios.append(float((kept[0] - kept[2]).norm() / (kept[1] - kept[2]).norm()))
        assert math.exp(sum(map(math.log, ratios)) / len(ratios)) < 1.3


@pytest.fixture
def quantised(monkeypatch):
    """Every model says that its weights are quantised."""
    load = loading._load_weights

    def marked(*args):
        model = load(*args)
        model.is_quantized = True
        return model

    monkeypatch.setattr(loading, "_load_weights", marked)


@pytest.mark.usefixtures("quantised")
def test_quantised_weights_are_trained_only_through_an_adapter(tmp_path):
    config = load("tiny", ["device=cpu", f"run={tmp_path}"])
    with pytest.raises(ModelError, match=r"model=embedded: its weights are quantised.* lora\.rank=16"):
        build(config, RunFolder.create(config.run, {}))


@pytest.mark.usefixtures("quantised")
def test_quantised_weights_are_refused_on_a_cpu():
    """There a layer of bitsandbytes 0.50 that is not in training mode is a constant for autograd."""
    with pytest.raises(ModelError, match=r"embedded: its weights are quantised.* train it on CUDA"):
        loading.load_policy("embedded", device="cpu", lora=LoraConfig(rank=2))


def test_adapters_are_saved_as_the_policy_uses_them(tmp_path):
    policy = with_lora(torch.bfloat16)
    with torch.no_grad():
        for master in policy.parameters():
            master.mul_(1.01)
    policy.master_weights.publish()
    policy.model.save_pretrained(tmp_path)
    saved = peft.load_peft_weights(str(tmp_path), device="cpu")
    assert Path(tmp_path / "adapter_config.json").exists()
    values = {name.replace(".default", ""): value for name, value in policy.model.named_parameters() if "lora" in name}
    assert values.keys() == saved.keys()
    assert all(torch.equal(value, saved[name]) for name, value in values.items())


def test_adapters_are_loaded_where_their_model_is(tmp_path, monkeypatch):
    model, tokenizer = loading.load_model("embedded", device="cpu", lora=LoraConfig(rank=4))
    Policy(model, tokenizer).save(tmp_path)
    monkeypatch.setattr("peft.peft_model.infer_device", lambda: "cuda")  # as on a machine with a GPU
    merged, _ = loading.load_model(str(tmp_path), device="cpu")
    assert merged.device.type == "cpu"
