"""Assigns the requests of one call to the rows of a decoder."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from poise._lib.device import send
from poise.batch import Prompt
from poise.sampling.draws import Sampling
from poise.sampling.native.decoder import Decoder, RowLengths, UnreadPrompt
from poise.sampling.native.kv_cache import FIRST_ROOM
from poise.sampling.native.session import KeptRows
from poise.sampling.requests import Completion, Done, Request, completions, numbers, stop_table

IDLE = Request(Prompt((0,)), 0)  # the placeholder for a decoded row without a sequence


class Scheduler:
    """Assigns requests to rows, first come, first served, and collects their responses.

    ``kept_rows`` holds the rows that requests may continue, and stores the rows for the next call. The package's
    docstring describes the life of a row.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        decoder: Decoder,
        sampling: Sampling,
        seed: int,
        done: Done | None = None,
        kept_rows: KeptRows | None = None,
    ) -> None:
        self.kept_rows = kept_rows
        self.requests, self.decoder, self.sampling, self.seed, self.done = requests, decoder, sampling, seed, done
        self.cache, self.device = decoder.cache, decoder.hidden.device
        prompt_numbers: dict[Prompt, int] = {}
        self.prompt_of = [prompt_numbers.setdefault(r.prompt, len(prompt_numbers)) for r in requests]
        self.numbers = numbers(requests)
        self.waiting = deque(range(len(requests)))
        self.rows: list[int] = []  # the request in each row; −1: none
        self.counts = [0] * len(requests)  # response tokens so far
        self.stopped = [False] * len(requests)  # whether a stop token has ended the response

        self.limit = max(request.max_tokens for request in requests)
        self.room = min(FIRST_ROOM, self.limit)  # tokens per response allocated so far
        shape = (len(requests) + 1, self.room)  # (R + 1, T): discarded tokens go to the last row
        self.tokens = torch.zeros(shape, dtype=torch.long, device=self.device)
        self.logp, self.entropy = (torch.zeros(shape, device=self.device) for _ in range(2))
        self.stop_tokens = send(stop_table(requests), self.device)

    def work(self) -> list[Completion]:
        """Decode until no request waits and every row is free. Returns the responses in order."""
        self.decoder.clear()
        while True:
            self._admit()
            self._close_up()
            if not self.rows:
                return self._results()
            self._decode()
            self._free_rows()

    def _admit(self) -> None:
        """Assign free rows to waiting requests. A prompt is read when its first request gets a row."""
        free = [row for row, request in enumerate(self.rows) if request < 0]
        free += range(len(self.rows), self.cache.slots)
        admitted = [(row, self.waiting.popleft()) for row in free[: len(self.waiting)]]
        if not admitted:
            return
        self.rows += [-1] * (max(row for row, _ in admitted) + 1 - len(self.rows))
        unread: dict[int, UnreadPrompt] = {}
        for row, i in admitted:
            self.rows[row] = i
            if (number := self.prompt_of[i]) not in self.cache.home and number not in unread:
                saved = self.kept_rows.find(self.requests[i]) if self.kept_rows is not None else None
                unread[number] = UnreadPrompt(number, row, self.requests[i].prompt, saved)
        self.decoder.read([*unread.values()])
        rows, requests = zip(*admitted, strict=True)
        self.decoder.occupy(list(rows), [self.prompt_of[request] for request in requests])

    def _close_up(self) -> None:
        """Move sequences from the last rows into free rows if this reduces the number of decoded rows."""
        size = self.decoder.decoded_rows(sum(request >= 0 for request in self.rows))
        sources = [row for row in range(size, len(self.rows)) if self.rows[row] >= 0]
        holes = [row for row in range(min(size, len(self.rows))) if self.rows[row] < 0][: len(sources)]
        if sources:
            self.decoder.move(sources, holes)
        for source, hole in zip(sources, holes, strict=True):
            self.rows[hole] = self.rows[source]
        self.rows = self.rows[:size] + [-1] * (size - len(self.rows))

    def _decode(self) -> None:
        """Decode a few tokens in all rows, then check which rows have ended. The host waits only for this check."""
        n = len(self.rows)
        requests = [self.requests[i] if i >= 0 else IDLE for i in self.rows]
        counts = [self.counts[i] if i >= 0 else 0 for i in self.rows]
        left = [request.max_tokens - count for request, count in zip(requests, counts, strict=True)]
        row_numbers = [self.numbers[i] if i >= 0 else -1 for i in self.rows]
        steps = min(self.decoder.steps_per_look, max(left))
        prompt_lengths = [len(request.prompt.tokens) for request in requests]
        rows = RowLengths(prompt_lengths, counts, [request.max_tokens for request in requests])
        self.decoder.decode(rows, row_numbers, steps, self.sampling, self.seed, last=steps == max(left))

        owner, count, room = send(torch.tensor([self.rows, counts, left]), self.device)  # (n,) each
        step = torch.arange(steps, device=self.device)[:, None]
        tokens = self.decoder.tokens[:steps, :n]
        stops = (tokens[..., None] == self.stop_tokens[owner]).any(-1)  # (steps, n)
        valid = (stops.cumsum(0) - stops.long() == 0) & (step < room)  # up to the first stop token or the limit
        self._make_room(min(max(counts) + steps, self.limit))
        place = torch.where(valid, owner * self.room + count + step, len(self.requests) * self.room)
        decoded = (self.decoder.tokens, self.decoder.logp, self.decoder.entropy)
        for store, new in zip((self.tokens, self.logp, self.entropy), decoded, strict=True):
            store.view(-1)[place] = new[:steps, :n]
        lengths, stopped = torch.stack([valid.sum(0), (stops & valid).any(0)]).tolist()
        for i, length, stop in zip(self.rows, lengths, stopped, strict=True):
            if i >= 0:
                self.counts[i] += length
                self.stopped[i] = bool(stop)

    def _make_room(self, need: int) -> None:
        """Double the room for response tokens until ``need`` tokens fit."""
        while self.room < need:
            more = min(self.room, self.limit - self.room)
            self.tokens, self.logp, self.entropy = (
                torch.nn.functional.pad(x, (0, more)) for x in (self.tokens, self.logp, self.entropy)
            )
            self.room += more

    def _free_rows(self) -> None:
        """Free the rows of responses that have ended, and report those responses."""
        ended = [
            row
            for row, i in enumerate(self.rows)
            if i >= 0 and (self.stopped[i] or self.counts[i] == self.requests[i].max_tokens)
        ]
        self._keep(ended)
        self.decoder.free(ended)
        if self.done is not None and ended:
            finished = [self.rows[row] for row in ended]
            tokens = self.tokens[send(finished, self.device)].tolist()
            for i, row_tokens in zip(finished, tokens, strict=True):
                self.done(i, row_tokens[: self.counts[i]])
        for row in ended:
            self.rows[row] = -1

    def _keep(self, ended: list[int]) -> None:
        """Save the keys of ended requests with ``keep=True``, except the last token's, which may not exist yet."""
        rows = [row for row in ended if self.requests[self.rows[row]].keep]
        if self.kept_rows is None or not rows:
            return
        owners = [self.rows[row] for row in rows]
        lengths = [len(self.requests[i].prompt.tokens) + self.counts[i] - 1 for i in owners]
        self.kept_rows.save(self.cache, rows, [self.numbers[i] for i in owners], lengths)

    def _results(self) -> list[Completion]:
        used = max(self.counts)
        tokens, logp, entropy = (x[:-1, :used] for x in (self.tokens, self.logp, self.entropy))
        return completions(self.counts, self.stopped, tokens, logp, entropy)
