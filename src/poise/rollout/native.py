"""The engine: prompts read once for their group, sequences in slots that are taken again as soon as one has ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from poise._transfer import send
from poise.packing import first_fit
from poise.policy import Policy
from poise.rollout.base import Rollouts
from poise.rollout.decoder import EVERY, Decoder
from poise.rollout.sampling import Sampling, uniform
from poise.rollout.slots import Shape, SharedKeys, SlotKeys

PASS = 8192  # prompt tokens that are read together


@dataclass(frozen=True)
class Request:
    """One response that is wanted.

    ``number`` is what its random numbers hang on, together with the seed: its place in the list unless given.
    """

    prompt: Sequence[int]
    max_tokens: int
    stop: Sequence[int] = ()  # tokens that end it
    number: int | None = None


class NativeEngine:
    """Decodes in the trainer's process, with the trainer's weights, through transformers' own model code.

    ``batch`` bounds how many responses are decoded together; 0 means all. A response depends on the seed, its number
    and its prompt, and not on what else is decoded or when.
    """

    def __init__(self, policy: Policy, batch: int = 0) -> None:
        self.policy, self.batch = policy, batch
        self.shapes = layer_shapes(policy)
        self._decoder: Decoder | None = None

    def generate(
        self, prompts: Sequence[list[int]], group: int, *, max_tokens: int, temperature: float, seed: int,
        top_p: float = 1.0, top_k: int = 0,
    ) -> Rollouts:  # fmt: skip
        """``group`` responses to each prompt, group after group."""
        ends = self.policy.end_tokens
        wanted = [Request(prompt, max_tokens, ends) for prompt in prompts for _ in range(group)]
        return self.answer(wanted, Sampling(temperature, top_p, top_k), seed)

    @torch.no_grad()
    def answer(self, requests: Sequence[Request], sampling: Sampling, seed: int) -> Rollouts:
        """A response to each request, in their order."""
        _check(requests)
        return _Queue(requests, self._room(requests), sampling, seed).work()

    def release(self) -> None:
        """Give back the memory of keys and values; the next call takes it again."""
        self._decoder = None

    def _room(self, requests: Sequence[Request]) -> Decoder:
        """Keys and values for so many sequences of such lengths; those of the call before where they will do."""
        like = next(self.policy.trunk.parameters())
        slots = min(len(requests), self.batch or len(requests))
        prompts = min(slots, len({tuple(request.prompt) for request in requests}))
        longest = max(len(request.prompt) for request in requests)
        length = max(request.max_tokens for request in requests)
        old = self._decoder.keys if self._decoder else None
        if (
            isinstance(old, SharedKeys)
            and old.slots >= slots
            and old.prompts >= prompts
            and old.longest_prompt >= longest
            and old.length >= length
            and (old.states.dtype, old.states.device) == (like.dtype, like.device)
        ):
            assert self._decoder is not None
            return self._decoder
        width = self.policy.head().weight.shape[1]
        self.release()
        self._decoder = Decoder(self.policy, SharedKeys(self.shapes, slots, prompts, longest, length, width, like))
        return self._decoder


class _Queue:
    """One call's requests: those that wait, those that have a row, and what came out."""

    def __init__(self, requests: Sequence[Request], decoder: Decoder, sampling: Sampling, seed: int) -> None:
        self.requests, self.decoder, self.sampling, self.seed = requests, decoder, sampling, seed
        self.keys, self.device = decoder.keys, decoder.hidden.device
        numbers: dict[tuple[int, ...], int] = {}
        self.prompt_of = [numbers.setdefault(tuple(request.prompt), len(numbers)) for request in requests]
        self.waiting = deque(range(len(requests)))
        self.rows: list[int] = []  # the request in each row; −1: none
        self.counts = [0] * len(requests)  # tokens so far
        self.stopped = [False] * len(requests)

        self.width = max(request.max_tokens for request in requests)
        places = len(requests) * self.width + 1  # the last one takes what nobody wants
        self.tokens = torch.zeros(places, dtype=torch.long, device=self.device)
        self.logp, self.entropy = (torch.zeros(places, device=self.device) for _ in range(2))
        self.ends = _end_table(requests, self.device)

    def work(self) -> Rollouts:
        """Until nothing waits and no row is taken."""
        self.keys.clear()
        while self.waiting or self.rows:
            self._admit()
            self._decode()
            self._drop()
        return self._results()

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

    def _decode(self) -> None:
        """A few steps for all rows, then a look at what has ended: the only time that the host waits."""
        n = len(self.rows)
        held = [(request, self.requests[request]) for request in self.rows]
        left = [request.max_tokens - self.counts[i] for i, request in held]
        steps = min(EVERY, max(left))
        counts = [self.counts[i] for i, _ in held]
        numbers = [i if request.number is None else request.number for i, request in held]
        facts = send(torch.tensor([self.rows, counts, left, numbers]), self.device)
        row, count, room, number = facts
        order = torch.arange(steps, device=self.device)[:, None]
        self.keys.place([len(request.prompt) for _, request in held], counts)
        self.decoder.points[:steps, :n] = uniform(self.seed, number[None], count + order)
        self.decoder.run(n, steps, self.sampling, last=steps == max(left))

        tokens = self.decoder.tokens[:steps, :n]
        ending = (tokens[..., None] == self.ends[row]).any(-1)
        wanted = (ending.cumsum(0) - ending.long() == 0) & (order < room)
        place = torch.where(wanted, row * self.width + count + order, len(self.tokens) - 1)
        for store, new in ((self.tokens, tokens), (self.logp, self.decoder.logp), (self.entropy, self.decoder.entropy)):
            store[place] = new[:steps, :n]
        lengths, stopped = torch.stack([wanted.sum(0), (ending & wanted).any(0)]).tolist()
        for i, length, stop in zip(self.rows, lengths, stopped, strict=True):
            self.counts[i] += length
            self.stopped[i] = bool(stop)

    def _drop(self) -> None:
        """Free the rows of what has ended; where nothing waits for them, rows from the end take their place."""
        over = [
            row for row, i in enumerate(self.rows) if self.stopped[i] or self.counts[i] == self.requests[i].max_tokens
        ]
        self.keys.leave(over)
        for row in over:
            self.rows[row] = -1
        if self.waiting:
            return
        kept = [row for row, i in enumerate(self.rows) if i >= 0]
        holes = [row for row in range(len(kept)) if self.rows[row] < 0]
        sources = kept[len(kept) - len(holes) :]
        if holes:
            self.keys.move(sources, holes)
            self.decoder.hidden[send(holes, self.device)] = self.decoder.hidden[send(sources, self.device)]
        for a, b in zip(sources, holes, strict=True):
            self.rows[b] = self.rows[a]
        del self.rows[len(kept) :]

    def _results(self) -> Rollouts:
        used = max(self.counts)
        tokens, logp, entropy = (
            x[:-1].view(len(self.requests), self.width)[:, :used] for x in (self.tokens, self.logp, self.entropy)
        )
        mask = torch.arange(used, device=self.device) < send(self.counts, self.device)[:, None]
        prompts = [list(request.prompt) for request in self.requests]
        out = Rollouts(prompts, tokens, mask, logp, entropy, send(torch.tensor(self.stopped), self.device))
        out.__dict__["lengths"] = list(self.counts)
        return out


