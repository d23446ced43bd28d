"""The whole update on CUDA: bfloat16 with masters, flash attention, Triton head, compiled layers or not."""

import pytest
import torch

from support import trajectories

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.compile has many for its own code


@pytest.fixture(scope="module")
def made():
    return trajectories.sampled("cuda")


@pytest.fixture(scope="module")
def reference(made):
    return trajectories.plain(made, "cuda", torch.float32)


@pytest.fixture(scope="module")
def padded(made):
    return trajectories.plain(made, "cuda", torch.bfloat16)


def test_twenty_steps_in_float32(made, reference):
    losses, moved = trajectories.fast(made, "cuda", torch.float32)
    assert losses == pytest.approx(reference[0], rel=1e-3, abs=1e-5)
    assert (moved - reference[1]).norm() < 1e-2 * reference[1].norm()


@pytest.mark.parametrize("compiled", [False, True])
def test_twenty_steps_in_bfloat16(made, reference, padded, compiled, monkeypatch):
    monkeypatch.setattr("poise.models.layers.FEWEST_TOKENS", 1)
    losses, moved = trajectories.fast(made, "cuda", torch.bfloat16, compiled=compiled)
    off, theirs = ((found - reference[1]).norm() for found in (moved, padded[1]))
    assert off <= 2 * theirs
    gaps = [[abs(a - b) for a, b in zip(found, reference[0], strict=True)] for found in (losses, padded[0])]
    assert sum(gaps[0]) <= 2 * sum(gaps[1])


@pytest.mark.parametrize("settings", [(), ("lora.rank=4", "objective.kl_coef=0.01")])
def test_a_trainer_step_on_cuda(tmp_path, settings):
    from poise.trainer import train
    from poise.training.config.schema import load

    config = load(
        "tiny",
        [f"run={tmp_path}/run", "steps=2", "prompts=4", "evaluation.problems=4", "evaluation.samples=2", *settings],
    )
    summary = train(config, quiet=True)
    assert summary["steps"] == 2
    summary = train(config.model_copy(update={"steps": 3}), resume=True, quiet=True)
    assert summary["steps"] == 3
