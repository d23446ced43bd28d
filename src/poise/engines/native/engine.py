"""The engine: prompts read once for their group, sequences in rows that are taken again as soon as one has ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from poise.engines.limits import check_lengths
from poise.engines.native import graphs
from poise.engines.native.decoder import Decoder, layer_shapes
from poise.engines.native.kv_cache import SharedKeys
from poise.engines.native.scheduler import Queue
from poise.models.policy import Policy
from poise.models.trials import close
from poise.rollout.sampling import Sampling
from poise.rollout.types import Done, Request, Rollouts, check_requests

STEP = 64  # prompt lengths are rounded up to this, so that room is rarely made anew
SMALL = 10_000_000  # parameters of the layers: to wake a second thread takes a CPU longer than it helps


class NativeEngine:
    """Decodes in the trainer's process, with the trainer's weights, through transformers' own model code.

    ``batch`` bounds how many responses are decoded together; 0 means all. A response depends on the seed, its number
    and its prompt, and not on what else is decoded or when.
    """

    def __init__(self, policy: Policy, batch: int = 0) -> None:
        self.policy, self.batch = policy, batch
        self.shapes = layer_shapes(policy)
        self._room_for: tuple[object, ...] = ()
        self._decoder: Decoder | None = None

    @torch.no_grad()
    def sample(self, requests: Sequence[Request], sampling: Sampling, seed: int, done: Done | None = None) -> Rollouts:
        """A response to each request, in their order."""
        check_requests(requests)
        check_lengths(self.policy, requests)
        with _threads(self.policy):
            made = Queue(requests, self._room(requests), sampling, seed, done).work()
        if self._decoder is not None and not graphs.may_stay(self._decoder.keys):
            self.release()
        return made

    def release(self) -> None:
        """Give back the memory of keys and values; the next call takes it again."""
        self._decoder, self._room_for = None, ()

    def _room(self, requests: Sequence[Request]) -> Decoder:
        """Keys and values for these requests: those of the call before where it was the same.

        How much is made depends on the requests alone, and not on earlier ones: where a matrix lies may change the last
        bits of a product, and a run that is resumed is to go on exactly.
        """
        like = next(self.policy.trunk.parameters())
        slots = min(len(requests), self.batch or len(requests))
        prompts = min(slots, len({tuple(request.prompt) for request in requests}))
        longest = -(-max(len(request.prompt) for request in requests) // STEP) * STEP
        length = max(request.max_tokens for request in requests)
        wanted = (slots, prompts, longest, length, like.dtype, like.device)
        if self._decoder is None or wanted != self._room_for:
            self.release()
            width = self.policy.head().weight.shape[1]
            if graphs.usable(self.policy, self.shapes):
                self._decoder = graphs.decoder(self.policy, self.shapes, slots, longest + length, width, like)
            else:
                keys = SharedKeys(self.shapes, slots, prompts, longest, length, width, like)
                self._decoder = Decoder(self.policy, keys)
            self._room_for = wanted
        return self._decoder


@contextmanager
def _threads(policy: Policy) -> Iterator[None]:
    """A small model is decoded by one thread on a CPU."""
    layers = sum(p.numel() for p in policy.trunk.parameters()) - policy.head().weight.numel()
    if policy.device.type != "cpu" or layers >= SMALL:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def supports(policy: Policy) -> bool:
    """Whether the engine can decode with this model: tried on two prompts, one of them with two responses.

    Their states must be those of a pass over prompt and response in one. Layers that share keys, keep a state of their
    own, or do not hand keywords down to the attention function would show.
    """
    if not policy.packed:
        return False
    size = policy.head().vocabulary
    prompts, tokens = [[1 % size, 2 % size, 3 % size], [3 % size, 1 % size]], [2 % size, 4 % size, 5 % size]
    owners, like = [0, 0, 1], next(policy.trunk.parameters())
    expected = []
    for owner, token in zip(owners, tokens, strict=True):
        ids = torch.tensor([[*prompts[owner], token]], device=policy.device)
        expected.append(policy.trunk(input_ids=ids, use_cache=False).last_hidden_state[0, -2:])
    try:
        shapes, width = layer_shapes(policy), policy.head().weight.shape[1]
        decoder = (
            graphs.decoder(policy, shapes, 3, 8, width, like)
            if graphs.usable(policy, shapes)
            else Decoder(policy, SharedKeys(shapes, 3, 2, 3, 5, width, like))
        )
        decoder.read(prompts, [0, 1], [0, 2])
        before = decoder.keys.join([0, 1, 2], owners)
        decoder.keys.place([len(prompts[owner]) for owner in owners], [0, 0, 0], [3, 3, 3])
        decoder.forward(3, torch.tensor(tokens, device=policy.device))
        after = decoder.hidden.clone()
        decoder.keys.advance()
        decoder.run(3, 1, Sampling(), last=False)  # as a graph, where there are any
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False
    return close(torch.stack([before, after], 1).float(), torch.stack(expected).float(), like.dtype)
