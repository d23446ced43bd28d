"""The interface of engines: ``Request``, ``Rollouts``, the protocol ``Engine``, and a ``Session`` of several calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from poise._lib.device import send
from poise.batch import Rows
from poise.rollout.sampling import Sampling


@dataclass(frozen=True)
class Request:
    """Asks for one response to one prompt.

    Its random numbers depend on the seed of the call and on ``number`` alone; by default its place in the list.

    In a ``Session`` a request may continue one of the call before. Its ``prompt`` is still the whole dialogue: the
    earlier prompt, the response to it, and new tokens. An engine that has kept the keys reads only the new ones.
    """

    prompt: Sequence[int]
    max_tokens: int
    stop: Sequence[int] = ()  # tokens that end the response
    number: int | None = None
    keep: bool = False  # whether the next call of the session may continue it
    continues: int | None = None  # the number of the request that it continues


def repeated(prompts: Sequence[Sequence[int]], group: int, max_tokens: int, stop: Sequence[int]) -> list[Request]:
    """``group`` requests for each prompt, group after group."""
    return [Request(prompt, max_tokens, stop) for prompt in prompts for _ in range(group)]


def check_requests(requests: Sequence[Request]) -> None:
    """Raise ValueError for requests that no engine can answer."""
    if not requests:
        raise ValueError("sample: there is no prompt: pass at least one request")
    for i, request in enumerate(requests):
        if not len(request.prompt):
            raise ValueError(f"request {i}: an empty prompt predicts nothing")
        if request.max_tokens < 1:
            raise ValueError(f"request {i}: max_tokens = {request.max_tokens} must be at least 1")


def numbers(requests: Sequence[Request]) -> list[int]:
    """The number of each request, on which its random numbers depend."""
    return [i if request.number is None else request.number for i, request in enumerate(requests)]


def end_table(requests: Sequence[Request], device: torch.device) -> Tensor:
    """(requests, most stop tokens) the stop tokens of each request, padded with −1, which is no token."""
    most = max(1, max(len(request.stop) for request in requests))
    return send(torch.tensor([[*r.stop, *[-1] * (most - len(r.stop))] for r in requests]), device)


@dataclass(frozen=True, eq=False)
class Rollouts:
    """B responses, padded to T tokens. A response follows its prompt and ends with the last token the model wrote.

    In a dialogue of several turns it includes the environment's tokens: the model *ran through* them, but they are not
    its *own*.
    """

    prompts: list[list[int]]  # B token lists; the same within a group
    tokens: Tensor  # (B, T)
    mask: Tensor  # (B, T) bool: the model's own tokens, the one that ends a reply included
    logp: Tensor  # (B, T) of softmax(logits / temperature), as sampled
    entropy: Tensor  # (B, T)
    finished: Tensor  # (B,) bool: ended by a stop token, not by the limit
    # (B, T) the sampler's own log-probabilities, if it rounds differently from the policy; logp is the policy's then
    sampler_logp: Tensor | None = None
    # (length, own tokens) of each response, if the host knows them already: asking the device would make it wait
    extents: list[tuple[int, int]] | None = None

    @cached_property
    def _extents(self) -> list[tuple[int, int]]:
        if self.extents is not None:
            return self.extents
        ends = (self.mask * torch.arange(1, self.mask.shape[1] + 1, device=self.mask.device)).amax(1)
        return [(end, own) for end, own in torch.stack([ends, self.mask.sum(1)], 1).tolist()]

    @cached_property
    def lengths(self) -> list[int]:
        """The B response lengths, on the host."""
        return [length for length, _ in self._extents]

    @cached_property
    def has_holes(self) -> bool:
        """Whether any response contains tokens of the environment."""
        return any(length != own for length, own in self._extents)

    @cached_property
    def ran(self) -> Tensor:
        """(B, T) bool: all tokens of the responses, the model's own and the environment's."""
        ends = send(self.lengths, self.mask.device)
        return torch.arange(self.mask.shape[1], device=self.mask.device) < ends[:, None]

    @cached_property
    def ran_index(self) -> Tensor:
        """(N,) the places of these tokens in the flattened (B, T), row after row."""
        counts, total = send(self.lengths, self.mask.device), sum(self.lengths)
        owner = torch.repeat_interleave(counts, output_size=total)
        begin = torch.arange(len(counts), device=owner.device) * self.mask.shape[1] - (counts.cumsum(0) - counts)
        return begin[owner] + torch.arange(total, device=owner.device)

    @cached_property
    def index(self) -> Tensor:
        """(n,) the places of the model's own tokens in the flattened (B, T), row after row."""
        return self.ran_index[self.mask.flatten()[self.ran_index]] if self.has_holes else self.ran_index

    def rows(self, ix: Rows) -> Rollouts:
        """The responses of some rows."""
        if isinstance(ix, slice):
            chosen = list(range(len(self.prompts))[ix])
        else:
            chosen = ix.tolist() if isinstance(ix, Tensor) else list(ix)
            ix = send(ix, self.mask.device)
        fields = ("tokens", "mask", "logp", "entropy", "finished", "sampler_logp")
        taken = {name: getattr(self, name)[ix] for name in fields if getattr(self, name) is not None}
        return Rollouts([self.prompts[i] for i in chosen], **taken, extents=[self._extents[i] for i in chosen])

    def to_host(self) -> Rollouts:
        """The same, in the host's memory."""
        fields = ("tokens", "mask", "logp", "entropy", "finished", "sampler_logp")
        moved = {name: getattr(self, name).cpu() for name in fields if getattr(self, name) is not None}
        return replace(self, **moved, extents=self._extents)


