"""Checkpoints of one tensor and one number: how to write, read and damage them."""

import json

import torch
from safetensors.torch import load_file, save_file

from poise.runs.checkpoint_files import CheckpointFiles


def write(value, *, weights=True):
    """The function that fills a checkpoint with ``value``, for ``save``."""

    def fill(folder):
        (folder / "model").mkdir()
        if weights:
            save_file({"w": torch.full((50,), float(value))}, folder / "model" / "model.safetensors")
        (folder / "state.json").write_text(json.dumps(value))

    return fill


def read(folder):
    """The value of a checkpoint, once its files agree on it; for ``load``."""
    weights = load_file(folder / "model" / "model.safetensors")["w"]
    value = json.loads((folder / "state.json").read_text())
    assert weights.eq(value).all()
    return value


def save(run, step, fill):
    """Save a checkpoint of a run, and return its folder."""
    with CheckpointFiles(run).writing(step) as folder:
        fill(folder)
    return run.checkpoint(step)


def load(run, read, **more):
    """The newest intact checkpoint of a run: its step, and what ``read`` returns."""
    return CheckpointFiles(run).load(read, **more)


def names(folder):
    """The names of all files in a folder."""
    return sorted(path.name for path in folder.iterdir())


def flip(folder):
    """Flip one bit of the weights."""
    path = folder / "model" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
