"""``rl_loop.py`` on several processes, each with the whole model and a share of the problems:

    torchrun --nproc-per-node 2 examples/own-loop/rl_loop_two_processes.py

A group stays within a process. The processes sum the loss's denominator and then the gradients, so each optimizer step
is that of all responses together, and the models stay equal. Most lines that ``rl_loop.py`` lacks end with ``# *``.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor

import poise

METHOD = "ar(alpha=0.3) | lopti(threshold=0.5)"
PROMPTS, GROUP, MINI_BATCH, LEARNING_RATE = 8, 8, 32, 1e-4  # of each process
PLAN = poise.UpdatePlan()  # the loss


def backward(policy: poise.Policy, batch: poise.TokenBatch, phase: poise.Phase) -> bool:
    """Set the gradients to those of the mini-batches of all processes together. False if no token takes part."""
    divisor = summed(poise.objective.normalizer(batch, PLAN.objective))  # *
    active = poise.backward(policy, batch, phase, PLAN, divisor=divisor) is not None
    for parameter in policy.parameters():  # *
        own = parameter.grad if active else None  # * otherwise it is that of an earlier mini-batch
        parameter.grad = summed(torch.zeros_like(parameter) if own is None else own)  # *
    return bool(summed(torch.tensor(int(active), device=policy.device)))  # *


def summed(values: Tensor) -> Tensor:  # *
    """The sum over all processes."""
    dist.all_reduce(values)
    return values


def train(method: str = METHOD, steps: int = 40) -> poise.Policy:
    """Train, and return the model."""
    dist.init_process_group("gloo")  # * nccl on GPUs, with device=f"cuda:{rank}" below
    rank, count = dist.get_rank(), dist.get_world_size()  # *
    policy = poise.load_policy("embedded", dtype="float32")
    task = poise.tasks.get("kk", people=2)
    sampler = poise.Sampler(policy, poise.engines.choose(policy), task, max_tokens=96)
    algorithm = poise.Grpo(GROUP)
    regulator = poise.regulators.parse(method)
    if regulator.scope == "batch":  # *
        raise ValueError(f"{method} looks at a whole batch, and each process has only its share")  # *
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE)

    for step in range(steps):
        seed = step * count + rank  # * its own problems and samples
        problems = poise.tasks.draw(task, "train", seed=seed, count=PROMPTS)
        trajectories, _ = algorithm.collect(problems, sampler, seed=seed)
        if poise.drop_failed(trajectories)[0] != trajectories:  # *
            raise RuntimeError("an attempt has no score: the processes would take different numbers of steps")  # *
        batch = poise.make_batch(trajectories, policy)
        for phase in regulator(batch):
            for rows in poise.mini_batches(len(trajectories), MINI_BATCH, seed=step):
                if not backward(policy, batch.rows(rows), phase.rows(rows)):
                    continue
                torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
                optimizer.step()
        rewards = torch.tensor([each.score.reward for each in trajectories], device=policy.device)
        reward = summed(rewards.mean()) / count  # *
        if rank == 0:  # *
            print(f"step {step + 1:3d}  reward {float(reward):5.2f}", flush=True)
    return policy


if __name__ == "__main__":
    train(sys.argv[1] if len(sys.argv) > 1 else METHOD)
    dist.destroy_process_group()  # *
