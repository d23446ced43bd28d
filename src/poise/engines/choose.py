"""The engine that a setting means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from poise.engines import hf as cached
from poise.engines.hf import CachedEngine
from poise.engines.native import engine as native
from poise.engines.native.engine import NativeEngine
from poise.engines.vllm import MEMORY, VllmEngine
from poise.models.policy import ModelError, Policy
from poise.rollout.types import Engine

Choice = Literal["auto", "native", "transformers", "vllm"]


def choose(
    policy: Policy,
    choice: Choice = "auto",
    batch: int = 0,
    note: Callable[[str], None] = print,
    *,
    memory: float = MEMORY,
) -> Engine:
    """With ``auto`` the native engine, unless the model cannot use it, which is said: then transformers' cache.

    vLLM is there for whoever asks for it; ``memory`` is its share.
    """
    if choice == "vllm":
        engine = VllmEngine(policy, batch, memory)
        note(
            "sampling goes through vLLM, in this process: it starts with the first prompts, and takes up to "
            f"{memory:.0%} of the device's memory (rollout.vllm_memory)"
        )
        return engine
    name = type(policy.base).__name__
    if policy.length_limit is not None:
        note(
            f"{name}: the rotary embedding changes with length; poise uses that of {policy.length_limit} tokens for all"
        )
    if choice != "transformers" and native.supports(policy):
        return NativeEngine(policy, batch)
    if choice == "native":
        raise ModelError(f"rollout.engine=native cannot decode with {name}: use auto, or transformers")
    if not cached.supports(policy):
        raise ModelError(
            f"{name}: sampling with transformers' cache does not give the log-probabilities of a plain forward pass; "
            "poise cannot train it; please report the architecture"
        )
    if choice == "auto":
        note(f"{name} cannot use the native engine, so sampling goes through transformers' cache, which is slower")
    return CachedEngine(policy, batch)
