"""A whole training loop in one file: a language model learns Knights & Knaves by GRPO with a token regulator.

    python examples/own-loop/rl_loop.py "ar(alpha=0.3) | lopti(threshold=0.5)"

No settings file, no run folder, no console. ``poise.trainer.Trainer.step`` is made of the same functions, some of them
inside ``poise.training.update.update``; around them the trainer has metrics, evaluation, checkpoints and records. It
also goes through a data set in epochs, stops at a gradient that is not finite, and survives a step without a reward.
Copy this file to build a trainer of your own.
"""

from __future__ import annotations

import sys

import torch

import poise

METHOD = "ar(alpha=0.3) | lopti(threshold=0.5)"
PROMPTS, GROUP, MINI_BATCH, LEARNING_RATE = 8, 8, 32, 1e-4


def train(method: str = METHOD, steps: int = 40) -> list[float]:
    """Train, and return the mean reward of every step."""
    # Or a hub id, or a folder. In half precision the optimizer needs float32 weights: docs/own-loop.md.
    policy = poise.load_policy("embedded", dtype="float32")
    task = poise.tasks.get("kk", people=2)
    sampler = poise.Sampler(policy, poise.engines.choose(policy), task, max_tokens=96)
    algorithm = poise.Grpo(GROUP)
    regulator = poise.regulators.parse(method)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE)

    history = []
    for step in range(steps):
        problems = poise.tasks.draw(task, "train", seed=step, count=PROMPTS)
        trajectories, _ = algorithm.collect(problems, sampler, seed=step)  # sampled and scored, on the host
        trajectories, _ = poise.drop_failed(trajectories)  # attempts whose score failed
        batch = poise.make_batch(trajectories, policy)  # padded, on the device, with advantages
        for phase in regulator(batch):  # each phase is one pass of optimizer steps
            for rows in poise.mini_batches(len(trajectories), MINI_BATCH, seed=step):
                metrics = poise.backward(policy, batch.rows(rows), phase.rows(rows))  # sets the gradients
                if metrics is None:
                    continue  # no token takes part: momentum alone must not move the model
                torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
                optimizer.step()
        history.append(sum(each.score.reward for each in trajectories) / len(trajectories))
        correct = sum(each.score.correct for each in trajectories) / len(trajectories)
        print(f"step {step + 1:3d}  reward {history[-1]:5.2f}  correct {correct:.2f}", flush=True)
    return history


if __name__ == "__main__":
    train(sys.argv[1] if len(sys.argv) > 1 else METHOD)
