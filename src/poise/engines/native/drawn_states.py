"""The hidden states that the tokens of a call were drawn from, kept for a regulator that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from poise._lib import cuda_memory
from poise._lib.spans import spans

MOST_BYTES = 2 << 30  # on a CPU; fixed, because a run must not depend on what else the machine does
SHARE = 0.2  # on CUDA, of the memory that is free beside the cache: putting states in order needs it twice


def most_bytes(device: torch.device, free: float | None = None) -> float:
    """Bytes of states that one call may keep; ``free`` if the memory of the device is known already."""
    if device.type != "cuda":
        return MOST_BYTES
    return SHARE * (cuda_memory.free_bytes(device) if free is None else free)


class DrawnStates:
    """Takes the states of the tokens that responses keep, a few steps at a time, and puts them in row order.

    A call that draws more than there is memory for keeps none: whoever needs the states runs the model again.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.most = device, most_bytes(device)
        self.bytes = 0
        self._parts: list[Tensor] = []  # (tokens, W) of each look, row after row
        self._looks: list[tuple[list[int], list[int], list[int]]] = []  # requests of the rows, counts, lengths

    def take(self, drawn: Tensor, requests: Sequence[int], counts: Sequence[int], lengths: Sequence[int]) -> None:
        """Keep the first ``lengths`` states of each row of ``drawn`` (steps, S, W).

        Row r belongs to request ``requests[r]``, which has ``counts[r]`` tokens from earlier looks.
        """
        slots, width = drawn.shape[1:]
        self.bytes += sum(lengths) * width * drawn.element_size()
        if self.bytes > self.most:
            self._parts, self._looks = [], []
            return
        self._parts.append(drawn.view(-1, width)[spans(range(len(lengths)), lengths, self.device, stride=slots)])
        self._looks.append((list(requests), list(counts), list(lengths)))

    def in_order(self, counts: Sequence[int]) -> Tensor | None:
        """(n, W) the states of all responses, of ``counts`` tokens each, one after another; None if they were many."""
        if not self._parts or self.bytes > self.most:
            return None
        first = [0, *accumulate(counts)]
        states = torch.empty((first[-1], self._parts[0].shape[1]), dtype=self._parts[0].dtype, device=self.device)
        for part, (requests, before, lengths) in zip(self._parts, self._looks, strict=True):
            begin = [first[i] + count for i, count in zip(requests, before, strict=True)]
            states[spans(begin, lengths, self.device)] = part
        self._parts = []
        return states