def _end_table(requests: Sequence[Request], device: torch.device) -> Tensor:
    """(R, S) the tokens that end each request's response; −1, which is no token, where it has fewer."""
    most = max(1, max(len(request.stop) for request in requests))
    return send(torch.tensor([[*r.stop, *[-1] * (most - len(r.stop))] for r in requests]), device)


def _check(requests: Sequence[Request]) -> None:
    if not requests:
        raise ValueError("generate: there is no prompt")
    for i, request in enumerate(requests):
        if not len(request.prompt):
            raise ValueError(f"request {i}: an empty prompt predicts nothing")
        if request.max_tokens < 1:
            raise ValueError(f"request {i}: max_tokens = {request.max_tokens} must be at least 1")


class _Probe:
    """Notes what a model's keys look like."""

    def __init__(self) -> None:
        self.shapes: dict[int, Shape] = {}

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        self.shapes[layer] = (key.shape[0], key.shape[2], value.shape[2])


def layer_shapes(policy: Policy) -> list[Shape]:
    """Of all layers, as one token shows them."""
    from poise.packing import layout_prompts

    packed = layout_prompts([[0]], policy.device)
    mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=policy.device)
    probe = _Probe()
    with torch.no_grad():
        policy.trunk(
            input_ids=packed.ids, position_ids=packed.positions, attention_mask=mask, use_cache=False, packing=packed,
            decoding=probe,
        )  # fmt: skip
    if sorted(probe.shapes) != list(range(len(probe.shapes))):
        raise NotImplementedError
    return [probe.shapes[layer] for layer in range(len(probe.shapes))]
