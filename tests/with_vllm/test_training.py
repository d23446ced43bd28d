"""Training with vLLM, through the trainer."""

from dataclasses import replace

import pytest

from poise.config.schema import load
from poise.runs.folder import RunFolder
from poise.trainer import Trainer
from support.vllm_engines import MEMORY, STARTED, Vowels, small


@pytest.mark.parametrize("more", [[], ["lora.rank=8", "optim.lr=1e-2"]], ids=["whole", "lora"])
def test_a_run_with_vllm_learns_and_reports_the_mismatch(tmp_path, more):
    small().save(tmp_path / "model")
    settings = ["prompts=8", "group=8", "steps=12", "rollout.max_tokens=24", "evaluation.problems=2", "device=cpu"]
    settings += [f"model={tmp_path / 'model'}", "rollout.engine=vllm", f"rollout.vllm_memory={MEMORY}", "optim.lr=2e-3"]
    config = load("demo", [*settings, f"run={tmp_path / 'run'}", *more])
    folder = RunFolder.create(config.run, config.model_dump(mode="json"))
    held = Trainer(config, folder, quiet=True)
    held.sampler = replace(held.sampler, task=Vowels())
    STARTED.append(held.sampler.engine)
    held.run()
    lines = folder.metrics()
    assert len(lines) == 12
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.05
    for line in lines:  # with weights that were pushed once more than there were steps
        assert line["rollout/mismatch_max"] < 1e-3
        assert line["rollout/mismatch_kl"] < 1e-6
        assert line["rollout/importance"] == pytest.approx(1.0, abs=1e-4)
        assert line["rollout/truncated"] == 0
