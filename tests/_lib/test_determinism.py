"""What ``deterministic=true`` turns on, as far as a CPU can tell; tests/gpu/test_deterministic_gpu.py has the runs."""

import os
import re
from pathlib import Path

import pytest
import torch

import poise
from poise._lib import determinism
from poise._lib import device as _device
from poise._lib.determinism import NotRepeatableError, deterministic, fix_inductor, fix_workspace
from poise.batch import Prompt, padded_batch
from poise.models.footprint import Footprint
from poise.models.layers import FixedPassError
from poise.models.scoring import HiddenStates, score_batch
from poise.sampling.native.engine import NativeEngine
from poise.sampling.native.session import KEPT_SHARE, KeptRows
from poise.training import config as configs
from poise.training.building import load_trained
from poise.training.config.documents import ConfigError
from poise.training.memory import repeatable
from poise.training.update import UpdatePlan, within_memory
from support.small_runs import SHORT, make, parameters, run
from support.tiny_models import tiny

CUDA = torch.device("cuda")
WITHOUT_TIMES = re.compile(r"^(time/|tokens/s)")


@pytest.fixture
def environment(monkeypatch):
    """The environment before any run asked for determinism."""
    monkeypatch.delenv(determinism.WORKSPACE, raising=False)
    monkeypatch.delenv(determinism.INDUCTOR, raising=False)


