"""The parts of a training step, and evaluation, checkpoints and interrupts around it."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "warnings":  # where they were, and where users' code may still look for them
        return import_module("poise.runs.subscribers.warnings")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
