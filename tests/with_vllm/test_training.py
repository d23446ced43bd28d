"""Training with vLLM, through the trainer."""

import pytest

from support.vllm_engines import train_on_vowels


@pytest.mark.parametrize("more", [[], ["lora.rank=8", "optim.lr=2e-2"]], ids=["whole", "lora"])
def test_a_run_with_vllm_learns_and_reports_the_mismatch(tmp_path, more):
    lines = train_on_vowels(tmp_path, "steps=12", "device=cpu", *more)
    assert len(lines) == 12
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.05
    for line in lines:  # with weights that were pushed once more than there were steps
        assert line["rollout/mismatch_max"] < 1e-3
        assert line["rollout/mismatch_kl"] < 1e-6
        assert line["rollout/importance"] == pytest.approx(1.0, abs=1e-4)
        assert line["rollout/truncated"] == 0
