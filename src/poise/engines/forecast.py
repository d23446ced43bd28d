"""Before a run: tell how much memory the keys and values of its responses may take, if that is much."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers.cache_utils import DynamicCache

from poise._lib import cuda_memory
from poise.engines.hf import CachedEngine
from poise.engines.native import graphs
from poise.engines.native.engine import PROMPT_STEP, NativeEngine
from poise.rollout.types import Engine

LARGE = 0.5  # of the free memory: less is not worth a note
GIB = 2**30


def announce(
    engine: Engine,
    note: Callable[[str], None],
    *,
    responses: int,
    max_prompt: int,
    max_tokens: int,
    max_episode: int | None = None,
) -> None:
    """Tell how much memory sampling may need, or refuse if not even one response fits.

    ``max_episode`` limits episodes of several turns, whose whole dialogue is in the memory.

    On CUDA a slot has room for the longest possible response, so fewer responses are decoded at a time if that is long.
    Elsewhere memory is taken as responses grow, and the figure assumes that all of them reach their limit.
    """
    if not isinstance(engine, NativeEngine | CachedEngine):  # vLLM has its own share of the memory
        return
    together = min(responses, engine.batch or responses)
    limit, after = ("max_tokens", max_tokens) if max_episode is None else ("max_episode_tokens", max_episode)
    length, device = max_prompt + after, engine.policy.device
    if isinstance(engine, NativeEngine) and graphs.usable(engine.policy, engine.shapes):
        length = -(-max_prompt // PROMPT_STEP) * PROMPT_STEP + after
        slot = graphs.slot_bytes(engine.shapes, length, next(engine.policy.trunk.parameters()).element_size())
        free_now = cuda_memory.free_bytes(device)
        fit = graphs.affordable(together, slot, free_now, length)
        if fit < together:
            note(
                f"sampling: the keys and values of a response take {slot / GIB:.2f} GiB (rollout.max_prompt + "
                f"rollout.{limit} = {length} tokens), so about {fit} of {together} responses are decoded at a time"
            )
        return
    free, need = free_bytes(device), together * length * token_bytes(engine)
    if free is not None and need > LARGE * free:
        note(
            f"sampling: keys and values would take {need / GIB:.1f} GiB if all of {together} responses reached "
            f"rollout.{limit}={after}, and {free / GIB:.1f} GiB are free; memory is taken as responses grow: "
            f"if it runs out, lower rollout.{limit} or rollout.batch"
        )


@torch.no_grad()
def token_bytes(engine: NativeEngine | CachedEngine) -> int:
    """Bytes of one token's keys and values in all layers."""
    if isinstance(engine, NativeEngine):
        return engine.token_bytes
    policy = engine.policy
    cache = DynamicCache(config=policy.trunk.config)
    one = torch.zeros((1, 1), dtype=torch.long, device=policy.device)
    policy.trunk(input_ids=one, past_key_values=cache, use_cache=True)
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))


def free_bytes(device: torch.device) -> int | None:
    """Free memory of the device; None where the system does not tell."""
    if device.type == "cuda":
        return cuda_memory.free_bytes(device)
    candidates = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        candidates += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
        candidates += [int(limit) - int(used)] if limit != "max" else []
    except (OSError, ValueError, IndexError):  # not Linux, or no control group with a limit
        pass
    return max(min(candidates), 0) if candidates else None