@pytest.mark.usefixtures("environment", "short_evaluation")
def test_on_a_cpu_it_changes_nothing(tmp_path):
    plain, _ = run(tmp_path, "steps=2", *SHORT, name="plain")
    other, _ = run(tmp_path, "steps=2", *SHORT, "deterministic=true", name="other")
    assert not torch.are_deterministic_algorithms_enabled()
    assert determinism.WORKSPACE not in os.environ
    lines = [[{k: v for k, v in line.items() if not WITHOUT_TIMES.match(k)} for line in folder.metrics()]
             for folder in (plain, other)]  # fmt: skip
    assert lines[0] == lines[1]
    pairs = zip(parameters(plain).values(), parameters(other).values(), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.usefixtures("environment")
def test_the_workspace_of_cublas_is_fixed_before_cuda_starts(monkeypatch):
    fix_workspace()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    fix_workspace()  # it was fixed in time
    monkeypatch.delenv(determinism.WORKSPACE)
    with pytest.raises(NotRepeatableError, match="has used CUDA before, without CUBLAS_WORKSPACE_CONFIG=:4096:8"):
        fix_workspace()
    monkeypatch.setenv(determinism.WORKSPACE, ":0:0")
    with pytest.raises(NotRepeatableError, match=r"has CUBLAS_WORKSPACE_CONFIG=:0:0.*unset it"):
        fix_workspace()


@pytest.mark.usefixtures("environment")
def test_torch_is_as_before_after_the_run(monkeypatch):
    import torch._inductor.config as inductor

    monkeypatch.setattr(inductor, "deterministic", False)
    monkeypatch.setattr(_device, "total_bytes", lambda _: 80 << 30)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    with deterministic(CUDA, 20 << 30):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()  # flash attention's backward pass asks this
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert inductor.deterministic
        assert _device.free_bytes(CUDA) == int(0.8 * (60 << 30))
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory == fill
    assert not _device.is_planned()


@pytest.mark.usefixtures("environment")
def test_inductor_is_told_before_it_is_imported(monkeypatch):
    monkeypatch.delitem(__import__("sys").modules, "torch._inductor.config", raising=False)
    fix_inductor()
    assert os.environ["TORCHINDUCTOR_DETERMINISTIC"] == "1"


def test_a_run_plans_with_what_its_settings_hold(tmp_path, monkeypatch):
    """From the config alone: nothing is loaded, and nothing is asked of the device but its size."""
    config = make(tmp_path, "deterministic=true", "objective.kl_coef=0.1", "dtype=bfloat16")
    config = config.model_copy(update={"device": "cuda"})
    planned = []
    monkeypatch.setattr("poise.training.memory.resolve_device", lambda _: CUDA)
    monkeypatch.setattr("poise.models.footprint.resolve_device", lambda _: CUDA)
    monkeypatch.setattr("poise.training.memory.deterministic", lambda *args: planned.append(args))
    monkeypatch.setenv(determinism.WORKSPACE, ":4096:8")
    repeatable(config)
    least = Footprint.of("embedded", device="cpu", dtype="bfloat16", copies=True)
    assert planned == [(CUDA, least.total)]


def test_decisions_do_not_follow_the_memory_of_the_moment(monkeypatch):
    monkeypatch.setattr(_device, "total_bytes", lambda _: 1000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: pytest.fail("asked"))
    with _device.planned(500):
        assert _device.free_bytes(CUDA) == 400
        rows = KeptRows({}, 1)
        assert rows._room(CUDA) == KEPT_SHARE * 400
        block = [torch.zeros(25)]
        rows.after = {0: type("Saved", (), {"block": block})()}
        assert rows._room(CUDA) == KEPT_SHARE * 400 - 100
    with _device.planned(5000):
        assert _device.free_bytes(CUDA) == 0


def test_the_cache_does_not_follow_earlier_calls(monkeypatch):
    monkeypatch.setattr("poise.sampling.native.graphs.idle_bytes", lambda _: 1 << 40)
    engine = NativeEngine(tiny("llama"))
    engine._decoder, engine._decoder_key = object(), (9, 0, 0, 300)
    assert engine._roomy(4, 100, CUDA)[:4] == (9, 0, 0, 300)
    with _device.planned(0):
        assert engine._roomy(4, 100, CUDA)[:4] == (4, 0, 0, 100)


def full(*_, **__):
    raise torch.OutOfMemoryError("full")


def test_a_pass_that_does_not_fit_ends_the_run(monkeypatch):
    """Smaller passes, checkpointing or another pass for hidden states would change its bits."""
    policy = tiny("llama")
    batch = padded_batch([Prompt((1, 2, 3))] * 3, torch.tensor([[4, 5], [6, 7], [8, 9]]).unbind(), policy.device)
    states = HiddenStates(policy, batch, range(3), 1 << 20)
    monkeypatch.setattr(policy, "score", full)
    with _device.planned(0):
        for work in (
            lambda: score_batch(policy, batch, 1.0),
            lambda: score_batch(policy, batch, 1.0, None, states),
            lambda: within_memory(policy, batch, [0, 1, 2], UpdatePlan().micro_tokens, full),
        ):
            with pytest.raises(FixedPassError, match=r"a pass of 9 tokens.*optim\.micro_tokens=4"):
                work()
    assert policy.most_tokens is None
    assert not policy.checkpointing


@pytest.mark.usefixtures("short_evaluation")
def test_it_is_written_down(tmp_path, monkeypatch):
    monkeypatch.setattr("poise.trainer.repeatable", lambda _: _device.planned(0))
    monkeypatch.setattr("poise.training.update.policy_loss", full)
    with pytest.raises(poise.trainer.TrainError, match="deterministic=true does not allow smaller passes"):
        run(tmp_path, "steps=1")
    saved = (tmp_path / "run" / "out_of_memory.json").read_text()
    assert '"step": 1' in saved
    assert "optim.micro_tokens=" in saved


def test_layers_are_compiled_only_if_asked(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("poise.training.building.load_policy", lambda *_, compiled, **__: asked.append(compiled))
    monkeypatch.setattr("poise.training.building.starting_weights", lambda *_: "embedded")
    folder = type("Folder", (), {"progress": lambda _: (0, 0)})()
    for more in ([], ["deterministic=true"], ["deterministic=true", "compile=true"]):
        load_trained(make(tmp_path, *more), folder)
    assert asked == [None, False, True]


def test_vllm_is_refused():
    with pytest.raises(ConfigError, match=r"deterministic = true with rollout\.engine = vllm"):
        configs.load("tiny", ["deterministic=true", "rollout.engine=vllm"])


@pytest.mark.parametrize("rows", [1, 5])
def test_running_sums_in_deterministic_mode(rows):
    values = torch.rand(rows, 300, generator=torch.Generator().manual_seed(0))
    torch.use_deterministic_algorithms(True)
    try:
        found = _device.running_sum(values, torch.float64)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(found, values.cumsum(-1, dtype=torch.float64))
    assert torch.equal(found, _device.running_sum(values, torch.float64))


def test_no_kernel_of_ours_adds_atomically_or_is_tuned_by_measuring():
    kernels = [path for path in Path(poise.__file__).parent.rglob("*.py") if "triton.jit" in path.read_text()]
    assert len(kernels) >= 4
    for path in kernels:
        assert not re.search(r"atomic_(?!min|max)|autotune|heuristics", path.read_text()), path
