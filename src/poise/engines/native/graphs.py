"""Decoding on CUDA: slots of fixed length for flash attention, and a step recorded once as a CUDA graph."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from poise.engines.native.decoder import Decoder
from poise.engines.native.kv_cache import Shape, SharedKeys, SlotKeys
from poise.models.attention import flash_takes
from poise.models.policy import ModelError, Policy
from poise.rollout.sampling import Sampling

SHARE = 0.85  # of the free memory that keys and values may take
STAY = 0.2  # of the device's memory that they may keep while they are not needed: an update needs the rest
WARM_UP = 2  # steps before one is recorded


class SlotMemoryError(torch.OutOfMemoryError, ModelError):
    """Not even one sequence fits. Shown as it is: it says what to do."""


def usable(policy: Policy, shapes: Sequence[Shape]) -> bool:
    """Whether the flash kernel that comes with torch takes this model's keys."""
    like = next(policy.trunk.parameters())
    return all(flash_takes(like, key, value) for _, key, value in shapes)


def decoder(
    policy: Policy, shapes: Sequence[Shape], slots: int, length: int, width: int, like: Tensor
) -> GraphedDecoder:
    """With as many slots as are asked for, or as fit into the memory that is free."""
    per_slot = slot_bytes(shapes, length, like.element_size())
    slots = affordable(slots, per_slot, free_bytes(like.device), length)
    return GraphedDecoder(policy, SlotKeys(shapes, slots, length, width, like))


def slot_bytes(shapes: Sequence[Shape], length: int, size: int) -> int:
    """Of the keys and values of one sequence."""
    return length * size * sum(heads * (key + value) for heads, key, value in shapes)


def free_bytes(device: torch.device) -> int:
    """What CUDA has left, and what torch holds without using it."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def affordable(slots: int, per_slot: int, free: int, length: int) -> int:
    """As many of the slots as fit."""
    fit = int(SHARE * free) // per_slot
    if fit < 1:
        raise SlotMemoryError(
            f"sampling: the keys and values of one sequence of {length} tokens take {per_slot / 2**30:.2f} GiB, and "
            f"{free / 2**30:.2f} GiB are free: lower rollout.max_tokens or rollout.max_prompt, or optim.micro_tokens, "
            "whose passes come first"
        )
    return min(slots, fit)


def may_stay(keys: SharedKeys | SlotKeys) -> bool:
    """Whether keys and values may stay in memory until the next call, with the graphs that were recorded for them."""
    if keys.device.type != "cuda":
        return True
    return keys.nbytes <= STAY * torch.cuda.get_device_properties(keys.device).total_memory


class GraphedDecoder(Decoder):
    """A step is recorded for a few numbers of rows, each setting of sampling apart, and played back after that.

    The weights are read where they are: an update in place is seen.
    """

    def __init__(self, policy: Policy, keys: SlotKeys) -> None:
        super().__init__(policy, keys)
        self.sizes = sizes(keys.slots)
        self.graphs: dict[tuple[int, Sampling], torch.cuda.CUDAGraph] = {}

    def size(self, n: int) -> int:
        """The next number of rows for which there may be a graph."""
        return self.sizes[bisect_left(self.sizes, n)] if n else 0

    def run(self, n: int, steps: int, sampling: Sampling, *, last: bool) -> None:  # noqa: ARG002
        """Play the step back ``steps`` times."""
        graph = self.graphs.get((n, sampling)) or self._record(n, sampling)
        self.tick.zero_()
        for _ in range(steps):
            graph.replay()

    def _record(self, n: int, sampling: Sampling) -> torch.cuda.CUDAGraph:
        """What the trial steps change is put back. The keys that they write are written again before anyone looks."""
        state = (self.hidden, self.keys.position, self.keys.count)
        kept = [x.clone() for x in state]
        head = self.policy.head(sampling.temperature or 1.0)

        def step() -> None:
            self.forward(n, self.draw(n, head, sampling))
            self.tick += 1
            self.keys.advance()

        self.tick.zero_()
        for _ in range(WARM_UP):
            step()
        torch.cuda.synchronize(self.hidden.device)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.graphs.values())).pool() if self.graphs else None
        with torch.cuda.graph(graph, pool=pool):
            step()
        for x, old in zip(state, kept, strict=True):
            x.copy_(old)
        self.graphs[n, sampling] = graph
        return graph


def sizes(slots: int) -> list[int]:
    """Powers of two and the steps half-way between them, from 8 up to all slots: at most a third of the rows idle."""
    found = {slots}
    for power in range(3, slots.bit_length()):
        found |= {size for size in (1 << power, 3 << power >> 1) if size <= slots}
    return sorted(found)
