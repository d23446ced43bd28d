"""``poise report --watch``: the page served on this machine alone, with what a running training adds to it.

Whoever can connect may be hostile: a page elsewhere, or a program that connects and sends nothing. So a connection has
a time limit, their number has one, and a request that fails costs no more than its own answer.
"""

from __future__ import annotations

import io
import re
import socket
import sys
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import Any

from poise._lib.files import dumps
from poise.reports.html.data import Source
from poise.reports.html.page import frame
from poise.runs.console import visible

ADDRESS = "127.0.0.1"
HOST = re.compile(r"(127\.0\.0\.1|localhost)(:[0-9]{1,5})?", re.IGNORECASE)
CONNECTIONS = 512  # open at once; more wait in the backlog
REQUEST_WITHIN = 10.0  # seconds that a client has for its request
GRACE = 3.0  # the same while all connections are taken
SEND_WITHIN = 60.0  # seconds for the whole answer
PAUSE = 0.1  # seconds between two looks for a free connection or descriptor


class Server(ThreadingHTTPServer):
    """One thread per connection, with limits on both."""

    request_queue_size = 1024  # with a short backlog the kernel drops connections, and a client retries for a minute

    def __init__(self, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self._slots = BoundedSemaphore(_connections())
        self.full = False
        super().__init__((ADDRESS, port), handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection. OSError, after a pause, where that cannot be: the listening socket stays ready."""
        self.full = not self._slots.acquire(timeout=PAUSE)
        if self.full:
            raise OSError("all connections are taken")
        try:
            return super().get_request()
        except OSError:  # out of descriptors, say
            self.full = True
            self._slots.release()
            time.sleep(PAUSE)
            raise

    def shutdown_request(self, request: Any) -> None:
        """Close a connection. Every accepted one comes here exactly once."""
        super().shutdown_request(request)
        self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing where the client has gone; anything else is a bug and keeps its traceback."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Request(io.RawIOBase):
    """The bytes that a client sends. TimeoutError if it lets the server wait for too long, be it a little at a time."""

    def __init__(self, connection: socket.socket, server: Server) -> None:
        self._connection, self._server, self._began = connection, server, time.monotonic()

    def readable(self) -> bool:
        """Whether this can be read: yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Wait for bytes. Those that are there already are read however late it is: that was not the client's fault."""
        while True:
            limit = GRACE if self._server.full else REQUEST_WITHIN
            left = self._began + limit - time.monotonic()
            self._connection.settimeout(min(max(left, 0.0), GRACE))  # from time to time, look whether it is full
            try:
                return self._connection.recv_into(buffer)
            except (TimeoutError, BlockingIOError):
                if left <= 0:
                    raise TimeoutError from None


def serve(paths: Sequence[str | Path], port: int = 0) -> Server:
    """A server that is ready to run (``serve_forever``). Port 0: one that is free."""
    source, lock = Source(paths), Lock()

    class Handler(BaseHTTPRequestHandler):
        server: Server
        server_version, sys_version = "poise", ""

        def setup(self) -> None:
            super().setup()
            self.rfile.close()
            self.rfile = io.BufferedReader(Request(self.connection, self.server))

        def do_GET(self) -> None:
            # A page elsewhere could have its own name lead here: only who asks for this machine by name is answered.
            hosts = self.headers.get_all("Host", [])
            if len(hosts) != 1 or not HOST.fullmatch(hosts[0].strip()):
                self._send(403, "text/plain", b"this server answers to 127.0.0.1 alone\n")
                return
            try:
                with lock:
                    answer = self._answer()
            except (OSError, ValueError, RecursionError) as error:  # what a resumed run has just removed, say
                answer = 503, "text/plain", f"{visible(str(error))}\n".encode()
            self._send(*answer)

        def _answer(self) -> tuple[int, str, bytes]:
            if self.path == "/":
                return 200, "text/html; charset=utf-8", "".join(frame(live=True)).encode()
            if self.path == "/stamp":
                return 200, "text/plain", source.stamp().encode()
            if self.path == "/index":
                return 200, "application/json", dumps(source.index())
            if match := re.fullmatch(r"/block/([0-9]{1,6})/([0-9]{1,12})/([0-9]{1,9})", self.path):
                run, step, row = map(int, match.groups())
                try:
                    return 200, "application/octet-stream", source.block((run, step, row))
                except KeyError:
                    pass
            return 404, "text/plain", b"there is nothing here\n"

        def _send(self, status: int, kind: str, content: bytes) -> None:
            self.connection.settimeout(SEND_WITHIN)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Cross-Origin-Resource-Policy", "same-origin")
            self.end_headers()
            self.wfile.write(content)

        def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
            """What http.server says of a request that it cannot read, as plain text."""
            self.close_connection = True
            self._send(code, "text/plain", f"{visible(message or 'this request cannot be answered')}\n".encode())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
            """Nothing: the terminal belongs to whoever watches."""

    return Server(port, Handler)


def _connections() -> int:
    """Half of the descriptors that the process may have, so that run files can be opened too."""
    try:
        import resource
    except ImportError:  # not on Windows
        return CONNECTIONS
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS if allowed == resource.RLIM_INFINITY else max(1, min(CONNECTIONS, allowed // 2))
