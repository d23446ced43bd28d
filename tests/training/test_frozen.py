"""Frozen models beside the policy: the weights they compute with, the memory they take, and what is said of them."""

import re
import shutil
from dataclasses import dataclass, field, replace

import pytest
import torch

from poise import trainer
from poise.models.layers import compile_layers
from poise.models.loading import add_adapter, load_policy
from poise.models.policy import ModelError, Policy
from poise.runs.folder import RunFolder
from poise.sampling.algorithms import Grpo
from poise.sampling.cached_engine import CachedEngine
from poise.sampling.native.engine import NativeEngine
from poise.training import frozen_models
from poise.training.config.groups import LoraConfig
from poise.training.frozen_models import FILE, Frozen, FrozenEngine, FrozenModels, starting_weights
from support.small_runs import SHORT, make, run
from support.tiny_models import Words, bytes_policy, sample, tiny

PROMPTS = [[2, 44, 86, 33], [2, 44, 86, 26, 69]]


def with_noise(policy):
    """A LoRA adapter that changes what the policy says."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    return policy


def draw(engine, **changes):
    found = sample(engine, PROMPTS, 3, max_tokens=20, seed=4, **changes)
    return found.tokens, found.logp


@pytest.mark.parametrize("engine", [NativeEngine, CachedEngine])
def test_without_its_adapter_the_policy_is_the_base_model_bit_for_bit(engine):
    policy = with_noise(load_policy("embedded", device="cpu", lora=LoraConfig(rank=4)))
    base, own = load_policy("embedded", device="cpu"), engine(policy)
    base_engine = FrozenEngine(Frozen(policy, adapter=True), engine(policy))
    trained = [parameter.requires_grad for parameter in policy.model.parameters()]
    before = draw(own)
    found = draw(base_engine)
    after = draw(own)
    assert all(map(torch.equal, found, draw(engine(base))))
    assert all(map(torch.equal, before, after))  # its own keys and values are untouched
    assert not torch.equal(before[1], found[1])
    assert [parameter.requires_grad for parameter in policy.model.parameters()] == trained


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # torch.compile has many for its own code
@pytest.mark.slow
def test_compiled_layers_see_that_the_adapter_is_disabled():
    policy, base = (tiny("llama") for _ in range(2))
    policy = with_noise(Policy(add_adapter(policy.model, LoraConfig(rank=4), 0), Words()))
    torch._dynamo.reset()
    compile_layers(policy.trunk, backend="eager")
    own = NativeEngine(policy)
    base_engine = FrozenEngine(Frozen(policy, adapter=True), NativeEngine(policy))
    before, found, after, expected = (draw(engine) for engine in (own, base_engine, own, NativeEngine(base)))
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-5)
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[0], found[0])


@dataclass(frozen=True)
class Asks(Grpo):
    """Wants frozen models."""

    models: dict = field(default_factory=lambda: {"receiver": "start"})


def build(tmp_path, *overrides, models=None, reference=False, folder=None):
    """The frozen models of a small run, its policy, and what is said of them."""
    config, said = make(tmp_path, *overrides), []
    policy = load_policy(config.model, device="cpu", lora=config.lora)
    algorithm = Asks(models=models or {"receiver": "start"})
    return FrozenModels(config, policy, algorithm, said.append, folder, reference=reference), policy, said


def test_the_starting_weights_are_loaded_once(tmp_path):
    models, policy, said = build(tmp_path)
    receiver = models.by_source["start"]
    assert receiver.policy is not policy
    assert not any(parameter.requires_grad for parameter in receiver.policy.model.parameters())
    size = receiver.nbytes / 2**30
    assert said == [
        f"receiver: the run's starting weights (embedded), frozen: the weights take {size:.2f} GiB more on cpu"
    ]

    both, _, said = build(tmp_path, reference=True, models={"receiver": "start", "judge": "start"})
    assert both.reference is both.by_source["start"]
    assert len(both.by_source) == 1
    assert [line.partition(", ")[2] for line in said] == ["in the copy that the KL term uses"] * 2
    none, _, said = build(tmp_path, models={"receiver": "embedded"})
    assert list(none.by_source) == ["embedded"]
    assert said[0].startswith("receiver: embedded, frozen")


def test_lora_needs_no_second_copy(tmp_path):
    models, policy, said = build(tmp_path, "lora.rank=4", reference=True)
    base, plain, _ = build(tmp_path)
    found = models.sizes()
    assert found["parameters_of"] == base.sizes()["parameters_of"] == {"receiver": Frozen(plain).parameters}
    assert found["parameters_of"]["receiver"] < found["parameters"] == Frozen(policy).parameters  # with its adapter
    assert models.by_source["start"].policy is policy
    assert said == [
        "receiver: the run's starting weights (embedded): the policy without its LoRA adapter, no second copy of the "
        "weights"
    ]


@pytest.mark.usefixtures("short_evaluation")
def test_a_run_folder_stands_for_the_checkpoint_that_was_the_newest_when_the_run_began(tmp_path):
    small = (*SHORT, "prompts=1", "group=2", "evaluation.problems=1", "checkpoint_every=1")
    other, _ = run(tmp_path, *small, "steps=1", name="other")
    began = RunFolder.create(tmp_path / "began", {"seed": 0})
    source = str(other.path)
    _, _, said = build(tmp_path, models={"receiver": source}, folder=began)
    first = str(other.path / "checkpoints/step-000001/model")
    assert began.read_json(FILE) == {source: first}
    assert said[0].startswith(f"receiver: {first}, frozen: the weights take")
    trainer.train(make(tmp_path, *small, "steps=2", name="other"), resume=True, quiet=True)
    resumed, _, _ = build(tmp_path, models={"receiver": source}, folder=began)
    expected = load_policy(first, device="cpu")
    newest = load_policy(source, device="cpu")
    weight = lambda policy: next(policy.model.parameters())  # noqa: E731
    assert torch.equal(weight(resumed.by_source[source].policy), weight(expected))
    assert not torch.equal(weight(expected), weight(newest))
    config = make(tmp_path, f"model={source}", "lora.rank=2")  # a checkpoint of LoRA's has no base weights
    based = RunFolder.create(tmp_path / "based", {"seed": 0})
    assert starting_weights(config, based) == str(other.path / "checkpoints/step-000002/model")
    based.write_json(FILE, {"start": first})
    assert starting_weights(config, based) == first
    resumed, _, _ = build(tmp_path, f"model={source}", folder=based, reference=True)
    assert torch.equal(weight(resumed.reference.policy), weight(expected))
    assert starting_weights(make(tmp_path), began) == "embedded"
    shutil.rmtree(other.path / "checkpoints/step-000001")
    with pytest.raises(
        ModelError, match=re.escape(f"began with the weights in {first}, which are gone: put them back")
    ):
        build(tmp_path, models={"receiver": source}, folder=began)


def test_a_receiver_that_does_not_fit_is_refused_before_the_run(tmp_path):
    small = bytes_policy(positions=256)
    small.save(tmp_path / "small")
    with pytest.raises(ModelError, match=r"^receiver = '.*small': LlamaForCausalLM has 256 positions .* need 560"):
        build(tmp_path, models={"receiver": str(tmp_path / "small")})
    with pytest.raises(ModelError, match=r"^receiver = './nowhere': ./nowhere: there is no such folder"):
        build(tmp_path, models={"receiver": "./nowhere"})
    (tmp_path / "bare").mkdir()
    with pytest.raises(ModelError, match=r"^receiver = '.*bare': .*has no config.json"):
        build(tmp_path, models={"receiver": str(tmp_path / "bare")})


def test_weights_that_do_not_fit_beside_the_policy(tmp_path, monkeypatch):
    load = frozen_models.load_policy
    config = make(tmp_path)
    policy = load(config.model, device="cpu")

    def full(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(frozen_models, "load_policy", full)
    with pytest.raises(ModelError, match=r"receiver: the frozen weights of embedded do not fit .* use lora.rank="):
        FrozenModels(config, policy, Asks(), print)


def test_its_sampler_is_like_the_policys(tmp_path):
    from poise.training.building import build_sampler

    models, policy, said = build(tmp_path)
    sampler = build_sampler(models.config, policy, said.append)
    receiver = models.add_to(sampler).others["receiver"]
    assert receiver.task is sampler.task
    assert (receiver.max_prompt, receiver.max_tokens) == (None, sampler.max_tokens)
    assert receiver.engine.engine is not sampler.engine  # keys and values of its own
    assert replace(sampler, others={}).others == {}


def test_a_run_cannot_be_frozen_in_itself(tmp_path):
    with pytest.raises(ModelError, match=r"receiver = '.*/run' is this run's own folder.*write 'start'"):
        run(tmp_path, f"algorithm=rltr(receiver='{tmp_path}/run')")
