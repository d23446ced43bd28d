"""Sampling with a key-value cache, through transformers' own model code: any causal LM, CPU or CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from poise._lib.transfer import send
from poise.engines.limits import check_lengths
from poise.engines.native.kv_cache import FIRST
from poise.models.policy import Policy, pad_left
from poise.models.trials import close, short_windows
from poise.rollout.sampling import Sampling, uniform
from poise.rollout.types import Done, Request, Rollouts, check_requests, end_table, numbers, side_by_side

ROOM = 64  # tokens that a cache grows by
COMPACT_EVERY = 16  # steps between looks for finished responses to drop


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """A cache layer that grows by ``ROOM`` tokens at a time instead of being copied for every token."""

    keys: Tensor
    values: Tensor

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the new keys and values into the room there is, and return all that are in use."""
        if not self.is_initialized or self.keys.numel() == 0:
            self.lazy_initialization(key_states, value_states)
            self.length = 0
            self.store: list[Tensor] = [x.new_empty((*x.shape[:2], 0, x.shape[3])) for x in (key_states, value_states)]
        end = self.length + key_states.shape[2]
        if end > self.store[0].shape[2]:
            self.store = [
                torch.cat([x, x.new_empty((*x.shape[:2], end - x.shape[2] + ROOM, x.shape[3]))], 2) for x in self.store
            ]
        for store, new in zip(self.store, (key_states, value_states), strict=True):
            store[:, :, self.length : end] = new
        self.length = end
        self._view()
        return self.keys, self.values

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times."""
        self.store = [x.repeat_interleave(repeats, 0) for x in self.store]
        self._view()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Some rows."""
        self.store = [x[indices] for x in self.store]
        self._view()

    def _view(self) -> None:
        self.keys, self.values = (x[:, :, : self.length] for x in self.store)


class CachedEngine:
    """Batched over requests; a prompt is read once for all its requests in a batch; finished responses are dropped.

    ``batch`` bounds how many responses are decoded together; 0 means all. A response's random numbers depend on the
    seed and its number alone, as in the native engine.
    """

    def __init__(self, policy: Policy, batch: int = 0) -> None:
        self.policy, self.batch = policy, batch

    @torch.no_grad()
    def sample(self, requests: Sequence[Request], sampling: Sampling, seed: int, done: Done | None = None) -> Rollouts:
        """A response to each request, in their order. ``done`` is told of a batch's responses when it has ended."""
        check_requests(requests)
        check_lengths(self.policy, requests)
        at_once, parts, number = self.batch or len(requests), [], numbers(requests)
        for first in range(0, len(requests), at_once):
            part = requests[first : first + at_once]
            parts.append(self._decode(part, number[first : first + at_once], sampling, seed))
            if done is not None:
                tokens, own = parts[-1].tokens.tolist(), parts[-1].lengths
                for row, (ids, length) in enumerate(zip(tokens, own, strict=True)):
                    done(first + row, ids[:length])
        return side_by_side(parts)

    def _decode(self, requests: Sequence[Request], number: Sequence[int], sampling: Sampling, seed: int) -> Rollouts:
        """Responses to some of the requests."""
        policy, device = self.policy, self.policy.device
        head = policy.head(sampling.temperature or 1.0)
        known: dict[tuple[int, ...], int] = {}
        prompt_of = send([known.setdefault(tuple(request.prompt), len(known)) for request in requests], device)
        ids, seen = pad_left(list(known), device)
        limits, ends = send([request.max_tokens for request in requests], device), end_table(requests, device)
        longest, total, most = ids.shape[1], len(requests), max(request.max_tokens for request in requests)
        streams, lengths = send(list(number), device), seen.sum(1)[prompt_of]
        position = (seen.cumsum(1) - 1).clamp(min=0)

        cache = _roomy_cache(policy)
        states = policy.trunk(
            input_ids=ids, attention_mask=seen, position_ids=position, past_key_values=cache, use_cache=True
        ).last_hidden_state[:, -1]
        cache.batch_select_indices(prompt_of)
        states, seen = states[prompt_of], seen[prompt_of]
        # A mask of four dimensions spares transformers the work of making one, but not every model takes it: those that
        # run packed do. Falcon's and Bloom's ALiBi are worked out from a mask of two.
        whole_mask = policy.packed and all(type(layer) is RoomyLayer for layer in cache.layers)

        width = 0  # tokens of a response that there is room for so far: few are as long as they may be
        tokens, mask = (torch.zeros((total, 0), dtype=kind, device=device) for kind in (torch.long, torch.bool))
        logp, entropy = torch.zeros((total, 0), device=device), torch.zeros((total, 0), device=device)
        stopped, over = (torch.zeros(total, dtype=torch.bool, device=device) for _ in range(2))
        alive = torch.arange(total, device=device)  # the rows that are still being decoded
        for step in range(most):
            if step == width:
                more = min(max(width, FIRST), most - width)
                width += more
                tokens, mask, logp, entropy = (_widened(x, more) for x in (tokens, mask, logp, entropy))
                seen = _widened(seen, more, value=True)
            point = uniform(seed, streams[alive], torch.full_like(alive, step))
            chosen, own, spread = sampling.draw(head(states), point)
            going = ~over[alive]
            tokens[alive, step] = torch.where(going, chosen, 0)
            mask[alive, step] = going
            logp[alive, step] = own.float() * going
            entropy[alive, step] = spread.float() * going
            stopped[alive] |= going & (chosen[:, None] == ends[alive]).any(1)
            over[alive] |= stopped[alive] | (limits[alive] == step + 1)
            if step + 1 == most:
                break
            if (step + 1) % COMPACT_EVERY == 0:
                keep = (~over[alive]).nonzero()[:, 0]
                if len(keep) == 0:
                    break
                if len(keep) < 0.9 * len(alive):
                    alive, chosen, seen, lengths = alive[keep], chosen[keep], seen[keep], lengths[keep]
                    cache.batch_select_indices(keep)
            now = seen[:, : longest + step + 1]
            states = policy.trunk(
                input_ids=chosen[:, None],
                attention_mask=now[:, None, None] if whole_mask else now,  # ready-made where every layer sees all
                position_ids=(lengths + step)[:, None],
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state[:, -1]
        used = max(int(mask.any(0).sum()), 1)
        tokens, mask, logp, entropy = (x[:, :used] for x in (tokens, mask, logp, entropy))
        return Rollouts([list(request.prompt) for request in requests], tokens, mask, logp, entropy, stopped)


def _widened(x: Tensor, more: int, value: bool = False) -> Tensor:
    return torch.nn.functional.pad(x, (0, more), value=value)


def _roomy_cache(policy: Policy) -> Any:
    """transformers' cache for this model, with plain layers replaced; those with a sliding window stay as they are."""
    cache = DynamicCache(config=policy.trunk.config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


@torch.no_grad()
def supports(policy: Policy) -> bool:
    """Whether sampling with a cache gives the log-probabilities of a pass over prompt and response in one.

    Tried on prompts of different lengths with two responses each, longer than the model's windows (``models.trials``).
    """
    size = policy.head().vocabulary
    prompts = [[1 % size, 2 % size, 3 % size], [4 % size]]
    with short_windows(policy.base):
        try:
            wanted = [Request(prompt, 8, policy.end_tokens) for prompt in prompts for _ in range(2)]
            tried = CachedEngine(policy).sample(wanted, Sampling(), 0)
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError):
            return False
        expected = policy.score(tried)[0]
    return close(tried.logp[tried.mask], expected[tried.mask].float(), policy.head().weight.dtype)
