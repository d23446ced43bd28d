"""Several calls to an engine for dialogues of several turns, in which a request may continue an earlier one."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from poise.rollout.sampling import Sampling
from poise.rollout.types import Done, Engine, Request, Rollouts, numbers


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
