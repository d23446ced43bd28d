"""A checkpoint to save and load in tests, and what to do to it."""

import json

import torch
from safetensors.torch import load_file, save_file


def write(value, *, weights=True):
    def fill(folder):
        (folder / "model").mkdir()
        if weights:
            save_file({"w": torch.full((50,), float(value))}, folder / "model" / "model.safetensors")
        (folder / "state.json").write_text(json.dumps(value))

    return fill


def read(folder):
    weights = load_file(folder / "model" / "model.safetensors")["w"]
    value = json.loads((folder / "state.json").read_text())
    assert weights.eq(value).all()
    return value


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def flip(folder):
    path = folder / "model" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
