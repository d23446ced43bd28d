"""Two of verl's workers in Ray's processes, which share the model by FSDP2, against one process with all of it."""

import pytest
import torch
from verl.trainer.ppo.v1.trainer_base import get_trainer_cls

from support import verl_cpu, verl_two
from support.verl_runs import close

PROMPTS, GROUP = 4, 4
REWARDS = [1, 1, 0, 0, 1, 1, 1, 1, 0, -1, 0, 0, 1, 0, 1, 1]  # mixed, all right, all wrong, mixed
METHODS = [None, "ar(alpha=0.3) | lopti(threshold=0.5)", "nthr"]


@pytest.fixture(autouse=True, scope="module")
def _queue():
    with verl_two.queue():
        yield


def config(method):
    """A rate so small that rounding in one step does not show in the next one's gradient."""
    given = verl_cpu.OVERRIDES | {
        "actor_rollout_ref.rollout.n": GROUP, "actor_rollout_ref.actor.optim.lr": 1e-6,
        "actor_rollout_ref.actor.strategy": "fsdp2",
    }  # fmt: skip
    for kind in ("param", "reduce", "buffer"):
        given[f"+actor_rollout_ref.actor.fsdp_config.mixed_precision.{kind}_dtype"] = "fp32"
    if method is not None:
        given |= {"trainer.v1.trainer_mode": "poise_sync", "+trainer.v1.poise_sync.regulator": f"'{method}'"}
    return verl_cpu.composed([f"{key}={value}" for key, value in given.items()])


def rollouts():
    return verl_cpu.rollouts(PROMPTS, GROUP, rewards=REWARDS)


@pytest.mark.parametrize("method", METHODS)
def test_two_workers_update_as_one_process(method):
    made, metrics = config(method), {}
    built = get_trainer_cls(made.trainer.v1.trainer_mode)(made)
    built._init_resource_pool_mgr()
    built._init_tokenizer()
    built.global_steps, built.distillation_config = 1, None
    with verl_two.workers(made) as group:
        built.actor_rollout_wg = group
        start = group.found()[0]["weights"]
        batch = built._balance_batch(rollouts(), metrics)
        order = list(batch.keys)
        built._update_actor(verl_cpu.prepare(built, batch, metrics), metrics)
        first, second = group.found()
    assert first["process"] != second["process"]
    assert max(first["own"], second["own"]) <= len(start) // 2 + 1000
    assert torch.equal(first["weights"], second["weights"])
    assert not torch.equal(first["weights"], start)

    alone, expected = verl_cpu.assembled(made), {}
    mini = made.actor_rollout_ref.actor.ppo_mini_batch_size * GROUP
    rows = torch.arange(len(order)).view(2, -1, mini // 2).transpose(0, 1).flatten()  # process, mini-batch, row
    batch = rollouts().select_keys([order[row] for row in rows])
    batch.extra_info["temperature"] = verl_cpu.HOT
    alone._update_actor(verl_cpu.prepare(alone, batch, expected), expected)
    theirs = alone.actor_rollout_wg.engine.gradients
    assert len(first["gradients"]) == len(theirs) == (4 if method and "lopti" in method else 2)
    assert all(close(ours, reference, 1e-3) for ours, reference in zip(first["gradients"], theirs, strict=True))
    shown = {key for key in expected if key.startswith("reg/") and "actor/" not in key}
    assert bool(shown) is (method is not None)
    assert {key: metrics[key] for key in shown} == pytest.approx({key: expected[key] for key in shown}, rel=1e-4)
