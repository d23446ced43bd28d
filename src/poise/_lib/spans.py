"""Indices of many short runs at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from poise._lib.transfer import send


def spans(begin: Sequence[int], lengths: Sequence[int], device: torch.device, stride: int = 1) -> Tensor:
    """``begin[i]``, ``begin[i] + stride``, …, ``lengths[i]`` of them, for one i after another; the host does not wait.

    >>> spans([10, 50], [3, 2], torch.device("cpu"))
    tensor([10, 11, 12, 50, 51])
    """
    ends = [0, *accumulate(lengths)]
    begins, firsts, counts = send(torch.tensor([list(begin), ends[:-1], list(lengths)]), device)
    owner = torch.repeat_interleave(counts, output_size=ends[-1])
    places: Tensor = begins[owner] + (torch.arange(ends[-1], device=device) - firsts[owner]) * stride
    return places
