"""How many runs of a comparison train in parallel, and how they share a GPU's memory."""

import os

import pytest
import torch
import transformers

from poise._lib.determinism import FIXED, WORKSPACE
from poise.models import footprint
from poise.referee.compare import jobs, worker
from poise.referee.compare.jobs import GPU_JOBS, parallel_jobs
from poise.referee.compare.worker import Job
from poise.training.config.documents import ConfigError
from poise.training.config.schema import load

H200 = 150_100_000_000  # bytes
QWEN = {  # hidden, intermediate, layers, heads, key heads
    "0.5B": (896, 4864, 24, 14, 2),
    "1.5B": (1536, 8960, 28, 12, 2),
    "3B": (2048, 11008, 36, 16, 2),
}


@pytest.fixture
def on(monkeypatch):
    """A CUDA device of some size, which need not be there."""

    def set_size(size):
        for module in (jobs, footprint):
            monkeypatch.setattr(module, "resolve_device", lambda _: torch.device("cuda"))
            monkeypatch.setattr(module, "total_bytes", lambda _: size)

    return set_size


@pytest.fixture
def configs(tmp_path):
    """Runs of a model of some size, with several seeds, regulators and rates."""

    def make(shape, *settings):
        hidden, intermediate, layers, heads, shared = QWEN[shape]
        transformers.Qwen2Config(
            vocab_size=151936, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=shared, tie_word_embeddings=True,
        ).save_pretrained(tmp_path / shape)  # fmt: skip
        base = load(
            None, ["task.name=kk", f"model={tmp_path / shape}", "prompts=32", "objective.kl_coef=0.001", *settings]
        )
        return [
            base.model_copy(update={"seed": seed, "regulator": regulator, "run": f"runs/{seed}-{regulator}"})
            for seed in range(10)
            for regulator in ("grpo", "ar")
        ]

    return make


def test_as_many_runs_as_fit(on, configs):
    on(H200)
    found = {shape: parallel_jobs(configs(shape), None, 20) for shape in QWEN}
    assert found["3B"] == (1, None)
    assert found["1.5B"][0] in (2, 3)
    assert 6 <= found["0.5B"][0] <= 10
    for number, share in (found["1.5B"], found["0.5B"]):
        assert share == pytest.approx(0.92 / number)
    assert parallel_jobs([load("tiny")], None, 40)[0] == GPU_JOBS
    assert parallel_jobs([load("tiny")], None, 5)[0] == 5  # not more than there are runs


def test_a_number_that_cannot_fit_is_refused(on, configs):
    on(H200)
    assert parallel_jobs(configs("1.5B"), 3, 20) == (3, pytest.approx(0.92 / 3))
    with pytest.raises(ConfigError, match=r"jobs = 16: a run takes at least 3\d\.\d GB .* set jobs=[34]$"):
        parallel_jobs(configs("1.5B"), 16, 20)
    assert parallel_jobs(configs("1.5B"), 16, 2)[0] == 2  # the plan has only two runs
    assert parallel_jobs(configs("3B", "rollout.max_tokens=4096"), 1, 20) == (1, None)  # its own check says what to do


def test_the_same_memory_is_forecast_once(on, configs, monkeypatch):
    on(H200)
    asked = []
    monkeypatch.setattr(jobs, "needed_bytes", lambda config: asked.append(config))
    number, _ = parallel_jobs([*configs("0.5B"), *configs("0.5B", "group=4")], None, 40)
    assert len(asked) == 2
    assert number == GPU_JOBS  # without a forecast, the maximum


def test_without_a_gpu_or_runs_nothing_is_shared(configs):
    assert parallel_jobs(configs("0.5B", "device=cpu"), 3, 20) == (3, None)
    assert parallel_jobs([], 4, 20) == (4, None)  # all runs are finished


def test_a_run_keeps_to_its_share(monkeypatch):
    limits = []
    monkeypatch.setattr("poise._lib.device.limit_memory", lambda *args: limits.append(args))
    monkeypatch.setattr(worker, "_train", lambda *_: None)
    settings = load("tiny", ["device=cpu"]).model_dump(mode="json")
    assert worker.carry_out(Job(settings, share=0.25)) == worker.DONE
    assert worker.carry_out(Job(settings)) == worker.DONE
    assert limits == [(torch.device("cpu"), 0.25)]


def test_a_deterministic_run_fixes_its_workspace_before_cuda_starts(monkeypatch):
    """The limit of its memory starts CUDA; and so does the name of the GPU, with which ``before`` is compared."""
    found = []
    monkeypatch.setattr("poise.models.loading.resolve_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr("poise._lib.device.limit_memory", lambda *_: found.append(os.environ.get(WORKSPACE)))
    monkeypatch.setattr(worker, "_train", lambda *_: None)
    monkeypatch.setenv(WORKSPACE, "")
    monkeypatch.delenv(WORKSPACE)
    for setting, expected in (("false", None), ("true", FIXED[0])):
        settings = load("tiny", [f"deterministic={setting}"]).model_dump(mode="json")
        assert worker.carry_out(Job(settings, share=0.25)) == worker.DONE
        assert found.pop() == expected
