"""Samples from any causal language model, on a CPU or CUDA, with transformers' model code and key-value cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from poise._lib.device import send
from poise.batch import Prompt
from poise.models.load_checks import completions_agree, short_windows, tried
from poise.models.policy import Policy
from poise.sampling.draws import Sampling, uniform
from poise.sampling.native.kv_cache import FIRST_ROOM
from poise.sampling.requests import (
    Completion,
    Done,
    Request,
    check_requests,
    completions,
    numbers,
    repeated,
    stop_table,
)

ROOM = 64  # tokens by which a cache grows
COMPACT_EVERY = 16  # steps between checks for ended responses that can be dropped


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """A cache layer that grows by ``ROOM`` tokens at a time; transformers' own layer is copied at every token."""

    keys: Tensor
    values: Tensor

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values; return all stored ones."""
        if not self.is_initialized or self.keys.numel() == 0:
            self.lazy_initialization(key_states, value_states)
            self.length = 0
            self.stores: list[Tensor] = [x.new_empty((*x.shape[:2], 0, x.shape[3])) for x in (key_states, value_states)]
        end = self.length + key_states.shape[2]
        if end > self.stores[0].shape[2]:
            more = end - self.stores[0].shape[2] + ROOM
            self.stores = [torch.cat([x, x.new_empty((*x.shape[:2], more, x.shape[3]))], 2) for x in self.stores]
        for store, new in zip(self.stores, (key_states, value_states), strict=True):
            store[:, :, self.length : end] = new
        self.length = end
        self._set_views()
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows in ``indices``, which may contain a row several times."""
        self.stores = [x[indices] for x in self.stores]
        self._set_views()

    def _set_views(self) -> None:
        self.keys, self.values = (x[:, :, : self.length] for x in self.stores)


class CachedEngine:
    """Decodes requests in batches. In a batch, each distinct prompt runs through the model once.

    ``batch`` is the maximum number of responses decoded together; 0: no maximum. A response's random numbers depend
    only on the seed and the request's number, as in the native engine.
    """

    def __init__(self, policy: Policy, batch: int = 0) -> None:
        self.policy, self.batch = policy, batch

    @torch.no_grad()
    def sample(
        self, requests: Sequence[Request], sampling: Sampling, seed: int, done: Done | None = None
    ) -> list[Completion]:
        """Sample a response to each request, in order. ``done`` is called after a whole batch has ended."""
        check_requests(requests)
        self.policy.check_lengths((len(request.prompt.tokens), request.max_tokens) for request in requests)
        at_once, sampled, number = self.batch or len(requests), list[Completion](), numbers(requests)
        for first in range(0, len(requests), at_once):
            chosen = slice(first, first + at_once)
            sampled += _Batch(self.policy, requests[chosen], number[chosen]).decode(sampling, seed)
            if done is not None:
                for row in range(first, len(sampled)):
                    done(row, sampled[row].tokens.tolist())
        return sampled


