"""The interface of sampling engines: ``Request``, ``Completion``, the protocol ``Engine``, and ``Session``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from poise.batch import Prompt
from poise.sampling.draws import Sampling


@dataclass(frozen=True)
class Request:
    """Asks for one response to one prompt.

    The response's random numbers depend only on the call's seed and on ``number`` (default: the request's index in the
    list).

    In a ``Session``, a request may continue a request from the previous call. ``prompt`` is still the whole dialogue:
    the earlier prompt, the response, and new tokens. An engine that kept the keys reads only the new tokens.
    """

    prompt: Prompt  # a sequence of tokens is converted
    max_tokens: int
    stop: Sequence[int] = ()  # tokens that end the response
    number: int | None = None
    keep: bool = False  # whether the session's next call may continue this request
    continues: int | None = None  # the number of the earlier request that this one continues

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, Prompt):
            object.__setattr__(self, "prompt", Prompt(tuple(self.prompt)))


def repeated(
    prompts: Sequence[Prompt | Sequence[int]], group: int, max_tokens: int, stop: Sequence[int]
) -> list[Request]:
    """Return ``group`` requests for each prompt, group after group."""
    distinct = [prompt if isinstance(prompt, Prompt) else Prompt(tuple(prompt)) for prompt in prompts]
    return [Request(prompt, max_tokens, stop) for prompt in distinct for _ in range(group)]


def check_requests(requests: Sequence[Request]) -> None:
    """Raise ValueError for requests that no engine can answer."""
    if not requests:
        raise ValueError("sample: there is no prompt: pass at least one request")
    for i, request in enumerate(requests):
        if not len(request.prompt.tokens):
            raise ValueError(f"request {i}: the prompt is empty")
        if request.max_tokens < 1:
            raise ValueError(f"request {i}: max_tokens = {request.max_tokens} must be at least 1")


def numbers(requests: Sequence[Request]) -> list[int]:
    """Return each request's number, from which its random numbers are derived."""
    return [i if request.number is None else request.number for i, request in enumerate(requests)]


def stop_table(requests: Sequence[Request]) -> Tensor:
    """Return the stop tokens of each request, (requests, most stop tokens), padded with −1, which is never a token."""
    most = max(1, max(len(request.stop) for request in requests))
    return torch.tensor([[*r.stop, *[-1] * (most - len(r.stop))] for r in requests])


@dataclass(frozen=True, eq=False)
class Completion:
    """An engine's response to one request: n tokens, including the stop token. All tensors are on the host."""

    tokens: Tensor  # (n,) int64
    logp: Tensor  # (n,) log softmax(logits / temperature), under the policy
    entropy: Tensor  # (n,)
    finished: bool  # ended by a stop token, not by the limit
    sampler_logp: Tensor | None = None  # (n,) from the engine itself, if it rounds differently from the policy


def completions(
    lengths: Sequence[int], finished: Sequence[bool], tokens: Tensor, logp: Tensor, entropy: Tensor
) -> list[Completion]:
    """Split padded (B, T) tensors into B completions. Each tensor is copied from the device once."""
    rows = zip(lengths, finished, tokens.cpu(), logp.cpu(), entropy.cpu(), strict=True)
    return [Completion(ids[:n], p[:n], h[:n], end) for n, end, ids, p, h in rows]


Done = Callable[[int, list[int]], None]  # called with a response's index in the result, and its tokens


class Engine(Protocol):
    """Samples responses with the policy's current weights."""

    def sample(
        self, requests: Sequence[Request], sampling: Sampling, seed: int, done: Done | None = None
    ) -> list[Completion]:
        """Sample a response to each request, in order. The same seed gives the same tokens.

        Log-probabilities and entropies are computed from the full softmax, even if ``sampling`` excludes tokens. An
        engine that detects the end of a response while others continue calls ``done`` immediately.
        """
        ...


class Session:
    """Several calls to one engine. A request may continue a request from the previous call that had ``keep=True``.

    All calls of a session must use the same weights. This class only checks the requests, and the engine reads every
    dialogue again; ``NativeSession`` keeps the keys (``sampling/native/session.py``).
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.continued = self.reread = 0  # requests that used kept keys; requests that read their dialogue again
        self._dialogues: dict[int, tuple[int, ...]] = {}  # prompt and response of the previous call, by number
        self._open = True

    def sample(
        self, requests: Sequence[Request], sampling: Sampling, seed: int, done: Done | None = None
    ) -> list[Completion]:
        """Sample a response to each request, in order: see ``Engine``."""
        self._check(requests)
        self._dialogues = {}  # no request can be continued after a failed call
        sampled = self._sample(requests, sampling, seed, done)
        self._dialogues = {
            number: (*request.prompt.tokens, *completion.tokens.tolist())
            for number, request, completion in zip(numbers(requests), requests, sampled, strict=True)
            if request.keep
        }
        return sampled

    def _sample(
        self, requests: Sequence[Request], sampling: Sampling, seed: int, done: Done | None
    ) -> list[Completion]:
        self.reread += sum(request.continues is not None for request in requests)
        return self.engine.sample(requests, sampling, seed, done)

    def _check(self, requests: Sequence[Request]) -> None:
        if not self._open:
            raise ValueError("this session has ended: open a new session for new episodes")
        keepers = [number for number, request in zip(numbers(requests), requests, strict=True) if request.keep]
        if len(set(keepers)) < len(keepers):
            raise ValueError("two requests with keep=True have the same number: give each request its own number")
        for i, request in enumerate(requests):
            if request.continues is None:
                continue
            if request.continues not in self._dialogues:
                raise ValueError(
                    f"request {i} continues request number {request.continues}, which the previous call did not keep: "
                    "set keep=True on that request"
                )
            before = self._dialogues[request.continues]
            if len(request.prompt.tokens) <= len(before) or request.prompt.tokens[: len(before)] != before:
                raise ValueError(
                    f"request {i} continues request number {request.continues}: its prompt must be that request's "
                    f"prompt and response ({len(before)} tokens) and at least one new token"
                )

    def close(self) -> None:
        """End the session. Its requests can no longer be continued."""
        self._open, self._dialogues = False, {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def session(engine: Engine, length: int | None = None) -> Session:
    """Open the engine's own session if it has one, else a ``Session``, which reads every dialogue again.

    ``length`` is the longest expected dialogue, in tokens; an engine may reserve memory for this length.
    """
    opener = getattr(engine, "session", None)
    return opener(length) if opener is not None else Session(engine)
