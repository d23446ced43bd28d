"""``poise report --watch``: serves the page on this machine only, and keeps it up to date while training runs.

A client may be hostile: a web page from elsewhere, or a program that connects and sends nothing. So connections have a
time limit, their number is limited, and a request that fails affects no other request.
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
CONNECTIONS = 512  # open at once; further ones wait in the backlog
REQUEST_WITHIN = 10.0  # seconds a client has to send its request
GRACE = 3.0  # the same limit while all connections are taken
SEND_WITHIN = 60.0  # seconds a client has to take the whole answer
PAUSE = 0.1  # seconds between attempts to get a connection or descriptor


class Server(ThreadingHTTPServer):
    """One thread per connection, with limits on their number and their time."""

    request_queue_size = 1024  # with a short backlog the kernel drops connections, and a client retries for a minute

    def __init__(self, port: int, source: Source) -> None:
        self._slots = BoundedSemaphore(_connections())
        self.full = False
        self.source, self.lock = source, Lock()
        super().__init__((ADDRESS, port), Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection. If that fails, pause and raise OSError; the server then simply tries again."""
        self.full = not self._slots.acquire(timeout=PAUSE)
        if self.full:
            raise OSError("all connections are taken")
        try:
            return super().get_request()
        except OSError:  # for example, out of descriptors
            self.full = True
            self._slots.release()
            time.sleep(PAUSE)
            raise

    def shutdown_request(self, request: Any) -> None:
        """Close a connection. Every accepted connection ends here exactly once."""
        super().shutdown_request(request)
        self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that went away; any other error is a bug and keeps its traceback."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Request(io.RawIOBase):
    """The bytes that a client sends. TimeoutError if the whole request takes too long, however it is split."""

    def __init__(self, connection: socket.socket, server: Server) -> None:
        self._connection, self._server, self._began = connection, server, time.monotonic()

    def readable(self) -> bool:
        """Always True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Wait for bytes. Bytes that have arrived are read even after the limit: that delay was not the client's."""
        while True:
            limit = GRACE if self._server.full else REQUEST_WITHIN
            left = self._began + limit - time.monotonic()
            self._connection.settimeout(min(max(left, 0.0), GRACE))  # wake up now and then to check server.full
            try:
                return self._connection.recv_into(buffer)
            except (TimeoutError, BlockingIOError):
                if left <= 0:
                    raise TimeoutError from None


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of the page: the page itself, the stamp, the index, and blocks."""

    server: Server
    server_version, sys_version = "poise", ""

    def setup(self) -> None:
        """Read requests through ``Request``, which limits their time."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(Request(self.connection, self.server))

    def do_GET(self) -> None:
        """Answer one request."""
        # DNS rebinding: a page elsewhere can point its own name at this machine. So only these host names are answered.
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not HOST.fullmatch(hosts[0].strip()):
            self._send(403, "text/plain", b"this server answers to 127.0.0.1 alone\n")
            return
        try:
            with self.server.lock:
                answer = self._answer()
        except (OSError, ValueError, RecursionError) as error:  # for example, a resumed run just removed a file
            answer = 503, "text/plain", f"{visible(str(error))}\n".encode()
        self._send(*answer)

    def _answer(self) -> tuple[int, str, bytes]:
        source = self.server.source
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
        """Send the error of http.server for an unreadable request, as plain text."""
        self.close_connection = True
        self._send(code, "text/plain", f"{visible(message or 'this request cannot be answered')}\n".encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's own name
        """Log nothing: the terminal belongs to the user."""


def serve(paths: Sequence[str | Path], port: int = 0, *, x: str = "step") -> Server:
    """A server that is ready to run (``serve_forever``). Port 0 picks a free port; ``x`` is as for ``write_report``."""
    return Server(port, Source(paths, x))


def _connections() -> int:
    """At most half of the process's descriptors, so that files of the run can still be opened."""
    try:
        import resource
    except ImportError:  # Windows
        return CONNECTIONS
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS if allowed == resource.RLIM_INFINITY else max(1, min(CONNECTIONS, allowed // 2))