class _Batch:
    """Requests that are decoded together. Every ``COMPACT_EVERY`` steps, ended responses may be dropped from the cache.

    Letters in shapes: R requests, T response tokens, A requests still being decoded, W width of the hidden state.
    """

    def __init__(self, policy: Policy, requests: Sequence[Request], number: Sequence[int]) -> None:
        self.policy, self.requests, device = policy, requests, policy.device
        self.limits = send([r.max_tokens for r in requests], device)
        self.stop_tokens = send(stop_table(requests), device)
        self.number, self.longest_response = send(list(number), device), max(r.max_tokens for r in requests)
        self.stopped, self.ended = (torch.zeros(len(requests), dtype=torch.bool, device=device) for _ in range(2))
        self.room = 0  # response tokens allocated so far; few responses reach their limit
        empty = (len(requests), 0)
        self.tokens, self.mask = (torch.zeros(empty, dtype=t, device=device) for t in (torch.long, torch.bool))
        self.logp, self.entropy = torch.zeros(empty, device=device), torch.zeros(empty, device=device)
        self.alive = torch.arange(len(requests), device=device)  # (A,) requests still being decoded

    def decode(self, sampling: Sampling, seed: int) -> list[Completion]:
        """Decode every response until a stop token or the token limit ends it."""
        head = self.policy.head(sampling.temperature or 1.0)
        states = self._read_prompts()
        for step in range(self.longest_response):
            if step == self.room:
                self._make_room()
            point = uniform(seed, self.number[self.alive], torch.full_like(self.alive, step))
            token, logp, entropy = sampling.draw(head(states), point)
            self._record(step, token, logp, entropy)
            if step + 1 == self.longest_response:
                break
            if (step + 1) % COMPACT_EVERY == 0:
                token = self._drop_ended(token)
                if len(token) == 0:
                    break
            states = self._forward(token, step)
        lengths = self.mask.sum(1).tolist()
        tokens, logp, entropy = (x[:, : max(lengths)] for x in (self.tokens, self.logp, self.entropy))
        return completions(lengths, self.stopped.tolist(), tokens, logp, entropy)

    def _read_prompts(self) -> Tensor:
        """Run each distinct prompt through the model once. Returns the hidden states of the last tokens, (R, W)."""
        self.cache = DynamicCache(config=self.policy.trunk.config)
        # Layers with a sliding window are not replaced.
        self.cache.layers = [GrowingLayer() if type(x) is DynamicLayer else x for x in self.cache.layers]
        # (A, longest prompt + T) whether a key is not padding
        states, self.visible = self.policy.read_prompts([request.prompt for request in self.requests], self.cache)
        self.longest_prompt, self.prompt_lengths = self.visible.shape[1], self.visible.sum(1)  # (A,)
        # transformers uses a four-dimensional mask unchanged. Models that run packed accept such a mask; Falcon and
        # Bloom do not, because they compute ALiBi from a two-dimensional mask.
        self.full_mask = self.policy.packed and all(type(layer) is GrowingLayer for layer in self.cache.layers)
        return states

    def _make_room(self) -> None:
        more = min(max(self.room, FIRST_ROOM), self.longest_response - self.room)
        self.room += more
        self.tokens, self.mask, self.logp, self.entropy = (
            torch.nn.functional.pad(x, (0, more)) for x in (self.tokens, self.mask, self.logp, self.entropy)
        )
        self.visible = torch.nn.functional.pad(self.visible, (0, more), value=True)

    def _record(self, step: int, token: Tensor, logp: Tensor, entropy: Tensor) -> None:
        """Record the tokens (A,) of unfinished responses, and mark the responses that end at this step."""
        alive = self.alive
        active = ~self.ended[alive]
        self.tokens[alive, step] = torch.where(active, token, 0)
        self.mask[alive, step] = active
        self.logp[alive, step] = logp.float() * active
        self.entropy[alive, step] = entropy.float() * active
        self.stopped[alive] |= active & (token[:, None] == self.stop_tokens[alive]).any(1)
        self.ended[alive] |= self.stopped[alive] | (self.limits[alive] == step + 1)

    def _drop_ended(self, token: Tensor) -> Tensor:
        """Drop ended responses from the batch if more than a tenth have ended.

        Returns the tokens of the remaining responses; empty if all have ended.
        """
        active = (~self.ended[self.alive]).nonzero()[:, 0]
        if len(active) and len(active) >= 0.9 * len(self.alive):
            return token
        self.alive, self.visible, self.prompt_lengths = (
            x[active] for x in (self.alive, self.visible, self.prompt_lengths)
        )
        self.cache.batch_select_indices(active)
        return token[active]

    def _forward(self, token: Tensor, step: int) -> Tensor:
        """Run the tokens (A,) through the model. Returns the hidden states (A, W)."""
        visible = self.visible[:, : self.longest_prompt + step + 1]
        states: Tensor = self.policy.trunk(
            input_ids=token[:, None],
            attention_mask=visible[:, None, None] if self.full_mask else visible,
            position_ids=(self.prompt_lengths + step)[:, None],
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state[:, -1]
        return states


@torch.no_grad()
def supports(policy: Policy) -> bool:
    """Whether sampling with a cache gives the same log-probabilities as one pass over prompt and response.

    The trial samples two responses to each of two prompts of different lengths. It shortens the model's sliding windows
    so that the responses exceed them (``models.load_checks``).
    """
    size = policy.head().vocabulary
    prompts = [Prompt((1 % size, 2 % size, 3 % size)), Prompt((4 % size,))]
    requests = repeated(prompts, 2, 8, policy.end_tokens)
    with short_windows(policy.base):
        trial = tried(lambda: CachedEngine(policy).sample(requests, Sampling(), 0))
        return trial is not None and completions_agree(policy, [request.prompt for request in requests], trial)
