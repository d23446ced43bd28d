"""When the layers are compiled."""

import pytest

from poise.config.schema import load
from poise.models import compilation
from poise.models.compilation import compiling_pays
from support.tiny_models import tiny


def test_never_on_a_cpu():
    assert not compiling_pays(tiny("llama").model, None)


@pytest.mark.parametrize("name", ["llama", "gemma3", "granite"])
def test_on_cuda_if_a_run_is_long_enough(name, monkeypatch):
    monkeypatch.setattr(compilation, "can_compile", lambda _: True)
    model = tiny(name).model
    assert compiling_pays(model, None)
    assert not compiling_pays(model, 10**6)
    assert compiling_pays(model, 10**12)


def test_it_pays_for_a_model_of_135_million_parameters_after_some_sixty_steps(monkeypatch):
    """docs/performance.md says so: 148 ms are saved for 65,280 tokens."""
    monkeypatch.setattr(compilation, "can_compile", lambda _: True)
    model = tiny("llama").model
    model.config.num_hidden_layers, model.config.hidden_size = 30, 576
    step = 512 * 256
    assert not compiling_pays(model, 50 * step)
    assert compiling_pays(model, 70 * step)


def test_the_tokens_of_a_run():
    given = ["prompts=4", "group=8", "steps=10", "rollout.max_tokens=100"]
    assert load("demo", given).most_tokens == 32_000
    assert load("demo", [*given, "budget=20000"]).most_tokens == 20_000
    assert load("demo", [*given, "rollout.max_episode_tokens=200"]).most_tokens == 64_000
