"""A frozen model behind an OpenAI-compatible completions endpoint: ``vllm serve``, ``transformers serve`` and others.

``Server`` sends texts to continue and validates the answers. It retries a failing request for ``patience`` seconds.
Then the run stops, because server failures must not influence a reward.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from poise._lib.errors import check_range, check_whole, complain, counted, quote
from poise.models.location import ModelError
from poise.sampling.draws import Sampling
from poise.sampling.requests import Engine, Request

if TYPE_CHECKING:
    from poise.models.policy import Policy

TIMEOUT = 300.0  # seconds that one request may take
PATIENCE = 300.0  # seconds to retry a failing request: enough time to restart a server
LONGEST_PAUSE = 10.0  # maximum seconds between two attempts
BYTES = 1 << 20  # maximum size of an answer, plus …
TOKEN_BYTES = 1 << 10  # … this size per requested token
REPEATED = (408, 425, 429)  # 4xx statuses after which a request is retried
INCOMPLETE = "\ufffd"  # replaces the bytes of an incomplete character
MOST_BYTES = 4  # per character in UTF-8
KEY = "POISE_RECEIVER_KEY"  # environment variable with the server's API key


class ReceiverError(ModelError):
    """A server refused a request or gave no usable answer. The message says what to do."""


@dataclass(frozen=True)
class Reply:
    """A continuation. ``finished`` is False if the token limit cut off the text."""

    text: str
    finished: bool = True


class Receiver(Protocol):
    """A model that continues texts."""

    def complete(
        self, prompts: Sequence[str], limits: Sequence[int], seeds: Sequence[int], sampling: Sampling
    ) -> list[Reply]:
        """Continue each prompt with at most its limit of tokens."""
        ...


@dataclass(frozen=True, eq=False)
class Loaded:
    """A loaded model as a receiver."""

    policy: Policy
    engine: Engine

    def complete(
        self, prompts: Sequence[str], limits: Sequence[int], seeds: Sequence[int], sampling: Sampling
    ) -> list[Reply]:
        """See ``Receiver``."""
        encoded = self.policy.tokenizer(list(prompts))["input_ids"]
        ends = self.policy.end_tokens
        rows = zip(encoded, limits, seeds, strict=True)
        requests = [Request(tokens, limit, ends, number) for tokens, limit, number in rows]
        completions = self.engine.sample(requests, sampling, 0)
        return [Reply(self.policy.decode(each.tokens.tolist()), each.finished) for each in completions]


def is_address(name: str) -> bool:
    """Whether a model's name is the address of a server."""
    return name.startswith(("http://", "https://"))


@dataclass(frozen=True)
class Server:
    """An OpenAI-compatible server at ``address``, such as ``http://host:8000/v1``. Append ``#NAME`` to select a model.

    A request may take ``timeout`` seconds; a failing request is retried for ``patience`` seconds. At most
    ``concurrent`` requests run at once.
    """

    address: str
    timeout: float = TIMEOUT
    patience: float = PATIENCE
    concurrent: int = 64

    def __post_init__(self) -> None:
        parts = urlsplit(self.address)
        if not is_address(self.address) or not parts.hostname or parts.query or parts.username:
            raise ValueError(
                f"{quote(self.address)} is not the address of a server: write http://HOST:PORT/v1, and append "
                "#NAME if the server has several models"
            )
        check_range("receiver", "timeout", self.timeout, 0.01)
        check_range("receiver", "patience", self.patience, 0.0)
        check_whole("receiver", "concurrent", self.concurrent, 1)

    def check(self) -> str:
        """Request one token and return the model's name. Before a run, this detects a server that is down."""
        name = self._name()
        self.complete(["."], [1], [0], Sampling())
        return name

    def complete(
        self, prompts: Sequence[str], limits: Sequence[int], seeds: Sequence[int], sampling: Sampling
    ) -> list[Reply]:
        """See ``Receiver``."""
        if not prompts:
            return []
        name = self._name()
        with closing(_Calls(self)) as calls, ThreadPoolExecutor(min(self.concurrent, len(prompts))) as pool:
            rows = zip(prompts, limits, seeds, strict=True)
            bodies = [_body(name, prompt, limit, seed, sampling) for prompt, limit, seed in rows]
            try:
                return list(pool.map(lambda body: calls.patient("/completions", body, _reply), bodies))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                calls.close()
                raise

    def _name(self) -> str:
        """Return the model's name from the address, or the first model that the server lists."""
        if named := urlsplit(self.address).fragment:
            return named
        with closing(_Calls(self)) as calls:
            return str(calls.patient("/models", None, lambda answer, _: str(answer["data"][0]["id"])))


def _body(name: str, prompt: str, limit: int, seed: int, sampling: Sampling) -> dict[str, Any]:
    """Build the body of a request. Fields outside OpenAI's API are only sent if needed: some servers reject them."""
    body = {"model": name, "prompt": prompt, "max_tokens": limit, "temperature": sampling.temperature}
    body |= {"seed": abs(seed) >> 32}  # 31 bits: the largest seeds that servers accept
    body |= {"top_p": sampling.top_p} if sampling.top_p < 1 else {}
    body |= {"top_k": sampling.top_k} if sampling.top_k else {}
    return body


