"""Models that need care: what is served is right, and what is not served is refused at load, with a sentence."""

import os
import re
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from poise.models import load_checks, rope
from poise.models.loading import load_policy
from poise.models.policy import ModelError, Policy
from poise.sampling.cached_engine import CachedEngine
from poise.sampling.choose import choose
from poise.sampling.native.engine import NativeEngine, supports
from support.tiny_models import ARCHITECTURES, COMMON, Words, prompts, responses, sample

ORIGINAL = 16  # tokens up to which a rotary embedding does not change
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [4.0, 6.0, 8.0, 9.0], "original_max_position_embeddings": ORIGINAL, "factor": 16.0,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
CONFIGS = {
    "longrope": lambda: transformers.Phi3Config(
        **COMMON, rope_parameters=LONGROPE, original_max_position_embeddings=ORIGINAL
    ),
    "dynamic": lambda: transformers.LlamaConfig(
        **COMMON | {"max_position_embeddings": ORIGINAL}, rope_parameters=DYNAMIC
    ),
    "by layer": lambda: transformers.Gemma3TextConfig(
        **COMMON | {"max_position_embeddings": ORIGINAL}, sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention": DYNAMIC
        },
    ),
    "phimoe": lambda: transformers.PhimoeConfig(**COMMON, sliding_window=8, num_local_experts=4),
    "alibi": lambda: transformers.FalconConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True, eos_token_id=5
    ),
    "jetmoe": lambda: transformers.JetMoeConfig(**COMMON, kv_channels=8, num_local_experts=4),
}  # fmt: skip
CHANGING = ["longrope", "dynamic", "by layer"]  # with length


def build(name):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


@torch.no_grad()
def plain(model, prompt, tokens):
    """Log-probabilities of a response by itself, through the model's own forward."""
    logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def assert_as_alone(model, batch, logp):
    for (prompt, length, _), tokens, found in zip(batch.extents, batch.targets, logp, strict=True):
        expected = plain(model, list(prompt.tokens), tokens[:length].tolist())
        torch.testing.assert_close(found[:length], expected, atol=1e-4, rtol=0)


MIXED = [[3, 40], [5], [25, 2]]  # lengths of responses on both sides of windows and original lengths


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probabilities_and_samples_are_those_of_each_response_alone(name):
    policy = Policy(build(name), Words(), longest=64)
    batch = responses(prompts(3), MIXED)
    with torch.no_grad():
        assert_as_alone(policy.model, batch, policy.score(batch)[0])
    for choice in ("auto", "transformers"):
        drawn = [
            sample(
                choose(policy, choice, batch, note=lambda _: None),
                prompts(3),
                2,
                max_tokens=40,
                temperature=1.0,
                seed=3,
            )
            for batch in (0, 2)
        ]
        assert_as_alone(policy.model, drawn[0].batch, drawn[0].logp)
        assert torch.equal(drawn[1].tokens, drawn[0].tokens)
        torch.testing.assert_close(drawn[1].logp, drawn[0].logp, atol=1e-4, rtol=0)


class TestRotaryEmbeddingsThatChangeWithLength:
    @pytest.mark.parametrize("name", CHANGING)
    def test_up_to_the_original_length_they_are_transformers(self, name):
        policy, untouched = Policy(build(name), Words()), build(name)
        assert policy.length_limit == ORIGINAL
        batch = responses(prompts(3), [[2, 1], [3], [2, 2]])
        with torch.no_grad():
            assert_as_alone(untouched, batch, policy.score(batch)[0])

    @pytest.mark.parametrize("name", CHANGING)
    def test_a_sequence_of_the_length_they_were_fixed_for_is_transformers(self, name):
        prompt = prompts(1)[0]
        batch = responses([prompt], [[50]])
        policy, untouched = Policy(build(name), Words(), longest=len(prompt) + 49), build(name)
        policy.length_limit += 1  # the last token is predicted, not read
        with torch.no_grad():
            assert_as_alone(untouched, batch, policy.score(batch)[0][:, :50])
        short = Policy(build(name), Words())
        short.length_limit = None
        with torch.no_grad(), pytest.raises(AssertionError):  # or the test could not fail
            assert_as_alone(untouched, batch, short.score(batch)[0])

    @pytest.mark.parametrize("name", CHANGING)
    def test_longer_ones_are_refused(self, name):
        policy = Policy(build(name), Words())
        said = "may have 54 tokens together.* fixed at load for 16.* longest=54"
        with pytest.raises(ModelError, match=said):
            policy.score(responses([[7, 8, 9, 10]], [[50]]))
        for engine in (NativeEngine, CachedEngine):
            with pytest.raises(ModelError, match=said):
                sample(engine(policy), [[7, 8, 9, 10]], 1, max_tokens=50, temperature=1.0, seed=0)

    @pytest.mark.parametrize("name", CHANGING)
    def test_a_model_may_be_fixed_again(self, name):
        model = build(name)
        batch = responses(
            [[7, 8, 9, 10]],
            [
                [50],
            ],
        )
        with torch.no_grad():
            first = Policy(model, Words(), longest=60).score(batch)[0]
            assert Policy(model, Words()).length_limit == ORIGINAL
            assert torch.equal(Policy(model, Words(), longest=60).score(batch)[0], first)

    def test_an_unknown_kind_is_refused(self):
        model = build("dynamic")
        types = type(model.model.rotary_emb)
        model.model.rotary_emb.rope_type = "default"
        original = types.forward

        class Own(types):
            def forward(self, x, position_ids):
                cos, sin = original(self, x, position_ids)
                return cos * position_ids.max().log1p(), sin

        model.model.rotary_emb.__class__ = Own
        assert rope.varying(model) == "model.rotary_emb"
        with pytest.raises(ModelError, match=r"rotary_emb\) changes with the longest sequence"):
            Policy(model, Words())

    def test_the_user_is_told(self):
        said = []
        choose(Policy(build("longrope"), Words(), longest=64), note=said.append)
        assert len(said) == 1
        assert "64 tokens" in said[0]


