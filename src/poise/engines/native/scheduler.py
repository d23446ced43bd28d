"""One call's requests: those that wait, those that have a row, and what comes out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from poise._lib.transfer import send
from poise.engines.native.decoder import Decoder
from poise.engines.native.kv_cache import FIRST
from poise.models.packing import first_fit
from poise.rollout.sampling import Sampling, uniform
from poise.rollout.types import Done, Request, Rollouts, end_table

PASS = 8192  # prompt tokens that are read together


NOBODY = Request([0], 0)  # in a row that is decoded for nothing


class Queue:
    """Requests on their way through the rows of a decoder, first come, first served."""

    def __init__(
        self, requests: Sequence[Request], decoder: Decoder, sampling: Sampling, seed: int, done: Done | None = None
    ) -> None:
        self.requests, self.decoder, self.sampling, self.seed, self.done = requests, decoder, sampling, seed, done
        self.keys, self.device = decoder.keys, decoder.hidden.device
        numbers: dict[tuple[int, ...], int] = {}
        self.prompt_of = [numbers.setdefault(tuple(request.prompt), len(numbers)) for request in requests]
        self.waiting = deque(range(len(requests)))
        self.rows: list[int] = []  # the request in each row; −1: none
        self.counts = [0] * len(requests)  # tokens so far
        self.stopped = [False] * len(requests)

        self.limit = max(request.max_tokens for request in requests)
        self.width = min(FIRST, self.limit)  # tokens of a response that there is room for so far
        places = (len(requests) + 1, self.width)  # the last row takes what nobody wants
        self.tokens = torch.zeros(places, dtype=torch.long, device=self.device)
        self.logp, self.entropy = (torch.zeros(places, device=self.device) for _ in range(2))
        self.ends = end_table(requests, self.device)

    def work(self) -> Rollouts:
        """Until nothing waits and no row is taken."""
        self.keys.clear()
        while True:
            self._admit()
            self._close_up()
            if not self.rows:
                return self._results()
            self._decode()
            self._drop()

    def _admit(self) -> None:
        """Waiting requests into free rows. A prompt is read for the first of its requests."""
        free = [row for row, request in enumerate(self.rows) if request < 0]
        free += range(len(self.rows), self.keys.slots)
        new = [(row, self.waiting.popleft()) for row in free[: len(self.waiting)]]
        if not new:
            return
        self.rows += [-1] * (max(row for row, _ in new) + 1 - len(self.rows))
        unread: dict[int, tuple[int, int]] = {}
        for row, request in new:
            self.rows[row] = request
            if self.prompt_of[request] not in self.keys.home:
                unread.setdefault(self.prompt_of[request], (row, request))
        items = [(prompt, row, list(self.requests[request].prompt)) for prompt, (row, request) in unread.items()]
        for part in first_fit([len(text) for _, _, text in items], PASS):
            numbers, rows, texts = zip(*(items[i] for i in part), strict=True)
            self.decoder.read(list(texts), list(numbers), list(rows))
        taken = [row for row, _ in new]
        states = self.keys.join(taken, [self.prompt_of[request] for _, request in new])
        self.decoder.hidden[send(taken, self.device)] = states

    def _close_up(self) -> None:
        """Sequences from the end into free rows, where fewer rows are then decoded."""
        size = self.decoder.size(sum(request >= 0 for request in self.rows))
        sources = [row for row in range(size, len(self.rows)) if self.rows[row] >= 0]
        holes = [row for row in range(min(size, len(self.rows))) if self.rows[row] < 0][: len(sources)]
        if sources:
            self.keys.move(sources, holes)
            self.decoder.hidden[send(holes, self.device)] = self.decoder.hidden[send(sources, self.device)]
        for a, b in zip(sources, holes, strict=True):
            self.rows[b] = self.rows[a]
        self.rows = self.rows[:size] + [-1] * (size - len(self.rows))

    def _decode(self) -> None:
        """A few steps for all rows, then a look at what has ended: the only time that the host waits."""
        n = len(self.rows)
        held = [self.requests[i] if i >= 0 else NOBODY for i in self.rows]
        counts = [self.counts[i] if i >= 0 else 0 for i in self.rows]
        left = [request.max_tokens - count for request, count in zip(held, counts, strict=True)]
        numbers = [i if request.number is None else request.number for i, request in zip(self.rows, held, strict=True)]
        row, count, room, number = send(torch.tensor([self.rows, counts, left, numbers]), self.device)
        steps = min(self.decoder.every, max(left))
        order = torch.arange(steps, device=self.device)[:, None]
        self.keys.place([len(request.prompt) for request in held], counts, [request.max_tokens for request in held])
        self.decoder.points[:steps, :n] = uniform(self.seed, number[None], count + order)
        self.decoder.run(n, steps, self.sampling, last=steps == max(left))

        tokens = self.decoder.tokens[:steps, :n]
        ending = (tokens[..., None] == self.ends[row]).any(-1)
        wanted = (ending.cumsum(0) - ending.long() == 0) & (order < room)
        self._widen(min(max(counts) + steps, self.limit))
        place = torch.where(wanted, row * self.width + count + order, len(self.requests) * self.width)
        for store, new in ((self.tokens, tokens), (self.logp, self.decoder.logp), (self.entropy, self.decoder.entropy)):
            store.view(-1)[place] = new[:steps, :n]
        lengths, stopped = torch.stack([wanted.sum(0), (ending & wanted).any(0)]).tolist()
        for i, length, stop in zip(self.rows, lengths, stopped, strict=True):
            if i >= 0:
                self.counts[i] += length
                self.stopped[i] = bool(stop)

    def _widen(self, need: int) -> None:
        """Room for responses of so many tokens: twice as much as there was, as often as it takes."""
        while self.width < need:
            more = min(self.width, self.limit - self.width)
            self.tokens, self.logp, self.entropy = (
                torch.nn.functional.pad(x, (0, more)) for x in (self.tokens, self.logp, self.entropy)
            )
            self.width += more

    def _drop(self) -> None:
        """Free the rows of what has ended."""
        ended = [
            row
            for row, i in enumerate(self.rows)
            if i >= 0 and (self.stopped[i] or self.counts[i] == self.requests[i].max_tokens)
        ]
        self.keys.leave(ended)
        if self.done is not None and ended:
            finished = [self.rows[row] for row in ended]
            tokens = self.tokens[send(finished, self.device)].tolist()
            for i, row_tokens in zip(finished, tokens, strict=True):
                self.done(i, row_tokens[: self.counts[i]])
        for row in ended:
            self.rows[row] = -1

    def _results(self) -> Rollouts:
        used = max(self.counts)
        tokens, logp, entropy = (x[:-1, :used] for x in (self.tokens, self.logp, self.entropy))
        mask = torch.arange(used, device=self.device) < send(self.counts, self.device)[:, None]
        prompts = [list(request.prompt) for request in self.requests]
        finished = send(torch.tensor(self.stopped), self.device)
        extents = [(count, count) for count in self.counts]
        return Rollouts(prompts, tokens, mask, logp, entropy, finished, extents=extents)
