"""As a script: one of two processes that train together under DeepSpeed without a GPU, for test_deepspeed.py."""

import os
import sys
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import TrainerCallback
from trl import GRPOTrainer

from poise.integrations.demands import CannotRegulateError
from support.trl_runs import build, injected, parity

SGD = {"beta": 0.05, "optim": "sgd", "weight_decay": 0.0, "learning_rate": 0.5}
METHODS = {
    "stock": None,
    "grpo": "grpo",
    "ar": "ar(alpha=0.3)",
    "tr-grpo": "tr-grpo",
    "entropy": "entropy(quantile=0.5)",
}
REFUSED = {"lopti": 2, "nthr": 1}  # phases


def zero(stage):
    """DeepSpeed's settings; what a GPU would have, such as bfloat16, is left out."""
    return {
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }


class Walk(TrainerCallback):
    """The whole weights at the start and after each optimizer step, one row each."""

    def __init__(self):
        self.rows = []

    def on_step_end(self, *_, model, **__):
        weights = list(model.parameters())
        if hasattr(weights[0], "ds_id"):  # ZeRO-3
            import deepspeed

            with deepspeed.zero.GatheredParameters(weights):
                self.rows.append(torch.cat([weight.detach().flatten().clone() for weight in weights]))
        else:
            self.rows.append(torch.cat([weight.detach().flatten() for weight in weights]))

    on_train_begin = on_step_end


def train(folder, name, stage=None):
    """Two generation batches of injected rollouts: by two processes with DeepSpeed, or by one without."""
    method, walk = METHODS[name], Walk()
    own = {"kind": GRPOTrainer} if method is None else {}
    processes = 1 if stage is None else 2
    more = {} if stage is None else {"deepspeed": zero(stage), "use_cpu": False}
    trainer = build(
        folder, method, reward=parity, more={"rollout_func": injected, "callbacks": [walk]}, max_steps=2, **own,
        **SGD | {"per_device_train_batch_size": 12 // processes}, **more,
    )  # fmt: skip
    trainer.train()
    assert trainer.accelerator.num_processes == processes
    assert trainer.is_deepspeed_enabled is (stage is not None)
    return torch.stack(walk.rows)


def zero_without_gpu():
    """What `accelerate launch` makes of a file with DeepSpeed in it, on processes that accelerate takes for GPUs' own.

    It gives DeepSpeed no others. DeepSpeed itself then takes the CPU and gloo.
    """
    os.environ |= {
        "ACCELERATE_USE_CPU": "false",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_TORCH_DEVICE": "cpu",
        "DS_ACCELERATOR": "cpu",
    }
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)


if __name__ == "__main__":
    zero_without_gpu()
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    result = {(stage, name): train(folder, name, stage) for stage in (2, 3) for name in METHODS}
    for method, phases in REFUSED.items():
        with pytest.raises(CannotRegulateError, match="DeepSpeed"):
            build(
                folder, method, deepspeed=zero(3), use_cpu=False, num_iterations=phases, correct=lambda r: r[:, 0] > 1
            )
    if os.environ["RANK"] == "0":
        torch.save(result, folder / "result.pt")