def side_by_side(parts: Sequence[Rollouts]) -> Rollouts:
    """Concatenate the responses of several calls."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.tokens.shape[1] for part in parts)

    def concatenated(name: str) -> Tensor:
        tensors = [getattr(part, name) for part in parts]
        return torch.cat([torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in tensors])

    return Rollouts(
        prompts=[prompt for part in parts for prompt in part.prompts],
        tokens=concatenated("tokens"),
        mask=concatenated("mask"),
        logp=concatenated("logp"),
        entropy=concatenated("entropy"),
        finished=torch.cat([part.finished for part in parts]),
    )


Done = Callable[[int, list[int]], None]  # called with a response's place in the result, and its tokens


class Engine(Protocol):
    """Samples responses from the policy as it is now."""

    def sample(self, requests: Sequence[Request], sampling: Sampling, seed: int, done: Done | None = None) -> Rollouts:
        """Sample a response to each request, in their order. The same seed gives the same tokens.

        Log-probabilities and entropies are those of the whole softmax, even if ``sampling`` excludes tokens. An engine
        that sees a response end before the others calls ``done`` at once.
        """
        ...


class Session:
    """Calls to one engine. Requests of a call may continue those of the call before that had ``keep`` set.

    A session remembers one call at a time, and nothing after its end, so nothing has to be released. Open it for
    episodes that are played with the same weights. This one only checks the requests: the engine reads every dialogue
    again. The native engine's session keeps the keys (``engines/native/kept_rows.py``).
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.continued = self.reread = 0  # requests that built on kept keys, and that read their dialogue again
        self._dialogues: dict[int, list[int]] = {}  # prompt and response of the call before, by number
        self._open = True

    def sample(self, requests: Sequence[Request], sampling: Sampling, seed: int, done: Done | None = None) -> Rollouts:
        """Sample a response to each request, in their order: see ``Engine``."""
        self._check(requests)
        dialogues, self._dialogues = self._dialogues, {}  # a call that fails leaves nothing to continue
        rollouts = self._sample(requests, dialogues, sampling, seed, done)
        if any(request.keep for request in requests):
            tokens, lengths = rollouts.tokens.tolist(), rollouts.lengths
            self._dialogues = {
                number: [*request.prompt, *tokens[row][: lengths[row]]]
                for row, (number, request) in enumerate(zip(numbers(requests), requests, strict=True))
                if request.keep
            }
        return rollouts

    def _sample(
        self, requests: Sequence[Request], dialogues: dict[int, list[int]], sampling: Sampling, seed: int,
        done: Done | None,
    ) -> Rollouts:  # fmt: skip
        del dialogues
        self.reread += sum(request.continues is not None for request in requests)
        return self.engine.sample(requests, sampling, seed, done)

    def _check(self, requests: Sequence[Request]) -> None:
        if not self._open:
            raise ValueError("this session has ended: open another one for new episodes")
        kept = [number for number, request in zip(numbers(requests), requests, strict=True) if request.keep]
        if len(set(kept)) < len(kept):
            raise ValueError("two requests with keep=True have the same number: give each its own")
        for i, request in enumerate(requests):
            if request.continues is None:
                continue
            if request.continues not in self._dialogues:
                raise ValueError(
                    f"request {i} continues request number {request.continues}, which the call before did not keep: "
                    "set keep=True there"
                )
            before = self._dialogues[request.continues]
            if len(request.prompt) <= len(before) or list(request.prompt[: len(before)]) != before:
                raise ValueError(
                    f"request {i} continues request number {request.continues}: its prompt must be that request's "
                    f"prompt and response ({len(before)} tokens) and at least one new token"
                )

    def close(self) -> None:
        """End the session: nothing can be continued any more."""
        self._open, self._dialogues = False, {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def session(engine: Engine, length: int | None = None) -> Session:
    """The engine's own session, if it has one, else one that reads every dialogue again.

    ``length`` is the longest dialogue to expect, in tokens: an engine may reserve memory for it once.
    """
    opener = getattr(engine, "session", None)
    return opener(length) if opener is not None else Session(engine)
