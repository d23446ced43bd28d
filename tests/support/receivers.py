"""A completions server on this machine that says what it is told to, for receivers behind an address."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def completion(text, tokens=1, finish="stop", **more):
    """The body of an answer, as servers send it."""
    return json.dumps(
        {"choices": [{"text": text, "finish_reason": finish}], "usage": {"completion_tokens": tokens}, **more}
    ).encode()


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self._send(200, json.dumps({"data": [{"id": "tiny"}]}).encode())

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(asked)
            self.server.keys.append(self.headers.get("Authorization"))
            number = len(self.server.asked)
        said = self.server.say(asked, number)
        if callable(said):
            return said(self)
        status, body = said if isinstance(said, tuple) else (200, said)
        return self._send(status, completion(body) if isinstance(body, str) else body)

    def _send(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:  # whoever asked has hung up
            self.close_connection = True


@contextmanager
def serving(say, port=0):
    """``say(request, number)`` is a text, a body, (status, body), or a function that gets the handler."""
    server = ThreadingHTTPServer(("127.0.0.1", port), _Handler)
    server.daemon_threads, server.say, server.asked, server.keys, server.lock = True, say, [], [], threading.Lock()
    server.address = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
