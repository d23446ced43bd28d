"""Small training runs with the embedded model, in this process or in one of their own."""

import os
import subprocess
import sys

from safetensors.torch import load_file

from poise import trainer
from poise.runs.folder import RunFolder
from poise.training import config as configs

SMALL = [
    "steps=4", "prompts=4", "group=4", "task.people=2", "rollout.max_tokens=48", "evaluation.problems=3",
    "evaluation.samples=2", "checkpoint_every=2", "device=cpu", "rollouts_every=2",
]  # fmt: skip
# Replies too short to be right, for runs whose reward does not matter; the entropy term still moves the weights.
SHORT = ["rollout.max_tokens=12", "objective.entropy_coef=0.01"]


def make(tmp_path, *overrides, recipe="tiny", name="run"):
    """The config of a small run in ``tmp_path / name``."""
    small = SMALL if configs.load(recipe).task.name == "kk" else [item for item in SMALL if item != "task.people=2"]
    return configs.load(recipe, [*small, f"run={tmp_path / name}", *overrides])


def run(tmp_path, *overrides, **kwargs):
    """Train a small run; returns its folder and its summary."""
    config = make(tmp_path, *overrides, **kwargs)
    summary = trainer.train(config, quiet=True)
    return RunFolder.open(config.run, resume=False), summary


def parameters(folder):
    """The weights in the newest checkpoint of a run."""
    tensors = load_file(folder.newest() / "parameters.safetensors")
    return {name: value.clone() for name, value in tensors.items()}  # not a view of a file that may change


def command(*args, start=("-m", "poise"), gpu=False, **kwargs):
    """``poise …`` in a process of its own; use it in a with statement."""
    env = os.environ | {"OMP_NUM_THREADS": "1"} | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})
    return subprocess.Popen(
        [sys.executable, *start, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        **kwargs,
    )


KILLED_AT = """
import os, signal, sys
from poise.__main__ import main
from poise.runs.checkpoint_files import CheckpointFiles
from poise.runs.folder import RunFolder
function, number = sys.argv.pop(1), int(sys.argv.pop(1))
owner = next(each for each in (RunFolder, CheckpointFiles) if hasattr(each, function))
real = getattr(owner, function)
def killing(self, step, *rest):
    if step == number:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, step, *rest)
setattr(owner, function, killing)
main()
"""


def killed_at(function, step, *args, **kwargs):
    """``poise …`` in a process that is killed where it calls a function of its run folder for that step."""
    return command(function, str(step), *args, start=("-c", KILLED_AT), **kwargs)
