"""The requests of one call on their way through the rows of a decoder."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from poise._lib.device import send
from poise.batch import Prompt
from poise.engines.native.decoder import Decoder
from poise.engines.native.kept_rows import KeptRows
from poise.engines.native.kv_cache import FIRST_ROOM, SavedRow
from poise.models.packing import first_fit
from poise.rollout.sampling import Sampling, uniform
from poise.rollout.types import Completion, Done, Request, completions, end_table, numbers

PASS_TOKENS = 8192  # prompt tokens that are read in one pass
IDLE = Request(Prompt((0,)), 0)  # stands for the request of a row that is decoded for nothing


class Scheduler:
    """Gives requests rows, first come, first served, and collects their responses.

    ``kept`` has the rows that requests may continue, and takes those that they ask to keep.
    ``engines/native/kv_cache.py`` tells the life of a row.
    """

    def __init__(
        self, requests: Sequence[Request], decoder: Decoder, sampling: Sampling, seed: int, done: Done | None = None,
        kept: KeptRows | None = None,
    ) -> None:  # fmt: skip
        self.kept = kept
        self.requests, self.decoder, self.sampling, self.seed, self.done = requests, decoder, sampling, seed, done
        self.cache, self.device = decoder.cache, decoder.hidden.device
        prompt_numbers: dict[Prompt, int] = {}
        self.prompt_of = [prompt_numbers.setdefault(r.prompt, len(prompt_numbers)) for r in requests]
        self.numbers = numbers(requests)
        self.waiting = deque(range(len(requests)))
        self.rows: list[int] = []  # the request in each row; −1: none
        self.counts = [0] * len(requests)  # tokens so far
        self.stopped = [False] * len(requests)  # whether a stop token has ended the response

        self.limit = max(request.max_tokens for request in requests)
        self.room = min(FIRST_ROOM, self.limit)  # tokens of a response that there is memory for so far
        shape = (len(requests) + 1, self.room)  # (R + 1, T): tokens that are thrown away go to the last row
        self.tokens = torch.zeros(shape, dtype=torch.long, device=self.device)
        self.logp, self.entropy = (torch.zeros(shape, device=self.device) for _ in range(2))
        self.stop_tokens = end_table(requests, self.device)

    def work(self) -> list[Completion]:
        """Decode until nothing waits and every row is free."""
        self.cache.clear()
        while True:
            self._admit()
            self._close_up()
            if not self.rows:
                return self._results()
            self._decode()
            self._free_rows()

    def _admit(self) -> None:
        """Give free rows to waiting requests. A prompt is read for the first of its requests."""
        free = [row for row, request in enumerate(self.rows) if request < 0]
        free += range(len(self.rows), self.cache.slots)
        admitted = [(row, self.waiting.popleft()) for row in free[: len(self.waiting)]]
        if not admitted:
            return
        self.rows += [-1] * (max(row for row, _ in admitted) + 1 - len(self.rows))
        unread: dict[int, tuple[int, int]] = {}  # prompt → the first row and request that need it
        for row, request in admitted:
            self.rows[row] = request
            if self.prompt_of[request] not in self.cache.home:
                unread.setdefault(self.prompt_of[request], (row, request))
        self._read(unread)
        taken = [row for row, _ in admitted]
        states = self.cache.occupy(taken, [self.prompt_of[request] for _, request in admitted])
        self.decoder.hidden[send(taken, self.device)] = states

    def _read(self, unread: dict[int, tuple[int, int]]) -> None:
        """Run prompts through the model: whole ones, and of those that continue a kept row the new tokens."""
        whole: list[tuple[int, int, Prompt]] = []  # number, row
        begun: list[tuple[int, int, Prompt, SavedRow]] = []
        for number, (row, i) in unread.items():
            saved = self.kept.find(self.requests[i]) if self.kept is not None else None
            prompt = self.requests[i].prompt
            if saved is None:
                whole.append((number, row, prompt))
            else:
                begun.append((number, row, prompt, saved))
        for part in first_fit([len(prompt) for _, _, prompt in whole], PASS_TOKENS):
            prompt_numbers, rows, prompts = zip(*(whole[i] for i in part), strict=True)
            self.decoder.read(list(prompts), list(prompt_numbers), list(rows))
        for part in first_fit([len(prompt) - saved.length for _, _, prompt, saved in begun], PASS_TOKENS):
            prompt_numbers, rows, prompts, kept = zip(*(begun[i] for i in part), strict=True)
            self.decoder.read_on(list(prompts), list(kept), list(prompt_numbers), list(rows))

    def _close_up(self) -> None:
        """Move sequences from the last rows into free ones, if fewer rows are decoded then."""
        size = self.decoder.decoded_rows(sum(request >= 0 for request in self.rows))
        sources = [row for row in range(size, len(self.rows)) if self.rows[row] >= 0]
        holes = [row for row in range(min(size, len(self.rows))) if self.rows[row] < 0][: len(sources)]
        if sources:
            self.cache.move(sources, holes)
            self.decoder.hidden[send(holes, self.device)] = self.decoder.hidden[send(sources, self.device)]
        for source, hole in zip(sources, holes, strict=True):
            self.rows[hole] = self.rows[source]
        self.rows = self.rows[:size] + [-1] * (size - len(self.rows))

    def _decode(self) -> None:
        """Decode a few tokens in all rows, then look at which have ended: the only time that the host waits."""
        n = len(self.rows)
        held = [self.requests[i] if i >= 0 else IDLE for i in self.rows]
        counts = [self.counts[i] if i >= 0 else 0 for i in self.rows]
        left = [request.max_tokens - count for request, count in zip(held, counts, strict=True)]
        row_numbers = [self.numbers[i] if i >= 0 else -1 for i in self.rows]
        facts = torch.tensor([self.rows, counts, left, row_numbers])
        owner, count, room, number = send(facts, self.device)  # (n,) each
        steps = min(self.decoder.steps_per_look, max(left))
        step = torch.arange(steps, device=self.device)[:, None]
        prompt_lengths, limits = [len(request.prompt) for request in held], [request.max_tokens for request in held]
        self.cache.set_lengths(prompt_lengths, counts, limits)
        self.decoder.points[:steps, :n] = uniform(self.seed, number[None], count + step)
        self.decoder.run(n, steps, self.sampling, last=steps == max(left))

        tokens = self.decoder.tokens[:steps, :n]
        stops = (tokens[..., None] == self.stop_tokens[owner]).any(-1)  # (steps, n)
        wanted = (stops.cumsum(0) - stops.long() == 0) & (step < room)  # up to the first stop token and the limit
        self._make_room(min(max(counts) + steps, self.limit))
        place = torch.where(wanted, owner * self.room + count + step, len(self.requests) * self.room)
        decoded = (self.decoder.tokens, self.decoder.logp, self.decoder.entropy)
        for store, new in zip((self.tokens, self.logp, self.entropy), decoded, strict=True):
            store.view(-1)[place] = new[:steps, :n]
        lengths, stopped = torch.stack([wanted.sum(0), (stops & wanted).any(0)]).tolist()
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
        self.cache.free(ended)
        if self.done is not None and ended:
            finished = [self.rows[row] for row in ended]
            tokens = self.tokens[send(finished, self.device)].tolist()
            for i, row_tokens in zip(finished, tokens, strict=True):
                self.done(i, row_tokens[: self.counts[i]])
        for row in ended:
            self.rows[row] = -1

    def _keep(self, ended: list[int]) -> None:
        """Save the keys of responses that ask for it, without that of the last token: it may not have run yet."""
        rows = [row for row in ended if self.requests[self.rows[row]].keep]
        if self.kept is None or not rows:
            return
        asked = [self.rows[row] for row in rows]
        lengths = [len(self.requests[i].prompt) + self.counts[i] - 1 for i in asked]
        self.kept.save(self.cache, rows, [self.numbers[i] for i in asked], lengths)

    def _results(self) -> list[Completion]:
        used = max(self.counts)
        tokens, logp, entropy = (x[:-1, :used] for x in (self.tokens, self.logp, self.entropy))
        return completions(self.counts, self.stopped, tokens, logp, entropy)
