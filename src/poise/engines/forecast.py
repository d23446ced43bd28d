"""Before a run: how much memory the keys and values of its responses may take, where that is much."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers.cache_utils import DynamicCache

from poise.engines.hf import CachedEngine
from poise.engines.native import graphs
from poise.engines.native.engine import STEP, NativeEngine
from poise.rollout.types import Engine

LARGE = 0.5  # of the free memory: what is less is not worth a word
GIB = 2**30


def announce(engine: Engine, note: Callable[[str], None], *, responses: int, max_prompt: int, max_tokens: int) -> None:
    """Tell what sampling so many responses may need, or refuse where not even one fits.

    On CUDA a slot has room for the longest response there may be, so fewer are decoded at a time where that is long.
    Elsewhere room is taken as responses grow, and the figure is what it would be if all reached their limit.
    """
    if not isinstance(engine, NativeEngine | CachedEngine):  # vLLM has a share of its own
        return
    together = min(responses, engine.batch or responses)
    length, device = max_prompt + max_tokens, engine.policy.device
    if isinstance(engine, NativeEngine) and graphs.usable(engine.policy, engine.shapes):
        length = -(-max_prompt // STEP) * STEP + max_tokens
        slot = graphs.slot_bytes(engine.shapes, length, next(engine.policy.trunk.parameters()).element_size())
        fit = graphs.affordable(together, slot, graphs.free_bytes(device), length)
        if fit < together:
            note(
                f"sampling: the keys and values of a response take {slot / GIB:.2f} GiB (rollout.max_prompt + "
                f"rollout.max_tokens = {length} tokens), so about {fit} of {together} responses are decoded at a time"
            )
        return
    free, need = free_bytes(device), together * length * token_bytes(engine)
    if free is not None and need > LARGE * free:
        note(
            f"sampling: keys and values would take {need / GIB:.1f} GiB if all of {together} responses reached "
            f"rollout.max_tokens={max_tokens}, and {free / GIB:.1f} GiB are free; memory is taken as responses grow: "
            "should it run out, lower rollout.max_tokens or rollout.batch"
        )


@torch.no_grad()
def token_bytes(engine: NativeEngine | CachedEngine) -> int:
    """Of one token's keys and values, in all layers."""
    policy = engine.policy
    if isinstance(engine, NativeEngine):  # which keeps them in float32 where no flash kernel reads them
        return graphs.slot_bytes(engine.shapes, 1, max(4, next(policy.trunk.parameters()).element_size()))
    cache = DynamicCache(config=policy.trunk.config)
    one = torch.zeros((1, 1), dtype=torch.long, device=policy.device)
    policy.trunk(input_ids=one, past_key_values=cache, use_cache=True)
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))


def free_bytes(device: torch.device) -> int | None:
    """Memory that is free on the device; None where nobody says."""
    if device.type == "cuda":
        return graphs.free_bytes(device)
    found = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
        found += [int(limit) - int(used)] if limit != "max" else []
    except (OSError, ValueError, IndexError):  # another system, or no limit of its own
        pass
    return max(min(found), 0) if found else None