class Capped(transformers.LlamaForCausalLM):
    """A cap on the logits that no field of the configuration tells of."""

    cap = 15.0

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = self.cap * torch.tanh(out.logits / self.cap)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", [15.0, 100.0])
def test_a_cap_that_poise_does_not_know_is_found_out_on_small_logits(cap, dtype):
    torch.manual_seed(0)
    model = Capped(ARCHITECTURES["llama"]()).eval()
    assert model(input_ids=torch.arange(1, 5)[None]).logits.abs().max() < 1  # the cap changes nothing there
    model.cap = cap
    with pytest.raises(ModelError, match="between trunk and head"):
        Policy(model.to(dtype), Words())


class TestWindows:
    def test_one_that_only_the_mask_knows_is_not_packed(self):
        for window in (8, 4096):
            config = transformers.PhimoeConfig(**COMMON, sliding_window=window, num_local_experts=4)
            model = transformers.AutoModelForCausalLM.from_config(config).eval()
            assert not Policy(model, Words()).packed
            assert model.config.sliding_window == window  # shortened for the trial alone

    def test_one_that_reaches_the_attention_is(self):
        config = transformers.Gemma3TextConfig(**COMMON, sliding_window=4096, layer_types=["sliding_attention"] * 3)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        assert Policy(model, Words()).packed
        assert {layer.self_attn.sliding_window for layer in model.model.layers} == {4096}

    def test_they_are_put_back_after_an_error(self):
        model = build("phimoe")
        with pytest.raises(IndexError), load_checks.short_windows(model):
            [][model.config.sliding_window]
        assert model.config.sliding_window == 8


def test_jetmoe_decodes_a_group_of_one_prompt():
    policy = Policy(build("jetmoe"), Words())
    assert supports(policy)
    out = sample(NativeEngine(policy), [[7, 8, 9]], 2, max_tokens=9, temperature=1.0, seed=0)
    assert_as_alone(policy.model, out.batch, out.logp)


def test_a_cache_that_gives_other_probabilities_is_refused(monkeypatch):
    policy = Policy(build("phimoe"), Words())
    right = CachedEngine.sample

    def off(self, *args, **kwargs):
        return [replace(each, logp=each.logp * 1.01) for each in right(self, *args, **kwargs)]

    monkeypatch.setattr(CachedEngine, "sample", off)
    with pytest.raises(ModelError, match=r"Phimoe.*cache"):
        choose(policy, note=lambda _: None)


