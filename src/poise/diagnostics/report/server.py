"""``poise report --watch``: the page served on this machine alone, with what a running training adds to it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from safetensors import SafetensorError

from poise._files import dumps
from poise.diagnostics.report.data import Source
from poise.diagnostics.report.page import frame

ADDRESS = "127.0.0.1"


def serve(paths: Sequence[str | Path], port: int = 0) -> ThreadingHTTPServer:
    """A server that is ready to run (``serve_forever``). Port 0: one that is free."""
    source, lock = Source(paths), Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A page elsewhere could have its own name lead here: only who asks for this machine by name is answered.
            if self.headers.get("Host", "").rpartition(":")[0] not in (ADDRESS, "localhost"):
                self._send(403, "text/plain", b"this server answers to 127.0.0.1 alone\n")
                return
            try:
                with lock:
                    answer = self._answer()
            except (OSError, ValueError, SafetensorError) as error:  # what a resumed run has just removed, say
                answer = 503, "text/plain", f"{error}\n".encode()
            with suppress(ConnectionError):  # who asked has gone
                self._send(*answer)

        def _answer(self) -> tuple[int, str, bytes]:
            if self.path == "/":
                return 200, "text/html; charset=utf-8", "".join(frame(live=True)).encode()
            if self.path == "/stamp":
                return 200, "text/plain", source.stamp().encode()
            if self.path == "/index":
                return 200, "application/json", dumps(source.index())
            if match := re.fullmatch(r"/block/(\d{1,6})/(\d{1,12})/(\d{1,9})", self.path):
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
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
            """Nothing: the terminal belongs to whoever watches."""

    return ThreadingHTTPServer((ADDRESS, port), Handler)
