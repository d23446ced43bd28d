"""``poise report --watch``: serves the page on this machine only, and keeps it up to date during training."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from poise._lib.errors import visible
from poise._lib.files import dumps
from poise.referee.report.html.data import Decode, Source
from poise.referee.report.html.page import frame

ADDRESS = "127.0.0.1"
HOST = re.compile(r"(127\.0\.0\.1|localhost)(:[0-9]{1,5})?", re.IGNORECASE)


class Server(ThreadingHTTPServer):
    """One thread per connection."""

    request_queue_size = 1024  # with a shorter queue the kernel may drop connections

    def __init__(self, port: int, source: Source) -> None:
        self.source, self.lock = source, Lock()
        super().__init__((ADDRESS, port), Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnected; any other error is a bug and keeps its traceback."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Serves the page, its stamp, its index and its blocks."""

    server: Server
    server_version, sys_version = "poise", ""
    timeout = 60  # seconds that a client may be silent

    def do_GET(self) -> None:
        """Answer one request."""
        # Against DNS rebinding, only these host names get an answer: a foreign page can point its own host
        # name at this machine.
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not HOST.fullmatch(hosts[0].strip()):
            self._send(403, "text/plain", b"this server answers only to 127.0.0.1\n")
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
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Answer an unreadable request with http.server's error as plain text."""
        self.close_connection = True
        self._send(code, "text/plain", f"{visible(message or 'this request cannot be answered')}\n".encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's own name
        """Log nothing: the terminal belongs to the user."""


def serve(paths: Sequence[str | Path], port: int = 0, *, x: str = "step", decode: Decode | None = None) -> Server:
    """Create a server; call its ``serve_forever``. Port 0 picks a free port. Other arguments as in ``write_report``."""
    return Server(port, Source(paths, x, decode))