def _reply(answer: Any, body: Any) -> Reply:
    """Parse the continuation. An invalid answer raises ``_LieError`` or one of ``_MALFORMED``."""
    if len(answer["choices"]) != 1:
        raise _LieError(f"its answer has {len(answer['choices'])} continuations, but one was requested")
    choice, used = answer["choices"][0], (answer.get("usage") or {}).get("completion_tokens")
    if not isinstance(choice["text"], str):
        raise _LieError("the text of its reply is not a string")
    if used is not None and not 0 <= int(used) <= body["max_tokens"]:
        raise _LieError(f"its reply has {int(used)} tokens, but at most {body['max_tokens']} were requested")
    return Reply(choice["text"], choice.get("finish_reason") != "length")


_MALFORMED = (KeyError, IndexError, TypeError, ValueError, AttributeError)


class _LieError(Exception):
    """The answer is invalid. The message says why."""


class _RefusedError(Exception):
    """The server rejected the request, which is therefore not retried."""


@dataclass(eq=False)
class _Calls:
    """Concurrent calls to a server; ``close`` ends them all."""

    server: Server
    sockets: set[socket.socket] = field(default_factory=set)
    stopped: threading.Event = field(default_factory=threading.Event)
    said: threading.Event = field(default_factory=threading.Event)

    def close(self) -> None:
        """End all calls: shut down their connections and stop their retries."""
        self.stopped.set()
        for each in [*self.sockets]:
            _shut(each)

    def patient(self, path: str, body: dict[str, Any] | None, read: Any) -> Any:
        """Call the server and return ``read(answer, body)``; retry a failing call for ``patience`` seconds."""
        start, pause = time.monotonic(), 0.25
        where = self.server.address.partition("#")[0]
        while True:
            try:
                return read(self._once(path, body), body)
            except _RefusedError as error:
                raise ReceiverError(f"the receiver at {where} {error}") from None
            except _MALFORMED:
                why = "its answer is not a completion"
            except (_LieError, OSError, HTTPException) as error:
                why = str(error) or type(error).__name__
            tried = time.monotonic() - start
            if self.stopped.is_set() or tried + pause > self.server.patience:
                raise ReceiverError(
                    f"the receiver at {where} has given no usable answer ({why}) for {tried:.0f} seconds: check "
                    "the server's log, restart the server, and resume the run; patience=SECONDS waits longer, "
                    "timeout=SECONDS allows slower answers"
                )
            if not self.said.is_set():
                self.said.set()
                complain(f"the receiver at {where}: {why}; trying again for {self.server.patience:g} seconds")
            self.stopped.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _once(self, path: str, body: dict[str, Any] | None) -> Any:
        """Send one request and return the JSON of the answer. ``server.timeout`` limits the whole exchange."""
        parts, limit, start = urlsplit(self.server.address), self.server.timeout, time.monotonic()
        connect = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        connection = connect(parts.hostname or "", parts.port, timeout=limit)
        try:
            connection.connect()
            self.sockets.add(connection.sock)
            timer = threading.Timer(limit, _shut, (connection.sock,))
            timer.daemon = True
            timer.start()
            try:
                headers = {"Content-Type": "application/json", "Accept": "application/json"}
                headers |= {"Authorization": f"Bearer {key}"} if (key := os.environ.get(KEY)) else {}
                data = None if body is None else json.dumps(body).encode()
                connection.request("POST" if data else "GET", f"{parts.path.rstrip('/')}{path}", data, headers)
                answer = connection.getresponse()
                most = BYTES + TOKEN_BYTES * (body["max_tokens"] if body else 0)
                content = answer.read(most + 1)
            finally:
                timer.cancel()
                self.sockets.discard(connection.sock)
        except (OSError, HTTPException, ValueError):
            if time.monotonic() - start < limit:
                raise
        finally:
            connection.close()
        if time.monotonic() - start >= limit:
            raise TimeoutError(f"the request took longer than {limit:g} seconds")
        if len(content) > most:
            raise _LieError(f"its answer has more than {counted(most, 'byte')}")
        shown = f"status {answer.status}: {quote(content[:1000].decode(errors='replace'))}"
        if 400 <= answer.status < 500 and answer.status not in REPEATED:
            raise _RefusedError(f"refuses the request ({shown})")
        if answer.status != 200:
            raise ConnectionError(shown)
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise _LieError(f"its answer is not JSON ({shown})") from None


def _shut(connected: socket.socket) -> None:
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


class Vocabulary(Protocol):
    """Decodes tokens and lists the end tokens. A ``Policy`` is a ``Vocabulary``."""

    @property
    def end_tokens(self) -> list[int]:
        """The tokens that end a response."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a response, without its end token."""
        ...


def whole_text(policy: Vocabulary, tokens: Sequence[int]) -> str:
    """Decode the tokens, without an incomplete character at the end."""
    text = policy.decode(tokens)
    for fewer in range(1, min(MOST_BYTES, len(tokens) + 1)):
        if not text.endswith(INCOMPLETE):
            return text
        text = policy.decode(tokens[: len(tokens) - fewer])
    return text.rstrip(INCOMPLETE)


def before_control(tokenizer: Any, text: str) -> str:
    """Cut ``text`` before the first control token that it spells out: a server would read it as the token itself."""
    controls = "|".join(re.escape(token) for token in tokenizer.all_special_tokens if token)
    return re.split(controls, text, maxsplit=1)[0] if controls else text
