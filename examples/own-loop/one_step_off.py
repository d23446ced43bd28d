"""One-step-off training: while the model learns from one batch, a copy of it, one update behind, samples the next.

    python examples/own-loop/one_step_off.py

Here a thread samples; on two GPUs both would work at full speed. A batch is from weights that are one update old:
``Trajectory.version`` says which. ``recompute=True`` takes the old log-probabilities from the current weights, and the
objective weights each token by ``min(old / sampler, importance_cap)`` (``objective.importance_weights``).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

import poise

PROMPTS, GROUP, LEARNING_RATE = 8, 8, 1e-4


class Step(NamedTuple):
    """What happened in one step."""

    reward: float
    age: int  # updates between the weights that sampled the batch and those that learn from it
    weight: float  # mean importance weight


def train(steps: int = 40) -> list[Step]:
    """Train, and return what happened."""
    policy, behind = (poise.load_policy("embedded", dtype="float32") for _ in range(2))
    task = poise.tasks.get("kk", people=2)
    sampler = poise.Sampler(behind, poise.engines.choose(behind), task, max_tokens=96)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE)
    regulator, settings = poise.regulators.parse("ar(alpha=0.3)"), poise.objective.Settings(importance_cap=2.0)
    plan = poise.UpdatePlan(settings)

    def sample(step: int, version: int) -> list[poise.Trajectory]:
        problems = poise.tasks.draw(task, "train", seed=step, count=PROMPTS)
        now = sampler.at(poise.rewards.TrainerState(global_step=version))
        return poise.Grpo(GROUP).collect(problems, now, seed=step)[0]

    history = []
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sample, step=0, version=0)
        for step in range(steps):
            trajectories, _ = poise.drop_failed(waiting.result())
            behind.model.load_state_dict(policy.model.state_dict())
            waiting = pool.submit(sample, step=step + 1, version=step)  # while the lines below run
            batch = poise.make_batch(trajectories, policy, recompute=True)
            for phase in regulator(batch):
                if poise.backward(policy, batch, phase, plan) is not None:
                    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
                    optimizer.step()
            weights = poise.objective.importance_weights(batch, settings)
            weight = 1.0 if weights is None else float(weights[batch.mask].mean())
            reward = sum(each.score.reward for each in trajectories) / len(trajectories)
            history.append(Step(reward, step - trajectories[0].version, weight))
            print(f"step {step + 1:3d}  reward {reward:5.2f}  age {history[-1].age}  weight {weight:.4f}")
    return history


if __name__ == "__main__":
    train()
