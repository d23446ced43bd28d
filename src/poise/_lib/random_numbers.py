"""The global random number generators of Python, NumPy and torch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Restore the states of all global random number generators, which a task or a reward may use."""
    states = random.getstate(), numpy.random.get_state()  # noqa: NPY002 - a user's code may draw from it
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(states[0])
            numpy.random.set_state(states[1])  # noqa: NPY002
