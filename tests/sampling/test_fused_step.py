"""A decoding step in few kernels: the parts that run on a CPU. tests/gpu/test_fused_step_gpu.py has the rest."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from poise.sampling.native import engine
from poise.sampling.native.engine import NativeEngine
from poise.sampling.native.fused_step import FusedStep, _window, fused_step
from poise.sampling.native.slot_cache import Rotation
from support.tiny_models import tiny

TESTS = Path(__file__).parents[1]


def test_the_rotation_is_that_of_transformers():
    g = torch.Generator().manual_seed(0)
    query, key = torch.randn(5, 4, 8, generator=g), torch.randn(5, 2, 8, generator=g)
    angles = torch.randn(5, 4, generator=g).repeat(1, 2)
    rotation = Rotation(angles.cos(), angles.sin())
    expected = apply_rotary_pos_emb(query[:, :, None], key[:, :, None], angles.cos()[:, None], angles.sin()[:, None])
    torch.testing.assert_close((rotation.query(query), rotation.key(key)), tuple(x[:, :, 0] for x in expected))


def test_the_norm_comes_before_the_rotation():
    policy = tiny("qwen3")
    attention = policy.trunk.layers[0].self_attn
    query = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))
    rotation = Rotation(query_weight=attention.q_norm.weight, key_weight=attention.k_norm.weight, epsilon=1e-6)
    torch.testing.assert_close(rotation.query(query), attention.q_norm(query))


def test_no_fused_step_without_triton_and_cuda():
    assert fused_step(tiny("llama")) is None


@pytest.fixture
def step(monkeypatch):
    """The fused step of a model, as on CUDA."""
    monkeypatch.setattr("poise.sampling.native.fused_step._device.suits_triton", lambda _: True)
    return fused_step


def test_other_layers_have_none(step):
    policy = tiny("llama")
    assert step(policy).usable
    assert step(tiny("granite")) is None
    del policy.trunk.layers[1].self_attn.q_proj  # of code that joins it with others, say
    assert step(policy) is None


def test_a_model_that_was_moved_has_to_be_joined_again(step):
    policy = tiny("llama")
    before = step(policy)
    policy.model.to(torch.float64)
    assert not before.usable
    assert step(policy).usable


@pytest.mark.usefixtures("step")
def test_a_step_that_has_passed_its_trial_is_not_tried_again(monkeypatch):
    tried = []
    monkeypatch.setattr(engine.graphs, "usable", lambda *_: True)
    monkeypatch.setattr(engine, "_decodes", lambda *given: tried.append(given) or True)
    policy = tiny("llama")
    found = engine._tried_step(policy)
    assert isinstance(found, FusedStep)
    assert engine.supports(policy)
    assert NativeEngine(policy).step is found
    assert len(tried) == 1
    policy.model.to(torch.float64)  # takes the weights apart
    assert engine._tried_step(policy) is not found
    assert len(tried) == 2


@pytest.mark.usefixtures("step")
@pytest.mark.parametrize("failure", [RuntimeError("no graph"), None])
def test_a_step_that_has_failed_its_trial_is_warned_of_once(monkeypatch, failure):
    def decodes(_, step=None):
        tried.append(step)
        if step is not None and failure:
            raise failure
        return step is None

    tried = []
    monkeypatch.setattr(engine.graphs, "usable", lambda *_: True)
    monkeypatch.setattr(engine, "_decodes", decodes)
    policy = tiny("llama")
    with pytest.warns(UserWarning, match="no graph" if failure else "its hidden states differ"):
        assert engine.supports(policy)
    assert NativeEngine(policy).step is None  # without another warning, which would be an error here
    assert [step is not None for step in tried] == [True, False]


def test_only_mistral_takes_its_window_from_the_configuration():
    llama, mistral = tiny("llama"), tiny("mistral")
    llama.base.config.sliding_window = 5
    assert _window(llama.trunk.layers[0].self_attn) is None
    assert _window(mistral.trunk.layers[0].self_attn) == mistral.base.config.sliding_window


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("script", "printed"),
    [
        ("interpreted_step.py", ["llama", "qwen2", "qwen3", "mistral", "smollm3", "biased", "adapter"]),
        ("interpreted_attention.py", ["equal"]),
    ],
)
def test_the_kernels_by_the_interpreter(script, printed):
    command = [sys.executable, str(Path(__file__).with_name(script))]
    place = os.pathsep.join([str(TESTS), *sys.path])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": place}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == printed
