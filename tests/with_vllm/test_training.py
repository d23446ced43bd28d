"""Training with vLLM, through the trainer."""

import pytest
from test_engine import MEMORY, small

from poise.config import load
from poise.run import RunFolder
from poise.trainer import train


@pytest.mark.parametrize("more", [[], ["lora.rank=4"]], ids=["whole", "lora"])
def test_a_run_samples_with_vllm_and_reports_the_mismatch(tmp_path, more):
    small().save(tmp_path / "model")
    settings = ["prompts=4", "group=4", "steps=3", "rollout.max_tokens=32", "evaluation.problems=4", "device=cpu"]
    settings += [f"model={tmp_path / 'model'}", "optim.lr=1e-3", "rollout.engine=vllm", f"rollout.vllm_memory={MEMORY}"]
    # Rewards of random texts are all the same: an entropy bonus moves the weights all the same.
    config = load("demo", [*settings, f"run={tmp_path / 'run'}", "objective.entropy_coef=0.01", *more])
    train(config, quiet=True)
    lines = RunFolder.open(tmp_path / "run", resume=False).metrics()
    assert len(lines) == 3
    for line in lines:  # the third with weights that were pushed twice
        assert line["optim/grad_norm"] > 0
        assert line["rollout/mismatch_max"] < 1e-3
        assert line["rollout/mismatch_kl"] < 1e-6
        assert line["rollout/importance"] == pytest.approx(1.0, abs=1e-4)
        assert line["rollout/truncated"] == 0
    assert lines[0]["rollout/entropy"] != lines[2]["rollout/entropy"]
