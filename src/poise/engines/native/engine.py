"""The native engine: reads a prompt once for its group, and reuses a row as soon as its response has ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from poise.engines.limits import check_lengths
from poise.engines.native import graphs
from poise.engines.native.decoder import Decoder, layer_shapes
from poise.engines.native.scheduler import Scheduler
from poise.engines.native.shared_cache import SharedPromptCache
from poise.models.policy import Policy
from poise.models.trials import close
from poise.rollout.sampling import Sampling
from poise.rollout.types import Done, Request, Rollouts, check_requests

PROMPT_STEP = 64  # prompt lengths are rounded up to a multiple, so that the cache is rarely allocated anew
SMALL_MODEL = 10_000_000  # parameters in the layers: below this, waking a second CPU thread costs more than it gains
# What a model's code may raise when it does not take what the engine hands it.
TRIAL_ERRORS = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)


class NativeEngine:
    """Decodes in the trainer's process, with the trainer's weights, through transformers' own model code.

    ``batch`` bounds how many responses are decoded together; 0: all. A response depends on the seed, its number and its
    prompt, not on what else is decoded or when.
    """

    def __init__(self, policy: Policy, batch: int = 0) -> None:
        self.policy, self.batch = policy, batch
        self.shapes = layer_shapes(policy)
        self._decoder: Decoder | None = None
        self._decoder_key: tuple[object, ...] = ()  # what the decoder was made for

    @torch.no_grad()
    def sample(self, requests: Sequence[Request], sampling: Sampling, seed: int, done: Done | None = None) -> Rollouts:
        """Sample a response to each request, in their order."""
        check_requests(requests)
        check_lengths(self.policy, requests)
        with _threads(self.policy):
            rollouts = Scheduler(requests, self._decoder_for(requests), sampling, seed, done).work()
        if self._decoder is not None and not graphs.may_stay(self._decoder.cache):
            self.release()
        return rollouts

    def release(self) -> None:
        """Free the memory of the cache; the next call allocates it again."""
        self._decoder, self._decoder_key = None, ()

    def _decoder_for(self, requests: Sequence[Request]) -> Decoder:
        """A decoder with room for these requests: that of the last call, if it needed the same.

        Its sizes depend on these requests alone, not on earlier ones: the address and stride of a matrix may change the
        last bits of a product, and a resumed run must continue bit for bit.
        """
        like = next(self.policy.trunk.parameters())
        slots = min(len(requests), self.batch or len(requests))
        prompts = min(slots, len({tuple(request.prompt) for request in requests}))
        longest = -(-max(len(request.prompt) for request in requests) // PROMPT_STEP) * PROMPT_STEP
        length = max(request.max_tokens for request in requests)
        key = (slots, prompts, longest, length, like.dtype, like.device)
        if self._decoder is None or key != self._decoder_key:
            self.release()
            self._decoder = _new_decoder(self.policy, self.shapes, slots, prompts, longest, length, like)
            self._decoder_key = key
        return self._decoder


def _new_decoder(
    policy: Policy, shapes: Sequence[tuple[int, int, int]], slots: int, prompts: int, longest_prompt: int,
    max_tokens: int, like: Tensor,
) -> Decoder:  # fmt: skip
    """With CUDA graphs where the device and dtype allow them."""
    width = policy.head().weight.shape[1]
    if graphs.usable(policy, shapes):
        return graphs.decoder(policy, shapes, slots, longest_prompt + max_tokens, width, like)
    return Decoder(policy, SharedPromptCache(shapes, slots, prompts, longest_prompt, max_tokens, width, like))


@contextmanager
def _threads(policy: Policy) -> Iterator[None]:
    """On a CPU, decode a small model with one thread."""
    layers = sum(p.numel() for p in policy.trunk.parameters()) - policy.head().weight.numel()
    if policy.device.type != "cpu" or layers >= SMALL_MODEL:
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
    """Whether the engine can decode with this model: a trial on two prompts, one of them with two responses.

    The hidden states must be those of one pass over prompt and response. The trial fails for layers that share keys,
    have a recurrent state, or do not hand keywords down to the attention function.
    """
    if not policy.packed:
        return False
    size = policy.head().vocabulary
    prompts, tokens = [[1 % size, 2 % size, 3 % size], [3 % size, 1 % size]], [2 % size, 4 % size, 5 % size]
    prompt_of, like = [0, 0, 1], next(policy.trunk.parameters())
    expected = []
    for prompt, token in zip(prompt_of, tokens, strict=True):
        ids = torch.tensor([[*prompts[prompt], token]], device=policy.device)
        expected.append(policy.trunk(input_ids=ids, use_cache=False).last_hidden_state[0, -2:])
    try:
        decoder = _new_decoder(policy, layer_shapes(policy), 3, 2, 3, 5, like)
        decoder.read(prompts, [0, 1], [0, 2])
        before = decoder.cache.occupy([0, 1, 2], prompt_of)
        decoder.cache.set_lengths([len(prompts[prompt]) for prompt in prompt_of], [0, 0, 0], [3, 3, 3])
        decoder.forward(3, torch.tensor(tokens, device=policy.device))
        after = decoder.hidden.clone()
        decoder.cache.advance()
        decoder.run(3, 1, Sampling(), last=False)  # as a graph, where there are any
    except torch.OutOfMemoryError:
        raise
    except TRIAL_ERRORS:
        return False
    return close(torch.stack([before, after], 1).float(), torch.stack(expected).float(), like.dtype)