class TestFiles:
    @pytest.fixture
    def folder(self, tmp_path):
        load_policy("embedded", device="cpu").save(tmp_path)
        return tmp_path

    def change(self, folder, how):
        file = folder / "model.safetensors"
        weights = load_file(file)
        how(weights)
        save_file(weights, file, {"format": "pt"})

    def test_missing_layers_are_refused_by_name(self, folder):
        def drop(weights):
            for name in [name for name in weights if ".layers.1." in name]:
                del weights[name]

        self.change(folder, drop)
        with pytest.raises(ModelError, match=r"no weights for model\.layers\.1\.\S+, .* and \d+ more, which would be"):
            load_policy(str(folder), device="cpu")

    def test_more_layers_than_the_files_have(self, folder):
        config = folder / "config.json"
        config.write_text(re.sub(r'"num_hidden_layers": \d+', '"num_hidden_layers": 9', config.read_text()))
        with pytest.raises(ModelError, match=r"no weights for model\.layers\.4\S+, .* and 42 more"):
            load_policy(str(folder), device="cpu")

    def test_a_number_of_layers_that_no_model_has(self, folder):
        config = folder / "config.json"
        config.write_text(re.sub(r'"num_hidden_layers": \d+', '"num_hidden_layers": 10000000', config.read_text()))
        with pytest.raises(ModelError, match="asks for 10,000,000 layers, more than 10,000; correct it"):
            load_policy(str(folder), device="cpu")

    def test_weights_of_another_shape(self, folder):
        self.change(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(3)}))
        with pytest.raises(ModelError, match="cannot be loaded"):
            load_policy(str(folder), device="cpu")

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_weights_that_are_no_numbers(self, folder, value):
        self.change(folder, lambda weights: weights["model.layers.0.mlp.up_proj.weight"][2, 3].fill_(value))
        with pytest.raises(ModelError, match=r"NaN or infinite weights in model\.layers\.0\.mlp\.up_proj\.weight"):
            load_policy(str(folder), device="cpu")

    def test_a_folder_without_a_tokenizer(self, folder):
        for file in folder.glob("tokenizer*"):
            file.unlink()
        with pytest.raises(ModelError, match=r"has no tokenizer.*save them with save_pretrained"):
            load_policy(str(folder), device="cpu")

    def test_weights_that_are_cut_off(self, folder):
        file = folder / "model.safetensors"
        for size in (100_000, 4, 0):
            os.truncate(file, size)
            with pytest.raises(ModelError, match="the model cannot be loaded"):
                load_policy(str(folder), device="cpu")

    def test_a_tokenizer_with_more_tokens_than_the_model(self, folder):
        policy = load_policy("embedded", device="cpu")
        policy.model.resize_token_embeddings(200)
        policy.model.save_pretrained(folder)
        with pytest.raises(ModelError, match="its tokenizer has 792 tokens, but the model only 200"):
            load_policy(str(folder), device="cpu")

    def test_a_token_added_to_the_tokenizer_alone(self, folder):
        policy = load_policy("embedded", device="cpu")
        policy.tokenizer.add_tokens(["<new>"])
        policy.tokenizer.save_pretrained(folder)
        policy = load_policy(str(folder), device="cpu")  # the token may never be used
        assert policy.encode("old")
        with pytest.raises(ModelError, match=r"token 796 of the tokenizer \('<new>'\), but the model has only 796"):
            policy.encode("<new>")

    @pytest.mark.parametrize("tied", [True, False])
    def test_tied_weights_are_not_missing(self, tied, tmp_path):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**COMMON | {"vocab_size": 796}, tie_word_embeddings=tied)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        load_policy("embedded", device="cpu").tokenizer.save_pretrained(tmp_path)
        assert load_policy(str(tmp_path), device="cpu").packed

    def test_an_adapter_that_is_no_number_or_incomplete(self, tmp_path):
        import peft

        policy = load_policy("embedded", device="cpu")
        adapted = peft.get_peft_model(policy.model, peft.LoraConfig(task_type="CAUSAL_LM", r=2))
        with torch.no_grad():
            next(p for n, p in adapted.named_parameters() if "lora_B" in n).fill_(torch.nan)
        adapted.save_pretrained(tmp_path)
        policy.tokenizer.save_pretrained(tmp_path)
        with pytest.raises(ModelError, match=r"NaN or infinite weights in \S+layers\.0\S+lora_B"):
            load_policy(str(tmp_path), device="cpu")
        file = tmp_path / "adapter_model.safetensors"
        weights = {name: value for name, value in load_file(file).items() if "layers.0" not in name}
        save_file(weights, file, {"format": "pt"})
        with pytest.raises(ModelError, match=r"no weights for \S+layers\.0"):
            load_policy(str(tmp_path), device="cpu")


@pytest.mark.parametrize(
    ("device", "why"),
    [
        ("mps", "Apple's GPUs"),
        ("meta", "this torch cannot compute there"),
        ("cuda:99", "CUDA device"),
        ("gpu", "must be auto, or a device of"),
    ],
)
def test_a_device_that_cannot_compute(device, why):
    with pytest.raises(ModelError, match=f"device '?{device}'?: .*{why}"):
        load_policy("embedded", device=device)


class TestHub:
    """A name that is no folder is asked of the hub once; transformers would ask for a minute."""

    @pytest.fixture(autouse=True)
    def _online(self, monkeypatch):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    @pytest.mark.parametrize("name", ["models/mine", "not a model"])
    def test_it_cannot_be_reached(self, name, monkeypatch):
        class Session:
            def head(self, *_, **__):
                raise OSError("no such host")

        monkeypatch.setattr("huggingface_hub.get_session", Session)
        monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: pytest.fail("asked again"))
        with pytest.raises(ModelError, match=rf"{name}: there is no such folder here, .* the hub cannot be"):
            load_policy(name, device="cpu")

    def test_a_model_in_the_cache_is_not_asked_for(self, monkeypatch):
        from poise.models.location import check_hub

        monkeypatch.setattr("huggingface_hub.get_session", lambda: pytest.fail("asked"))
        monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: "/cache/config.json")
        check_hub("org/name")
