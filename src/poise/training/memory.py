"""Forecasts a run's device memory from its settings, and limits the size of passes before the first pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from poise._lib.determinism import deterministic, fix_workspace
from poise._lib.errors import bytes_text
from poise.models.activations import FEWEST_TOKENS, Passes, choose_passes
from poise.models.footprint import Footprint, Rows
from poise.models.loading import resolve_device
from poise.models.policy import BUSY_WORK, Policy
from poise.sampling.native.graphs import idle_bytes
from poise.training.config.groups import LoraConfig
from poise.training.config.schema import Config
from poise.training.frozen_models import START

FEWEST_RESPONSE = 64  # tokens: the advice never suggests a shorter limit


def repeatable(config: Config) -> AbstractContextManager[None]:
    """The ``deterministic`` context for a run with ``deterministic=true``; otherwise a context that does nothing."""
    device = resolve_device(config.device)
    if not config.deterministic or device.type != "cuda":
        return nullcontext()
    fix_workspace()  # before CUDA starts
    least = footprint(config, config.model_name)
    return deterministic(device, None if least is None else least.total)


def bound_passes(policy: Policy, memory: Footprint, micro_tokens: int | None, note: Callable[[str], None]) -> None:
    """Limit the tokens per pass, and turn on gradient checkpointing, if the forecast requires it."""
    if memory.activations is None or memory.rows is None or not policy.packed:
        return
    of, longest, most = memory.activations, memory.rows.longest, policy.budget(micro_tokens)
    cache = memory.rows.count * longest * of.cache
    beside = cache if cache <= idle_bytes(policy.device) else 0  # a larger cache is released before the update
    busy = max(FEWEST_TOKENS, BUSY_WORK // memory.parameters)
    room = memory.room(policy.device) - beside
    passes = choose_passes(of, room, most, int(busy), longest) or Passes(min(most, longest), True)
    if passes == Passes(most, False):
        return
    policy.most_tokens = passes.tokens
    how = ""
    if passes.checkpointed and policy.save_memory():
        how = ", computed twice (gradient checkpointing)"
    whole, left = bytes_text(of.peak(most, checkpointed=False)), bytes_text(max(0, int(room)))
    note(f"passes of {passes.tokens:,} tokens{how}: {most:,} would take {whole}, and the device has {left} for them")


def needed_bytes(config: Config) -> tuple[int, int] | None:
    """The least device memory of a run, and the memory for passes and a KV cache that keep a shared GPU busy.

    None if the memory cannot be forecast.
    """
    memory = footprint(config, config.model_name, passes=True)
    if memory is None or memory.activations is None or memory.rows is None:
        return None
    a_pass = memory.activations.peak(max(FEWEST_TOKENS, memory.rows.longest), checkpointed=False)
    cache = memory.rows.count * memory.rows.longest * memory.activations.cache
    return memory.least, max(memory.least, memory.total + max(a_pass, cache))


def smaller_footprints(config: Config, name: str) -> Iterator[tuple[str, Footprint | None]]:
    """Yield changes of settings that save memory, each with the memory forecast after the change."""
    if config.lora is None:
        adapter = config.model_copy(update={"lora": LoraConfig()})
        yield "train an adapter, lora.rank=16", footprint(adapter, name, passes=True)
    if config.lora is None and not config.optim.eight_bit:
        small = config.model_copy(update={"optim": config.optim.model_copy(update={"eight_bit": True})})
        yield "keep the optimizer's moments in 8 bits, optim.eight_bit=true", footprint(small, name, passes=True)
    if config.objective.kl_coef and config.lora is None:
        plain = config.model_copy(update={"objective": replace(config.objective, kl_coef=0.0)})
        change = "set objective.kl_coef=0, which needs no copy of the starting weights"
        yield change, footprint(plain, name, passes=True)
    fewer = config.rollout.max_tokens // 4
    if fewer >= FEWEST_RESPONSE:
        rollout = config.rollout.model_copy(update={"max_tokens": fewer, "max_episode_tokens": None})
        shorter = config.model_copy(update={"rollout": rollout})
        yield f"set rollout.max_tokens={fewer}", footprint(shorter, name, passes=True)


def footprint(config: Config, name: str, *, passes: bool = False) -> Footprint | None:
    """Forecast the memory for training the named model; ``passes`` adds the memory of passes and of the KV cache."""
    frozen = set(getattr(config.build_algorithm(), "models", {}).values())
    copies = bool(config.objective.kl_coef) or START in frozen
    rollout = config.rollout
    together = min(rollout.batch or config.prompts * config.group, config.prompts * config.group)
    rows = Rows(rollout.max_prompt, rollout.longest - rollout.max_prompt, config.group, together)
    return Footprint.of(
        name,
        device=config.device,
        dtype=config.dtype,
        lora=config.lora,
        copies=copies,
        remote_code=config.remote_code,
        moments=config.optim.moment_bytes,
        rows=rows if passes else None,
    )
