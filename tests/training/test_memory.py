"""What a run takes, from a config.json alone, and what follows: refusals, and the passes of the update."""

from types import SimpleNamespace

import pytest
import torch
import transformers

from poise.models import footprint as module
from poise.models.location import ModelError
from poise.runs.folder import RunFolder
from poise.training import config as configs
from poise.training import memory
from poise.training.building import build

CUDA = torch.device("cuda")
H200, A100, SMALL = 150_100_000_000, 85_000_000_000, 24_000_000_000  # bytes
QWEN = {
    "3B": {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "7B": {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4,
    },
}  # fmt: skip


@pytest.fixture
def on(monkeypatch):
    """A device of some size, which need not be there."""

    def set_size(size):
        monkeypatch.setattr(module, "resolve_device", lambda _: CUDA)
        monkeypatch.setattr(module, "total_bytes", lambda _: size)
        monkeypatch.setattr("poise.training.building.resolve_device", lambda _: CUDA)
        monkeypatch.setattr(memory, "idle_bytes", lambda _: 0.2 * size)

    return set_size


def asked(tmp_path, shape, *more):
    """The recipe GRPO with a model that has a config.json and no weights."""
    folder = tmp_path / shape
    transformers.Qwen2Config(**QWEN[shape], max_position_embeddings=32768).save_pretrained(folder)
    return configs.load("grpo", [f"model={folder}", f"run={tmp_path / 'run'}", *more])


@pytest.mark.parametrize("size", [A100, H200])
@pytest.mark.parametrize("kl", [0.001, 0.0])
def test_7b_in_full_is_refused_with_what_would_fit(tmp_path, monkeypatch, on, size, kl):
    on(size)
    monkeypatch.setattr("poise.training.building.load_policy", lambda *_, **__: pytest.fail("weights were loaded"))
    config = asked(tmp_path, "7B", f"objective.kl_coef={kl}")
    with pytest.raises(ModelError, match=r"training takes at least 1[35]\d GB") as raised:
        build(config, RunFolder.create(config.run, {}))
    said = str(raised.value)
    assert "7,615.6 M parameters" in said
    assert "of which 92% can be used: train an adapter, lora.rank=16 (" in said
    assert "kl_coef=0" not in said  # it would not be enough
    assert "rollout.max_tokens" not in said


def test_a_limit_of_responses_is_advised_where_that_is_enough(tmp_path, on):
    config = asked(tmp_path, "3B", "rollout.max_tokens=16384", "rollout.max_prompt=4096", "objective.kl_coef=0")
    on(66_000_000_000)
    least = memory.footprint(config, config.model, passes=True)
    with pytest.raises(ModelError, match=r"lora\.rank=16 \(.*set rollout\.max_tokens=4096 \(5\d"):
        least.check(config.model, "cuda", lambda: memory.smaller_footprints(config, config.model))


@pytest.mark.parametrize(
    ("shape", "size", "more", "expected"),
    [
        ("3B", H200, [], (8192, False)),
        ("3B", A100, [], (16384, True)),
        ("3B", SMALL, ["lora.rank=16"], (16384, True)),
        ("7B", A100, ["lora.rank=16"], (8192, False)),
        ("7B", SMALL, ["lora.rank=16"], (8192, True)),
        ("3B", H200, ["optim.micro_tokens=6000"], (6000, False)),
    ],
)
def test_passes_before_the_first_one(tmp_path, on, shape, size, more, expected):
    on(size)
    config = asked(tmp_path, shape, *more)
    of = memory.footprint(config, config.model, passes=True)
    of.check(config.model, "cuda")
    policy = SimpleNamespace(device=CUDA, packed=True, most_tokens=None, checkpointing=False)
    policy.budget = lambda micro: micro or 16384
    policy.save_memory = lambda: setattr(policy, "checkpointing", True) or True
    said = []
    memory.bound_passes(policy, of, config.optim.micro_tokens, said.append)
    tokens, checkpointed = expected
    assert (policy.most_tokens or policy.budget(config.optim.micro_tokens), policy.checkpointing) == expected
    assert of.activations.peak(tokens, checkpointed=checkpointed) <= of.room(CUDA)
    assert len(said) == (policy.most_tokens is not None)
    assert all(f"passes of {tokens:,} tokens" in text for text in said)


def test_a_dry_run_prints_all_of_it(tmp_path):
    config = asked(tmp_path, "3B", "rollout.max_tokens=1024", "dtype=bfloat16", "device=cpu")
    of = memory.footprint(config, config.model, passes=True)
    assert str(of).startswith("61.7 GB (weights 6.17 GB, gradients and optimizer 49.4 GB, starting weights 6.17 GB)")
    assert of.passes(16384) == (
        "activations of a pass of 16,384 tokens 79.6 GB, or 6.05 GB with gradient checkpointing; KV cache up to "
        "26.9 GB (512 rows of 1,424 tokens; with less memory, some rows wait)"
    )


def test_a_model_that_cannot_be_tried_without_weights_is_forecast_as_before(monkeypatch):
    monkeypatch.setattr(module, "measure", lambda *_: (_ for _ in ()).throw(RuntimeError("item() on meta")))
    config = configs.load("tiny", ["device=cpu"])
    of = memory.footprint(config, "embedded", passes=True)
    assert of.activations is None
    assert of.least == of.total
    assert of.passes(1024) == "activations and the KV cache come on top"


def test_the_recipe_for_24_gb_fits(tmp_path, on):
    """By the forecast; its peak has not been measured."""
    on(SMALL)
    folder = tmp_path / "3B"
    transformers.Qwen2Config(**QWEN["3B"], max_position_embeddings=32768).save_pretrained(folder)
    config = configs.load("grpo-24gb", [f"model={folder}"])
    of = memory.footprint(config, config.model, passes=True)
    of.check(config.model, "cuda")
    cache = of.rows.count * of.rows.longest * of.activations.cache
    assert cache < 0.85 * of.room(CUDA)  # no row waits
    assert of.activations.peak(16384, checkpointed=True) < of.room(CUDA)
    assert max(cache, of.activations.peak(16384, checkpointed=True)) + of.total < 16e9
