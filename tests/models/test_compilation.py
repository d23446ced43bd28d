"""When the layers are compiled."""

import pytest

from poise.config.schema import load
from poise.models import compilation
from poise.models.compilation import Work, compiling_pays
from poise.models.policy import load_policy
from support.tiny_models import tiny

MUCH = Work(10**14, 10**9)


@pytest.fixture
def on_cuda(monkeypatch):
    monkeypatch.setattr(compilation, "can_compile", lambda _: True)


def of(layers, width):
    model = tiny("llama").model
    model.config.num_hidden_layers, model.config.hidden_size = layers, width
    return model


def test_never_on_a_cpu_by_itself():
    assert not compiling_pays(tiny("llama").model, MUCH)
    assert load_policy("embedded", device="cpu", compiled=None, work=MUCH).trunk.layers[0].forward.__name__ == "forward"


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("name", ["llama", "gemma3", "granite"])
def test_on_cuda_if_the_run_is_long_enough(name):
    model = tiny(name).model
    assert not compiling_pays(model, Work(10**6, 10**3))
    assert compiling_pays(model, Work(10**12, 10**3))
    assert compiling_pays(model, Work(10**6, 10**7))


@pytest.mark.usefixtures("on_cuda")
def test_what_the_docs_say_of_models_and_steps():
    """docs/performance.md: steps of 512 × 256 tokens."""
    steps = {
        width: next(n for n in range(1, 1000) if compiling_pays(of(layers, width), Work(n * 512 * 256, n * 256)))
        for layers, width in ((30, 576), (28, 1536))
    }
    assert steps == {576: 23, 1536: 15}


@pytest.mark.usefixtures("on_cuda")
def test_the_demo_is_too_short():
    assert not compiling_pays(load_policy("embedded", device="cpu").model, load("demo").work)


def test_the_work_of_a_run():
    given = ["prompts=4", "group=8", "steps=10", "rollout.max_tokens=100"]
    assert load("demo", given).work == (32_000, 1000)
    assert load("demo", [*given, "budget=20000"]).work == (20_000, 1000)
    assert load("demo", [*given, "rollout.max_episode_tokens=200"]).work == (64_000, 2000)
