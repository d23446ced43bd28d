"""The memory that a model takes, forecast from its configuration, against what training it takes."""

from __future__ import annotations

import pytest
import torch

from poise.models import footprint
from poise.models.footprint import Footprint
from poise.models.loading import load_policy
from poise.models.location import ModelError
from poise.models.master_weights import MasterWeights
from poise.runs.folder import RunFolder
from poise.training import config as configs
from poise.training.building import build
from poise.training.config.groups import LoraConfig
from support.tiny_models import ARCHITECTURES, tiny


def held(policy):
    """Bytes of weights, and of masters, gradients and moments, after a step of the optimizer."""
    masters = MasterWeights(policy.model)
    optimizer = torch.optim.AdamW(masters.parameters.values())
    masters.serve(optimizer)
    ids = torch.arange(6)[None]
    policy.model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    trained = masters.parameters.values()
    moments = [x for state in optimizer.state.values() for x in state.values() if x.dim()]
    weights = sum(x.nbytes for x in policy.model.parameters())
    training = list(masters.masters.values()) + [x.grad for x in trained] + moments
    return weights, sum(x.nbytes for x in training)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_is_what_training_holds(name, dtype, tmp_path):
    policy = tiny(name, dtype=getattr(torch, dtype))
    policy.model.save_pretrained(tmp_path)
    least = Footprint.of(str(tmp_path), device="cpu", dtype=dtype)
    assert (least.weights, least.training) == held(policy)
    assert least.parameters == sum(x.numel() for x in policy.model.parameters())
    assert least.total == least.weights + least.training


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_needs_little_and_no_copy(dtype):
    lora = LoraConfig(rank=4)
    least = Footprint.of("embedded", device="cpu", dtype=dtype, lora=lora, copies=True)
    assert (least.weights, least.training) == held(load_policy("embedded", dtype=dtype, lora=lora))
    assert least.copy == 0


def test_a_copy_of_the_starting_weights_counts():
    plain, copied = (Footprint.of("embedded", device="cpu", dtype="auto", copies=copies) for copies in (False, True))
    assert copied.total == plain.total + plain.weights


def test_a_device_that_is_too_small_is_refused_before_weights_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(footprint, "total_bytes", lambda _: 29_000_000)
    monkeypatch.setattr("poise.training.building.load_policy", lambda *_, **__: pytest.fail("weights were loaded"))
    config = configs.load("tiny", [f"run={tmp_path / 'run'}", "objective.kl_coef=0.01", "device=cpu"])
    folder = RunFolder.create(tmp_path / "run", {})
    with pytest.raises(ModelError, match=r"model=embedded: training takes at least 29\.2 MB.*kl_coef=0") as raised:
        build(config, folder)
    assert "lora.rank=16" in str(raised.value)
    assert "cpu has 29 MB" in str(raised.value)


def test_a_device_that_suffices_or_does_not_tell_is_taken(monkeypatch):
    least = Footprint.of("embedded", device="cpu", dtype="float32")
    for room in (least.total, 0):
        monkeypatch.setattr(footprint, "total_bytes", lambda _, room=room: room)
        least.check("embedded", "cpu")
    monkeypatch.setattr(footprint, "total_bytes", lambda _: least.total - 1)
    with pytest.raises(ModelError, match="choose a smaller model"):
        least.check("embedded", "cpu")


def test_quantised_weights_are_not_forecast(tmp_path):
    config = ARCHITECTURES["llama"]()
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    config.save_pretrained(tmp_path)
    assert Footprint.of(str(tmp_path), device="cpu", dtype="auto") is None


def test_attention_code_of_a_repository_is_not_fetched(tmp_path):
    config = ARCHITECTURES["llama"]()
    config.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace("{", '{"attn_implementation": "someone/kernels",', 1))
    with pytest.raises(ModelError, match="third-party code"):
        Footprint.of(str(tmp_path), device="cpu", dtype="auto")
