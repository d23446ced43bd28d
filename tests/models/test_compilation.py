"""When the layers are compiled."""

from types import SimpleNamespace

import pytest
import torch

from poise.models import layers, loading, policy
from poise.models.layers import compiling_pays
from poise.models.loading import load_policy
from poise.runs.checkpoint_files import CheckpointFiles
from poise.runs.folder import RunFolder
from poise.trainer import Trainer
from poise.training.config.schema import load
from support.pages import ROOT
from support.tiny_models import tiny

MUCH = 1e14  # tokens
PAGE = " ".join((ROOT / "docs/performance.md").read_text().split())


@pytest.fixture
def on_cuda(monkeypatch):
    monkeypatch.setattr(layers, "can_compile", lambda _: True)


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
    load_policy("embedded", device="cpu", compiled=None)
    assert not compiled
    loaded = load_policy("embedded", device="cpu", compiled=True)
    assert compiled == [loaded.trunk]


@pytest.mark.usefixtures("on_cuda")
def test_a_policy_is_compiled_if_it_is_trained_on_enough_tokens(compiled):
    load_policy("embedded", device="cpu", compiled=None, tokens=1e6)
    assert not compiled
    load_policy("embedded", device="cpu", compiled=None, tokens=MUCH)
    assert len(compiled) == 1


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("tokens", [1e6, MUCH])
def test_a_model_of_unknown_size_is_compiled(tokens):
    config = SimpleNamespace(hidden_size=None)
    config.get_text_config = lambda: config
    assert compiling_pays(SimpleNamespace(config=config, device=torch.device("cuda")), tokens)


@pytest.mark.usefixtures("on_cuda")
def test_what_the_docs_say_of_models_and_steps():
    first, second = (
        next(n for n in range(1, 1000) if compiling_pays(model, n * 512 * 256)) for model in (of(30, 576), of(28, 1536))
    )
    assert f"after {first} steps of 512 × 256 tokens at 135M, after {second} at 1.5B" in PAGE
    assert not compiling_pays(load_policy("embedded", device="cpu").model, load("tiny", ["steps=10000"]).tokens_left())


def test_the_tokens_that_are_left_of_a_run():
    given = ["prompts=4", "group=8", "steps=10", "rollout.max_tokens=100"]
    assert load("tiny", given).tokens_left() == 32_000
    assert load("tiny", [*given, "budget=20000"]).tokens_left() == 20_000
    assert load("tiny", [*given, "rollout.max_episode_tokens=200"]).tokens_left() == 64_000
    assert load("tiny", given).tokens_left(9, 20_000) == 3200
    assert load("tiny", [*given, "budget=20000"]).tokens_left(5, 19_990) == 10


def test_a_resumed_run_counts_the_steps_that_are_left(monkeypatch, tmp_path):
    small = ["steps=100", "prompts=2", "group=2", "rollout.max_tokens=50", "device=cpu", f"run={tmp_path / 'run'}"]
    config = load("tiny", [*small, "algorithm=rltr"])  # its second model is not trained
    folder = RunFolder.create(config.run, config.model_dump(mode="json"))
    left = []
    monkeypatch.setattr(loading, "compiling_pays", lambda _, tokens: left.append(tokens))
    Trainer(config, folder)
    with CheckpointFiles(folder).writing(95):
        pass
    Trainer(config, folder)
    assert left == [20_000, 1000]
