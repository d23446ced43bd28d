"""The native engine's session: it keeps the keys and values of dialogues between their turns.

The package's docstring describes the life of a row. Between calls, a session holds the rows of the previous call;
during a call, it holds the rows of both calls. Rows that do not fit into memory are not kept; their dialogues are read
again and counted (``reread``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from poise._lib import device as _device
from poise.sampling.draws import Sampling
from poise.sampling.native.kv_cache import SavedRow, SharedPromptCache
from poise.sampling.native.slot_cache import SlotCache
from poise.sampling.requests import Completion, Done, Request, Session

if TYPE_CHECKING:
    from poise.sampling.native.engine import NativeEngine

KEPT_BYTES = 4 << 30  # limit on a CPU; fixed, because other processes must not change which rows are kept
KEPT_SHARE = 0.5  # on CUDA: the share of the free memory for kept rows
RESERVED_SHARE = 0.4  # on CUDA: the share of the free memory for slots with the longest expected dialogue's length


class NativeSession(Session):
    """A session that keeps keys and values between calls. Close it before the weights change."""

    engine: NativeEngine

    def __init__(self, engine: NativeEngine, length: int | None = None) -> None:
        super().__init__(engine)
        self._rows: dict[int, SavedRow] = {}  # rows of the previous call, by number
        self._length, self._slots = length or 0, 0  # the cache on CUDA; both only grow, so that graphs can be reused

    def _sample(
        self, requests: Sequence[Request], sampling: Sampling, seed: int, done: Done | None
    ) -> list[Completion]:
        if not any(request.keep or request.continues is not None for request in requests):
            self._rows = {}
            return self.engine.sample(requests, sampling, seed, done)
        if not self.engine.keeps_keys:
            return super()._sample(requests, sampling, seed, done)
        kept_rows = KeptRows(self._rows, self.engine.token_bytes)
        self._rows = {}
        sampled = self.engine.run(requests, sampling, seed, done, kept_rows, self._reserve(requests))
        self._rows = kept_rows.after
        self.continued += kept_rows.continued
        self.reread += kept_rows.reread
        return sampled

    def _reserve(self, requests: Sequence[Request]) -> tuple[int, int]:
        """Return the minimum cache size on CUDA, (slots, tokens per slot). If slots are too short, the length doubles.

        A cache of another size needs new CUDA graphs, and recording graphs takes longer than a turn.
        """
        if self.engine.policy.device.type != "cuda":
            return 0, 0
        slots, length = self.engine.cache_sizes(requests)
        self._slots = max(self._slots, slots)
        reserved = max(length, self._length if length <= self._length else 2 * self._length)
        reserved = max(length, min(reserved, self.engine.policy.positions or reserved))
        free = _device.free_bytes(self.engine.policy.device)
        if not _device.is_planned():
            free += self.engine.cache_bytes
        if self._slots * reserved * self.engine.token_bytes > RESERVED_SHARE * free:
            return self._slots, length
        self._length = reserved
        return self._slots, reserved

    def close(self) -> None:
        """End the session, and free the keys."""
        super().close()
        self._rows = {}
        self.engine.release_if_large()


class KeptRows:
    """The rows that a call may continue, and the rows that it keeps for the next call, by request number."""

    def __init__(self, before: dict[int, SavedRow], token_bytes: int) -> None:
        self.before, self.after, self.token_bytes = before, dict[int, SavedRow](), token_bytes
        self.continued = self.reread = 0

    def find(self, request: Request) -> SavedRow | None:
        """Return the row that a request continues; None if the whole prompt must be read."""
        if request.continues is None:
            return None
        row = self.before.get(request.continues)
        self.continued += row is not None
        self.reread += row is None
        return row

    def save(
        self, cache: SharedPromptCache | SlotCache, rows: Sequence[int], numbers: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Copy as many of these rows as fit into memory out of the cache."""
        if not rows:
            return
        fit = int(self._room(cache.device) // (max(lengths) * self.token_bytes))
        if fit > 0:
            saved = cache.copy_out(rows[:fit], lengths[:fit])
            self.after.update(zip(numbers[:fit], saved, strict=True))

    def _room(self, device: torch.device) -> float:
        if device.type == "cuda" and not _device.is_planned():
            return KEPT_SHARE * _device.free_bytes(device)  # kept rows already reduce the free memory
        most = KEPT_SHARE * _device.free_bytes(device) if device.type == "cuda" else KEPT_BYTES
        blocks = {id(row.block): row.block for row in (*self.before.values(), *self.after.values())}
        return most - sum(x.nbytes for block in blocks.values() for x in block)
