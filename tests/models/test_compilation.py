"""When the layers are compiled."""

from types import SimpleNamespace

import pytest
import torch

from poise.config.schema import load
from poise.models import compilation, policy
from poise.models.compilation import FUSED, Work, compiling_pays
from poise.models.policy import load_policy
from poise.runs.folder import RunFolder
from poise.trainer import Trainer
from support.pages import ROOT
from support.tiny_models import tiny

MUCH = Work(10**14, 10**9)
PAGE = " ".join((ROOT / "docs/performance.md").read_text().split())


@pytest.fixture
def on_cuda(monkeypatch):
    monkeypatch.setattr(compilation, "can_compile", lambda _: True)


@pytest.fixture
def compiled(monkeypatch):
    """The trunks that were compiled."""
    found = []
    monkeypatch.setattr(policy, "compile_layers", found.append)
    return found


def of(layers, width):
    model = tiny("llama").model
    model.config.num_hidden_layers, model.config.hidden_size = layers, width
    return model


def test_never_on_a_cpu_by_itself(compiled):
    for work in (MUCH, None):
        load_policy("embedded", device="cpu", compiled=None, work=work)
    assert not compiled
    loaded = load_policy("embedded", device="cpu", compiled=True)
    assert compiled == [loaded.trunk]


@pytest.mark.usefixtures("on_cuda")
def test_a_policy_is_compiled_if_its_work_pays(compiled):
    load_policy("embedded", device="cpu", compiled=None, work=Work(10**6, 10**3))
    assert not compiled
    load_policy("embedded", device="cpu", compiled=None, work=MUCH)
    assert len(compiled) == 1


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("name", ["llama", "gemma3", "granite"])
def test_on_cuda_if_the_run_is_long_enough(name):
    model = tiny(name).model
    assert not compiling_pays(model, Work(10**6, 10**3))
    assert compiling_pays(model, Work(10**12, 10**3))
    assert compiling_pays(model, Work(10**6, 10**7)) == (name not in FUSED)  # their decoding gains nothing


@pytest.mark.usefixtures("on_cuda")
def test_the_decoding_of_an_adapter_gains():
    model = tiny("llama").model
    model.peft_config = {}
    assert compiling_pays(model, Work(10**6, 10**7))


def test_a_model_of_unknown_size():
    config = SimpleNamespace(model_type="other")
    config.get_text_config = lambda: config
    assert not compiling_pays(SimpleNamespace(config=config, device=torch.device("cpu")), MUCH)


@pytest.mark.usefixtures("on_cuda")
def test_what_the_docs_say_of_models_and_steps():
    first, second = (
        next(n for n in range(1, 1000) if compiling_pays(of(*size), Work(n * 512 * 256, n * 256)))
        for size in ((30, 576), (28, 1536))
    )
    assert f"135M earns that back in {first} steps of 512 × 256 tokens, 1.5B in {second}" in PAGE
    assert not compiling_pays(load_policy("embedded", device="cpu").model, load("demo", ["steps=10000"]).work())


def test_the_work_of_a_run():
    given = ["prompts=4", "group=8", "steps=10", "rollout.max_tokens=100"]
    assert load("demo", given).work() == (32_000, 1000)
    assert load("demo", [*given, "budget=20000"]).work() == (20_000, 625)
    assert load("demo", [*given, "rollout.max_episode_tokens=200"]).work() == (64_000, 2000)
    assert load("demo", given).work(9, 20_000) == (3200, 100)
    assert load("demo", [*given, "budget=20000"]).work(5, 19_990) == (32, 1)


def test_a_resumed_run_counts_the_steps_that_are_left(monkeypatch, tmp_path):
    small = ["steps=100", "prompts=2", "group=2", "rollout.max_tokens=50", "device=cpu", f"run={tmp_path / 'run'}"]
    config = load("demo", [*small, "algorithm=rltr"])  # its second model decodes, and is not trained
    folder = RunFolder.create(config.run, config.model_dump(mode="json"))
    work = []
    monkeypatch.setattr(policy, "compiling_pays", lambda _, given: work.append(given))
    Trainer(config, folder)
    folder.save_checkpoint(95, lambda _: None)
    Trainer(config, folder)
    assert work == [(20_000, 5000), (0, 5000), (1000, 250), (0, 250)]
