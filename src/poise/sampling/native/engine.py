"""The native engine: reads a prompt once for its group, and reuses a row as soon as its response has ended."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from poise._lib import device as _device
from poise.batch import Prompt
from poise.models.adapters import untrained_adapters_filled
from poise.models.attention import Shape
from poise.models.load_checks import completions_agree, short_windows, states_close, states_of, tried
from poise.models.location import first_line
from poise.models.policy import Policy
from poise.sampling.draws import Sampling
from poise.sampling.native import graphs
from poise.sampling.native.decoder import Decoder, UnreadPrompt, layer_shapes, plain_decoder
from poise.sampling.native.fused_step import FusedStep, fused_step
from poise.sampling.native.kv_cache import CacheSizes
from poise.sampling.native.scheduler import Scheduler
from poise.sampling.native.session import KeptRows, NativeSession
from poise.sampling.requests import Completion, Done, Request, check_requests

PROMPT_STEP = 64  # prompt lengths are rounded up to a multiple of this, so that the cache is rarely reallocated
SMALL_MODEL = 10_000_000  # parameters in the layers; a smaller model decodes faster with one CPU thread

_STEPS: WeakKeyDictionary[Policy, FusedStep] = WeakKeyDictionary()  # fused steps that passed their trial
_WITHOUT_STEP: WeakSet[Policy] = WeakSet()  # policies whose fused step failed its trial


# Slots and tokens per slot (3 + 13) are multiples of 16, as in most runs: Triton compiles its kernels again for other
# sizes.
TRIAL_CACHE = CacheSizes(16, 2, 3, 13)


class NativeEngine:
    """Decodes in the trainer's process, with the trainer's weights.

    On CUDA, common model types run through a step with few kernels (``fused_step.py``). All other models run through
    transformers' own code.

    ``batch`` is the maximum number of responses decoded together; 0: no maximum. A response depends only on the seed,
    the request's number and the prompt, not on other responses or on when it is decoded.
    """

    def __init__(self, policy: Policy, batch: int = 0) -> None:
        self.policy, self.batch = policy, batch
        self.shapes = layer_shapes(policy)
        self.step = _tried_step(policy)
        self._decoder: Decoder | None = None
        self._decoder_key: tuple[Any, ...] = ()  # the decoder's sizes and dtype, and the address of the weights

    @torch.no_grad()
    def sample(
        self, requests: Sequence[Request], sampling: Sampling, seed: int, done: Done | None = None
    ) -> list[Completion]:
        """Sample a response to each request, in order."""
        sampled = self.run(requests, sampling, seed, done)
        self.release_if_large()
        return sampled

    def session(self, length: int | None = None) -> NativeSession:
        """A session that keeps keys and values between calls. ``length``: the longest expected dialogue, in tokens."""
        return NativeSession(self, length)

    def run(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        seed: int,
        done: Done | None = None,
        kept_rows: KeptRows | None = None,
        least: tuple[int, int] = (0, 0),
    ) -> list[Completion]:
        """Sample for a session, with its ``kept_rows`` and a cache of at least ``least`` (slots, tokens per slot)."""
        check_requests(requests)
        self.policy.check_lengths((len(request.prompt.tokens), request.max_tokens) for request in requests)
        with torch.no_grad(), _threads(self.policy):
            return Scheduler(requests, self._decoder_for(requests, least), sampling, seed, done, kept_rows).work()

    def check_memory(self, prompt: int, response: int) -> None:
        """Raise an error if the GPU does not have enough free memory for one sequence of this length."""
        if self._graphs:
            length = _rounded(prompt) + response
            graphs.affordable(1, length * self.token_bytes, _device.free_bytes(self.policy.device), length)

    def release(self) -> None:
        """Free the cache's memory; the next call allocates a new cache."""
        self._decoder, self._decoder_key = None, ()

    def release_if_large(self) -> None:
        """Free the cache's memory if the cache is too large to keep during an update."""
        if self.policy.device.type == "cuda" and self.cache_bytes > graphs.idle_bytes(self.policy.device):
            self.release()

    @property
    def cache_bytes(self) -> int:
        """Bytes of the current cache; 0 if there is none."""
        return 0 if self._decoder is None else self._decoder.cache.nbytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers. Without a flash kernel, the cache is at least float32."""
        element_size = next(self.policy.trunk.parameters()).element_size()
        return graphs.slot_bytes(self.shapes, 1, element_size if self._graphs else max(4, element_size))

    @cached_property
    def keeps_keys(self) -> bool:
        """Whether keys can be kept between turns. The trial runs once, when a session first needs the answer."""
        if continues(self.policy):
            return True
        name = type(self.policy.base).__name__
        warnings.warn(f"{name}: keys cannot be kept between turns; every turn reads its dialogue again", stacklevel=2)
        return False

    @cached_property
    def _graphs(self) -> bool:
        return graphs.usable(self.policy, self.shapes)

    def cache_sizes(self, requests: Sequence[Request]) -> tuple[int, int]:
        """Return the number of rows and the tokens per row that these requests need."""
        slots = min(len(requests), self.batch or len(requests))
        return slots, max(_rounded(len(request.prompt.tokens)) + request.max_tokens for request in requests)

    def _decoder_for(self, requests: Sequence[Request], least: tuple[int, int] = (0, 0)) -> Decoder:
        """Return a decoder with room for these requests: the previous call's if its sizes match, else a new one.

        On a CPU the sizes depend only on these requests, not on earlier calls: the address and stride of a matrix may
        change the last bits of a product, and a resumed run must continue bit for bit.
        """
        like = next(self.policy.trunk.parameters())
        slots, length = self.cache_sizes(requests)
        prompts = min(slots, len({request.prompt for request in requests}))
        longest = _rounded(max(len(request.prompt.tokens) for request in requests))
        sizes = CacheSizes(slots, prompts, longest, max(request.max_tokens for request in requests))
        if self._graphs:
            sizes = self._roomy(max(slots, least[0]), max(length, least[1]), like.device)
        # Graphs and the fused step read the weights at fixed addresses: a model that was moved needs new ones.
        key = (*sizes, like.dtype, like.device, like.data_ptr() if self._graphs else None)
        if self._decoder is None or key != self._decoder_key:
            self.release()
            if self.step is not None and not self.step.usable:
                self.step = _tried_step(self.policy)
            self._decoder = _new_decoder(self.policy, self.shapes, sizes, graphed=self._graphs, step=self.step)
            self._decoder_key = key
        return self._decoder

    def _roomy(self, slots: int, length: int, device: torch.device) -> CacheSizes:
        """Return the sizes of a slot cache: the previous call's, enlarged if these requests need more.

        The number and length of responses may differ from call to call, and recording graphs for a new cache takes
        longer than decoding. If the enlarged cache would be too large to stay in memory, the sizes are only what these
        requests need. With ``deterministic=true``, the sizes do not depend on earlier calls, because a resumed run has
        not made these calls.
        """
        if self._decoder is not None and not _device.is_planned():
            had, _, _, room = self._decoder_key[:4]
            grown = max(slots, had), max(length, room)
            if grown[0] * grown[1] * self.token_bytes <= graphs.idle_bytes(device):
                slots, length = grown
        return CacheSizes(slots, 0, 0, length)


def _rounded(length: int) -> int:
    return -(-length // PROMPT_STEP) * PROMPT_STEP


def _new_decoder(
    policy: Policy, shapes: Sequence[Shape], sizes: CacheSizes, *, graphed: bool, step: FusedStep | None = None
) -> Decoder:
    """Build a decoder of these sizes. ``graphed``: use CUDA graphs, which may run the fused ``step``."""
    return graphs.graphed_decoder(policy, shapes, sizes, step) if graphed else plain_decoder(policy, shapes, sizes)


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
    """Whether the engine can decode with this model, according to a trial with two prompts and three responses.

    The hidden states must equal the states of one pass over prompt and response. The trial fails for layers that share
    keys, have a recurrent state, or do not pass keywords on to the attention function.
    """
    return policy.packed and bool(tried(lambda: _tried_step(policy) is not None or _decodes(policy)))


def _tried_step(policy: Policy) -> FusedStep | None:
    """Return the fused step of a model if the step's hidden states equal the model's own, else None."""
    step = _STEPS.get(policy)
    if step is not None and step.usable:
        return step
    if policy in _WITHOUT_STEP or not graphs.usable(policy, layer_shapes(policy)):
        return None
    step = fused_step(policy)
    if step is None:
        return None
    failure = "its hidden states differ"
    try:
        with untrained_adapters_filled(policy.trunk):
            passed = _decodes(policy, step)
        if passed:
            _STEPS[policy] = step
            return step
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton raises its own errors
        failure = first_line(error)
    _WITHOUT_STEP.add(policy)
    name = type(policy.base).__name__
    warnings.warn(
        f"{name} decodes with transformers' own code, which is slower: the fused step failed ({failure})", stacklevel=2
    )
    return None


@torch.no_grad()
def _decodes(policy: Policy, step: FusedStep | None = None) -> bool:
    """Whether two decoding steps of three rows give the same hidden states as one pass over prompt and response."""
    prompts, prompt_of, tokens = _trial_texts(policy)
    rounds = (tokens, tokens[::-1])  # the second step reads the key that the first stored
    shapes, expected = layer_shapes(policy), []
    with short_windows(policy.base):
        for row, prompt in enumerate(prompt_of):
            ids = [*prompts[prompt].tokens, *(row_tokens[row] for row_tokens in rounds)]
            expected.append(states_of(policy, torch.tensor([ids], device=policy.device))[:, -3:])
        decoder = _new_decoder(policy, shapes, TRIAL_CACHE, graphed=graphs.usable(policy, shapes), step=step)
        states = [_begin_trial(decoder, prompts, prompt_of)]
        for row_tokens in rounds:
            decoder.forward(3, torch.tensor(row_tokens, device=policy.device))
            states.append(decoder.hidden[:3].clone())
            decoder.cache.advance()
        decoder.run(3, 1, Sampling(), last=False)  # records a graph, if the decoder uses graphs
    return states_close(torch.stack(states, 1), torch.stack(expected, 1), decoder.hidden.dtype)


def _trial_texts(policy: Policy) -> tuple[list[Prompt], list[int], list[int]]:
    """Return two prompts, and for each of three rows the number of its prompt and a token."""
    size = policy.head().vocabulary
    prompts = [Prompt((1 % size, 2 % size, 3 % size)), Prompt((3 % size, 1 % size))]
    return prompts, [0, 0, 1], [2 % size, 4 % size, 5 % size]


def _begin_trial(decoder: Decoder, prompts: list[Prompt], prompt_of: list[int]) -> Tensor:
    """Read the prompts into three rows. Returns the states (3, W) from which first tokens would be drawn."""
    decoder.read([UnreadPrompt(0, 0, prompts[0]), UnreadPrompt(1, 2, prompts[1])])
    before = decoder.cache.occupy([0, 1, 2], prompt_of)
    lengths = [len(prompts[prompt].tokens) for prompt in prompt_of]
    decoder.cache.set_lengths(lengths, [0, 0, 0], [TRIAL_CACHE.max_tokens] * 3)
    return before


@torch.no_grad()
def continues(policy: Policy) -> bool:
    """Whether keys can be kept between turns with this model, according to a trial with two dialogues of two turns.

    The second turn's log-probabilities must be the same as in one pass over the whole dialogue.
    """
    size, greedy = policy.head().vocabulary, Sampling(temperature=0.0)
    engine = NativeEngine(policy)
    engine.keeps_keys = True  # the trial needs kept keys

    def play() -> tuple[list[Prompt], list[Completion], bool]:
        with engine.session() as session:
            prompts = [Prompt((1 % size, 2 % size, 3 % size)), Prompt((3 % size,))]
            first = session.sample([Request(prompt, 4, keep=True) for prompt in prompts], greedy, 0)
            texts = [[2 % size], [4 % size] * 5]
            parts = zip(prompts, first, texts, strict=True)
            dialogues = [prompt.then(reply.tokens.tolist() + text) for prompt, reply, text in parts]
            second = session.sample([Request(p, 3, continues=i) for i, p in enumerate(dialogues)], greedy, 0)
            return dialogues, second, session.continued == 2

    with short_windows(policy.base):
        played = tried(play)
        if played is None:
            return False
        dialogues, second, continued = played
        return continued and completions_agree(policy, dialogues, second)
