"""The watch server, over real sockets on this machine's loopback."""

import socket
import threading
from contextlib import ExitStack, closing
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from poise.reports.html import serve
from support.run_folders import make_run

PATIENCE = 60  # seconds: only so that a test that fails ends


def connect(url):
    return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=PATIENCE)


def read(connection):
    """All that the server sends; what it sent before it hung up."""
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


def send(url, request):
    with closing(connect(url)) as connection:
        try:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
        except OSError:  # the server has heard enough
            pass
        return read(connection)


def get(path="/stamp", *hosts):
    lines = [f"GET {path} HTTP/1.1", *(f"Host: {host}" for host in hosts), "", ""]
    return "\r\n".join(lines).encode()


def status(answer):
    return int(answer.split(b" ", 2)[1])


def test_only_this_machine_is_served(served):
    folder, url = served
    server = serve([folder.path])
    assert server.server_address[0] == "127.0.0.1"
    server.server_close()
    assert urlopen(f"{url}/index").status == 200
    assert folder.path.exists()


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "127.0.0.1:80", "localhost:1", "LocalHost", "127.0.0.1:65535"]
)
def test_this_machine_by_any_of_its_names(served, host):
    assert status(send(served[1], get("/stamp", host))) == 200


@pytest.mark.parametrize(
    "hosts",
    [
        (), ("",), ("evil.example:80",), ("evil.example",), ("127.0.0.1.evil.example",), ("localhost.evil.example:80",),
        ("127.0.0.1:80@evil.example",), ("127.0.0.1:evil",), ("evil.example#127.0.0.1",), ("0.0.0.0",), ("127.0.0.2",),
        ("[::1]",), ("127.0.0.1", "evil.example"), ("evil.example", "127.0.0.1"), ("127\u20240.0.1",),
    ],
)  # fmt: skip
def test_other_names_are_refused(served, hosts):
    for path in ("/", "/stamp", "/index", "/block/0/1/0", "/nothing"):
        assert status(send(served[1], get(path, *hosts))) == 403


@pytest.mark.parametrize(
    "path",
    [
        "/../config.json", "/block/0/1/999", "/block/0/1/-1", "/block/9/1/0", "/block/0/2/0", "/block/0/1/0/",
        "/%2e%2e/config.json", "/block/0/../../config.json", "//etc/passwd", "/block/0/000001/\u00b2", "/index?",
        "/INDEX", "/config.json", "http://127.0.0.1/index", "/block/999999/999999999999/999999999", "*",
        "/block/0/1/" + "9" * 5000, "/\x00",
    ],
)  # fmt: skip
def test_there_is_nothing_beside_the_page_and_its_data(served, path):
    assert status(send(served[1], get(path, "127.0.0.1"))) == 404


@pytest.mark.parametrize(
    "request_",
    [
        b"", b"\r\n\r\n", b"GET", b"GET /\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.x\r\n\r\n", b"\0" * 1000,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20, b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"DELETE /index HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"\x1b[2J / HTTP/1.1\r\n\r\n",
        b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * 1_000_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 100_000 + b"Host: 127.0.0.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost 127.0.0.1\r\n\r\n", b"GET / HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n",
        b"GET  /  HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 99999999999\r\nHost: evil\r\n\r\n" + b"a" * 100_000,
    ],
)  # fmt: skip
def test_requests_that_cannot_be_read_are_refused(served, request_, capfd):
    answer = send(served[1], request_)
    assert not answer.startswith(b"HTTP/") or 400 <= status(answer) < 600  # without HTTP/: an answer to HTTP/0.9
    assert b"poise</title>" not in answer
    assert b"\x1b" not in answer
    assert status(send(served[1], get("/stamp", "localhost"))) == 200
    assert capfd.readouterr().err == ""


def test_a_client_that_goes_away_leaves_no_traceback(served, capfd):
    for request in (b"GET /ind", get("/index", "127.0.0.1")):
        connection = connect(served[1])
        connection.sendall(request)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close by a reset
        connection.close()
    assert status(send(served[1], get("/stamp", "localhost"))) == 200
    assert capfd.readouterr().err == ""


def test_200_clients_at_once_are_all_connected_and_answered(tmp_path):
    server = serve([make_run(tmp_path / "run", steps=(1,)).path])
    url = f"http://127.0.0.1:{server.server_port}"
    with ExitStack() as stack:
        stack.callback(server.server_close)
        clients = [stack.enter_context(closing(connect(url))) for _ in range(200)]  # before any of them is accepted
        for number, client in enumerate(clients):
            client.sendall(get(("/stamp", "/index", "/", "/block/0/1/0")[number % 4], "localhost"))
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        stack.callback(server.shutdown)
        assert [status(read(client)) for client in clients] == [200] * 200


def test_the_server_outlives_a_step_that_cannot_be_read(served, capfd):
    folder, url = served
    assert urlopen(f"{url}/index").status == 200
    whole = folder.tokens_path(1).read_bytes()
    folder.tokens_path(1).write_bytes(b"half")
    with pytest.raises(HTTPError) as error:
        urlopen(f"{url}/index")
    assert error.value.code == 503
    error.value.close()
    folder.tokens_path(1).write_bytes(whole)
    assert urlopen(f"{url}/index").status == 200
    assert "Traceback" not in capfd.readouterr().err
