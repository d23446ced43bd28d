"""Chooses the sampling engine from ``rollout.engine`` and the model."""

from __future__ import annotations

from collections.abc import Callable

from poise.models.policy import ModelError, Policy
from poise.sampling import VLLM_MEMORY, EngineName
from poise.sampling import cached_engine as cached
from poise.sampling.cached_engine import CachedEngine
from poise.sampling.native import engine as native
from poise.sampling.native.engine import NativeEngine
from poise.sampling.requests import Engine
from poise.sampling.vllm_engine import VllmEngine


def choose(
    policy: Policy,
    choice: EngineName = "auto",
    batch: int = 0,
    note: Callable[[str], None] = print,
    *,
    memory: float = VLLM_MEMORY,
    micro_tokens: int | None = None,
) -> Engine:
    """Return the engine that ``choice`` names.

    ``auto`` selects the native engine, or ``CachedEngine`` if the native engine cannot decode with this model; ``note``
    logs this fallback. vLLM is opt-in: ``memory`` is vLLM's share of the device's memory, and ``micro_tokens`` the
    maximum number of tokens per pass in which the policy scores vLLM's responses.
    """
    if choice == "vllm":
        engine = VllmEngine(policy, batch, memory, micro_tokens)
        note(
            "sampling with vLLM, in this process: vLLM starts at the first prompts and takes up to "
            f"{memory:.0%} of the device's memory (rollout.vllm_memory)"
        )
        return engine
    name = type(policy.base).__name__
    if policy.length_limit is not None:
        note(
            f"{name}: the rotary embedding changes with length; poise uses the embedding for {policy.length_limit} "
            "tokens at every length"
        )
    if choice != "transformers" and native.supports(policy):
        return NativeEngine(policy, batch)
    if choice == "native":
        raise ModelError(f"rollout.engine=native cannot decode with {name}: use auto or transformers")
    if not cached.supports(policy):
        raise ModelError(
            f"{name}: sampling with transformers' cache does not give the log-probabilities of a plain forward pass, "
            "so poise cannot train this model; please report the architecture"
        )
    if choice == "auto":
        note(f"{name} cannot use the native engine; sampling falls back to transformers' cache, which is slower")
    return CachedEngine(policy, batch)
