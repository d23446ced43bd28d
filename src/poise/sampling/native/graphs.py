"""Decoding on CUDA: records a step once as a CUDA graph, then replays the graph."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from poise._lib import device as _device
from poise.models.attention import Shape, flash_takes
from poise.models.policy import ModelError, Policy
from poise.sampling.draws import Sampling
from poise.sampling.native.decoder import Decoder
from poise.sampling.native.fused_step import FusedStep
from poise.sampling.native.kv_cache import CacheSizes
from poise.sampling.native.slot_cache import SlotCache

CACHE_SHARE = 0.85  # the share of the free memory that the cache may take
IDLE_SHARE = 0.2  # the share of the device's memory that the cache may keep between two calls; an update needs the rest
WARM_UP = 2  # steps that run before one is recorded


class SlotMemoryError(torch.OutOfMemoryError, ModelError):
    """Not even one sequence fits. The command line shows no traceback, because the message says what to do."""


def usable(policy: Policy, shapes: Sequence[Shape]) -> bool:
    """Whether torch's flash kernel accepts the keys and values of this model."""
    like = next(policy.trunk.parameters())
    return all(flash_takes(like, key, value) for _, key, value in shapes)


def graphed_decoder(
    policy: Policy, shapes: Sequence[Shape], sizes: CacheSizes, step: FusedStep | None = None
) -> GraphedDecoder:
    """Build a decoder with as many of the requested slots as fit into the free memory."""
    like, width = next(policy.trunk.parameters()), policy.head().weight.shape[1]
    length = sizes.longest_prompt + sizes.max_tokens
    slots = affordable(
        sizes.slots, slot_bytes(shapes, length, like.element_size()), _device.free_bytes(like.device), length
    )
    return GraphedDecoder(policy, SlotCache(shapes, slots, length, width, like), step)


def slot_bytes(shapes: Sequence[Shape], length: int, element_size: int) -> int:
    """Return the bytes of one sequence's keys and values."""
    return length * element_size * sum(heads * (key + value) for heads, key, value in shapes)


def affordable(slots: int, per_slot: int, free: int, length: int) -> int:
    """Return how many of the requested slots fit into the free memory."""
    fit = int(CACHE_SHARE * free) // per_slot
    if fit < 1:
        raise SlotMemoryError(
            f"sampling: the keys and values of one sequence of {length} tokens take {per_slot / 2**30:.2f} GiB, and "
            f"{free / 2**30:.2f} GiB are free: lower rollout.max_tokens (for episodes of several turns: "
            "rollout.max_episode_tokens), rollout.max_prompt or optim.micro_tokens, whose passes take memory first"
        )
    return min(slots, fit)


def idle_bytes(device: torch.device) -> float:
    """Return the maximum bytes of a cache that stays in memory between two calls."""
    return IDLE_SHARE * _device.total_bytes(device)


class GraphedDecoder(Decoder):
    """Records and replays a graph for each number of rows in ``sizes`` and each ``Sampling``.

    A graph reads the weights at fixed addresses, so in-place updates take effect. It runs the fused ``step`` if there
    is one, else the model's own code.
    """

    cache: SlotCache

    def __init__(self, policy: Policy, cache: SlotCache, step: FusedStep | None = None) -> None:
        super().__init__(policy, cache)
        self.step = step
        self.sizes = sizes(cache.slots)
        self.graphs: dict[tuple[int, Sampling], torch.cuda.CUDAGraph] = {}

    def decoded_rows(self, sequences: int) -> int:
        """Return the smallest size in ``sizes`` with room for these sequences."""
        return self.sizes[bisect_left(self.sizes, sequences)] if sequences else 0

    def run(self, n: int, steps: int, sampling: Sampling, *, last: bool) -> None:  # noqa: ARG002
        """Replay the step ``steps`` times."""
        graph = self.graphs.get((n, sampling)) or self._record(n, sampling)
        self.step_number.zero_()
        for _ in range(steps):
            graph.replay()

    def forward(self, n: int, token: Tensor) -> None:
        """Run the tokens (n,) just drawn through the model."""
        if self.step is None:
            super().forward(n, token)
            return
        self.cache.begin_step()
        self.hidden[:n] = self.step.run(token, self.cache)

    def _record(self, n: int, sampling: Sampling) -> torch.cuda.CUDAGraph:
        """Record a step, and undo the changes of the warm-up steps.

        Keys from the warm-up steps stay in the cache, but replayed steps overwrite these keys before reading them.
        """
        state = (self.hidden, self.cache.positions, self.cache.counts)
        saved = [x.clone() for x in state]
        head = self.policy.head(sampling.temperature or 1.0)

        def step() -> None:
            self.forward(n, self.draw(n, head, sampling))
            self.step_number += 1
            self.cache.advance()

        self.step_number.zero_()
        for _ in range(WARM_UP):
            step()
        device, graph = self.hidden.device, torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        pool = next(iter(self.graphs.values())).pool() if self.graphs else None
        # "thread_local": an environment that answers in another thread may use CUDA at the same time.
        with (
            torch.cuda.device(device),
            torch.cuda.graph(graph, pool=pool, stream=_stream(device), capture_error_mode="thread_local"),
        ):
            step()
        for x, old in zip(state, saved, strict=True):
            x.copy_(old)
        self.graphs[n, sampling] = graph
        return graph


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that records graphs on this device.

    torch's own stream for recording belongs to the device that was current first, and records nothing on another one.
    """
    return torch.cuda.Stream(device)


def sizes(slots: int) -> list[int]:
    """Return powers of two and the numbers half-way between them, from 8 to ``slots``: at most a third of rows idle."""
    chosen = {slots}
    for power in range(3, slots.bit_length()):
        chosen |= {size for size in (1 << power, 3 << power >> 1) if size <= slots}
    return sorted(chosen)
