"""Samplers whose arithmetic is not the policy's: what the trainer makes of their log-probabilities. Without vLLM."""

import math
import re
from dataclasses import replace

import peft
import pytest
import torch

from poise import trainer
from poise._lib.errors import how_to_install
from poise.batch import TokenBatch
from poise.models.loading import load_policy
from poise.models.policy import ModelError, Policy
from poise.objective import Settings
from poise.runs.folder import RunFolder
from poise.sampling.choose import choose
from poise.sampling.draws import streams
from poise.sampling.native.engine import NativeEngine
from poise.sampling.vllm_engine import weights
from poise.training import building
from poise.training.config.schema import load
from poise.training.steps import mismatch_metrics
from support.tiny_models import Words, prompts, responses, tiny


class Off:
    """An engine whose own log-probabilities are off by a constant."""

    def __init__(self, policy, gap):
        self.inner, self.gap = NativeEngine(policy), gap  # what the trainer takes otherwise

    def sample(self, *args, **kwargs):
        return [replace(each, sampler_logp=each.logp - self.gap) for each in self.inner.sample(*args, **kwargs)]


def first_step(tmp_path, monkeypatch, name, gap, *more):
    if gap is not None:
        monkeypatch.setattr(building, "choose", lambda policy, *_, **__: Off(policy, gap))
    settings = ["prompts=2", "group=4", "task.people=2", "steps=1", "evaluation=off", "rollout.max_tokens=48"]
    trainer.train(load("tiny", [*settings, "device=cpu", f"run={tmp_path / name}", *more]), quiet=True)
    return RunFolder.open(tmp_path / name, resume=False).metrics()[0]


def test_the_policy_term_is_weighted_by_truncated_importance(tmp_path, monkeypatch):
    plain = first_step(tmp_path, monkeypatch, "plain", None)
    assert plain["optim/grad_norm"] > 0
    assert not [name for name in plain if "mismatch" in name]
    for name, gap, more, factor, cut in [
        ("less", -math.log(1.5), [], 1 / 1.5, 0.0),
        ("cut", math.log(3.0), [], 2.0, 1.0),
        ("lower", math.log(1.5), ["objective.importance_cap=1.2"], 1.2, 1.0),
        ("never", math.log(3.0), ["objective.importance_cap=null"], 1.0, 0.0),
        ("again", math.log(1.5), ["rollout.old_logp=recomputed"], 1.5, 0.0),  # the policy's are there already
    ]:
        line = first_step(tmp_path, monkeypatch, name, gap, *more)
        assert line["optim/grad_norm"] == pytest.approx(factor * plain["optim/grad_norm"], rel=1e-4), name
        assert line["rollout/importance"] == pytest.approx(math.exp(gap), rel=1e-5)
        assert line["rollout/mismatch"] == pytest.approx(abs(gap), abs=1e-6)
        assert line["rollout/mismatch_max"] == pytest.approx(abs(gap), abs=1e-5)
        assert line["rollout/mismatch_kl"] == pytest.approx(math.exp(gap) - 1 - gap, abs=1e-5)
        assert line["rollout/truncated"] == cut


def test_mismatch_is_measured_token_by_token_and_inside_the_mask():
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    gap = torch.tensor([[0.0, 1.0, -1.0], [0.1, 50.0, torch.nan]], dtype=torch.float64)
    old = torch.full((2, 3), -2.0, dtype=torch.float64)
    found = mismatch_metrics(TokenBatch(old, mask, torch.ones(2), sampler_logp=old - gap), Settings(importance_cap=2.0))
    inside = [0.0, 1.0, -1.0, 0.1]
    assert found == pytest.approx(
        {
            "rollout/importance": sum(map(math.exp, inside)) / 4,
            "rollout/truncated": 0.25,
            "rollout/mismatch": 2.1 / 4,
            "rollout/mismatch_p999": 1.0,
            "rollout/mismatch_max": 1.0,
            "rollout/mismatch_kl": sum(math.exp(x) - 1 - x for x in inside) / 4,
        }
    )


def test_rows_take_the_samplers_log_probabilities_along():
    out = responses(prompts(2), [[3, 1], [2, 4]])
    assert out.rows([2, 0]).sampler_logp is None
    out = replace(out, sampler_logp=torch.arange(16.0).view(4, 4))
    assert out.rows([2, 0]).sampler_logp.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    assert out.rows(slice(1, 2)).sampler_logp.tolist() == [[4, 5, 6, 7]]


def test_seeds_of_sequences_are_unrelated():
    seeds = torch.stack([streams(seed, torch.arange(1000)) for seed in (0, 1, 2**63 - 1)])
    assert len(seeds.unique()) == 3000
    assert torch.equal(streams(1, torch.tensor([7])), seeds[1, 7:8])


class TestVllmMissing:
    @pytest.fixture(autouse=True)
    def _not_installed(self, monkeypatch):
        monkeypatch.setattr("poise.sampling.vllm_engine.find_spec", lambda _: None)

    def test_it_says_what_to_install(self):
        with pytest.raises(ModelError, match=re.escape(f"vLLM is not installed; {how_to_install('vllm')}")):
            choose(tiny("llama"), "vllm")

    def test_no_run_folder_is_left(self, tmp_path):
        with pytest.raises(ModelError, match="not installed"):
            trainer.train(load("tiny", ["rollout.engine=vllm", "device=cpu", f"run={tmp_path / 'run'}"]), quiet=True)
        assert not (tmp_path / "run").exists()


def test_starting_vllm_is_announced(monkeypatch):
    monkeypatch.setattr(
        "poise.sampling.vllm_engine.find_spec", lambda _: type("Spec", (), {"origin": "vllm/__init__.py"})
    )
    said = []
    choose(tiny("llama"), "vllm", note=said.append, memory=0.25)
    assert len(said) == 1
    assert "starts at the first prompts and takes up to 25% of the device's memory (rollout.vllm_memory)" in said[0]


@pytest.mark.parametrize("name", ["llama", "qwen2"])  # with a tied head, and with one of its own and biases
class TestWeightsToPush:
    def test_have_the_names_and_values_of_a_checkpoint(self, name):
        policy = tiny(name)
        given = dict(weights(policy))
        expected = policy.model.state_dict()
        assert given.keys() == expected.keys()
        assert all(torch.equal(value, expected[key]) for key, value in given.items())

    def test_have_adapters_merged(self, name):
        model = peft.get_peft_model(
            tiny(name).model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear")
        )
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "lora_B" in key:
                    parameter.normal_()
        given = {key: value.clone() for key, value in weights(Policy(model.eval(), Words()))}
        merged = model.merge_and_unload().state_dict()
        assert given.keys() == merged.keys()
        for key, value in given.items():
            torch.testing.assert_close(value, merged[key])


def test_the_embedded_models_weights_are_all_there():
    policy = load_policy("embedded", device="cpu")
    assert dict(weights(policy)).keys() == policy.model.state_dict().keys()
