"""As a script: one of two processes that train together under FSDP2 without a GPU, for test_fsdp.py."""

import os
import sys
from pathlib import Path

import torch
import yaml
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback
from trl import GRPOTrainer

from support.trl_runs import build, injected, parity

CONFIG = Path(__file__).parents[2] / "examples/scale/accelerate-fsdp-8gpu.yaml"
SGD = {"beta": 0.05, "optim": "sgd", "weight_decay": 0.0, "learning_rate": 0.5}
RUNS = {
    "stock": (None, SGD),
    "grpo": ("grpo", SGD),
    "lopti": ("entropy(quantile=0.5) | lopti(threshold=0.05)", SGD),
    "nthr": ("nthr | lopti(threshold=0.05)", SGD | {"per_device_train_batch_size": 16, "learning_rate": 0.05}),
    "idle": ("lopti(threshold=0)", {}),  # no token is low; Adam has momentum and weight decay
}


class Walk(TrainerCallback):
    """The whole weights at the start and after each optimizer step, one row each."""

    def __init__(self):
        self.rows = []

    def on_step_end(self, *_, model, **__):
        whole = (weight.full_tensor() if hasattr(weight, "full_tensor") else weight for weight in model.parameters())
        self.rows.append(torch.cat([weight.detach().flatten() for weight in whole]))

    on_train_begin = on_step_end


def train(folder, name, processes=1):
    """Two generation batches of injected rollouts."""
    method, settings = RUNS[name]
    walk = Walk()
    own = {"kind": GRPOTrainer} if method is None else {"correct": lambda rewards: rewards[:, 0] > 1}
    rows = settings.get("per_device_train_batch_size", 12)  # of all processes; 12: a group is split between two
    trainer = build(
        folder, method, reward=parity, more={"rollout_func": injected, "callbacks": [walk]}, num_iterations=2,
        max_steps=4, **own, **settings | {"per_device_train_batch_size": rows // processes},
    )  # fmt: skip
    trainer.train()
    assert trainer.accelerator.num_processes == processes
    assert isinstance(trainer.model_wrapped, FSDPModule) is (processes == 2)
    return torch.stack(walk.rows)


def shard_without_gpu(start=PartialState.__init__):
    """What `accelerate launch` makes of the shipped file, but for bfloat16, on processes that it takes for GPUs' own.

    accelerate shards on accelerators alone. Nothing that follows asks for CUDA.
    """
    settings = yaml.safe_load(CONFIG.read_text())["fsdp_config"]
    os.environ |= {key.upper(): str(value).lower() for key, value in settings.items() if isinstance(value, bool)}
    os.environ |= {key.upper(): str(value) for key, value in settings.items() if not isinstance(value, bool)}
    os.environ["ACCELERATE_USE_FSDP"] = "true"

    def started(self, *args, **kwargs):
        start(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = started


if __name__ == "__main__":
    torch.set_num_threads(1)
    shard_without_gpu()
    result = {name: train(Path(sys.argv[1]), name, processes=2) for name in RUNS}
    if os.environ["RANK"] == "0":
        torch.save(result, Path(sys.argv[1]) / "result.pt")
