"""Small training runs with the embedded model, in this process or in one of their own."""

import os
import subprocess
import sys

from safetensors.torch import load_file

from poise import config as configs
from poise import trainer
from poise.runs.folder import RunFolder

SMALL = [
    "steps=4", "prompts=4", "group=4", "task.people=2", "rollout.max_tokens=48", "evaluation.problems=4",
    "evaluation.samples=2", "checkpoint_every=2", "device=cpu", "rollouts_every=2",
]  # fmt: skip


def make(tmp_path, *overrides, recipe="demo", name="run"):
    return configs.load(recipe, [*SMALL, f"run={tmp_path / name}", *overrides])


def run(tmp_path, *overrides, **kwargs):
    config = make(tmp_path, *overrides, **kwargs)
    summary = trainer.train(config, quiet=True)
    return RunFolder.open(config.run, resume=False), summary


def parameters(folder):
    tensors = load_file(folder.newest() / "parameters.safetensors")
    return {name: value.clone() for name, value in tensors.items()}  # not a view of a file that may change


def command(*args, **kwargs):
    """``poise …`` in a process of its own; use it in a with statement."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, "-m", "poise", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        **kwargs,
    )
