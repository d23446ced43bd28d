"""The watch server, over real sockets on this machine's loopback."""

import socket
from contextlib import closing
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from poise.referee.report.html import serve

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


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:1", "LocalHost"])
def test_this_machine_by_any_of_its_names(served, host):
    assert status(send(served[1], get("/stamp", host))) == 200


@pytest.mark.parametrize(
    "hosts",
    [
        (), ("evil.example:80",), ("127.0.0.1.evil.example",), ("127.0.0.1:80@evil.example",), ("127.0.0.1:evil",),
        ("0.0.0.0",), ("127.0.0.1", "evil.example"), ("evil.example", "127.0.0.1"), ("127\u20240.0.1",),
    ],
)  # fmt: skip
def test_other_names_are_refused(served, hosts):
    """A page of another site must not read the run through a name that leads here."""
    for path in ("/", "/stamp", "/index", "/block/0/1/0", "/nothing"):
        assert status(send(served[1], get(path, *hosts))) == 403


@pytest.mark.parametrize(
    "path",
    [
        "/../config.json", "/%2e%2e/config.json", "/block/0/../../config.json", "//etc/passwd", "/config.json",
        "/block/0/1/-1", "/block/0/1/999", "/block/9/1/0", "/block/0/000001/\u00b2", "/block/0/1/" + "9" * 5000,
    ],
)  # fmt: skip
def test_there_is_nothing_beside_the_page_and_its_data(served, path):
    assert status(send(served[1], get(path, "127.0.0.1"))) == 404


def test_requests_that_cannot_be_read_do_not_end_the_server(served, capfd):
    for request in (b"", b"\0" * 1000, b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"\x1b[2J / HTTP/1.1\r\n\r\n"):
        answer = send(served[1], request)
        assert not answer.startswith(b"HTTP/") or 400 <= status(answer) < 600  # without HTTP/: an answer to HTTP/0.9
        assert b"poise</title>" not in answer
        assert b"\x1b" not in answer
    connection = connect(served[1])
    connection.sendall(get("/index", "127.0.0.1"))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close by a reset
    connection.close()
    assert status(send(served[1], get("/stamp", "localhost"))) == 200
    assert capfd.readouterr().err == ""


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
