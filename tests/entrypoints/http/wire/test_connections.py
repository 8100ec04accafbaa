"""What a connection may hold open: heads, bodies and pauses have a time and a size, and the server stays quiet."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.http_calls import error_of, raw_post
from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

FLAGS = ["--header-timeout", "0.5", "--body-timeout", "0.5", "--keep-alive-timeout", "0.5", "--max-connections", "8",
         "--log-level", "debug"]  # fmt: skip


@pytest.fixture(scope="module")
def strict(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    with ServerUnderTest(model, tmp_path_factory.mktemp("strict"), *FLAGS, behaviour={}) as running:
        yield running.wait_ready()


@pytest.fixture(autouse=True)
def still_quiet(strict: ServerUnderTest) -> Iterator[None]:
    yield
    strict.client.close()
    strict.client = type(strict.client)(base_url=strict.url, timeout=60)
    assert strict.client.get("/health").status_code == 200
    assert "Traceback" not in strict.log and "Exception" not in strict.log


def connect(server: ServerUnderTest) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def everything(connection: socket.socket) -> bytes:
    """Until the server closes."""
    received = b""
    while chunk := connection.recv(65536):
        received += chunk
    return received


def error_in(answer: bytes, status: int) -> dict:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and b"content-type: application/json" in head, answer
    return json.loads(body)["error"]


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def ask_health(connection: socket.socket) -> None:
    connection.sendall(HEALTH)
    received = b""
    while not received.endswith(b"}"):
        received += connection.recv(65536)
    assert received.startswith(b"HTTP/1.1 200 ")


HEAD = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\nfffffffffffffffffffff\r\n",
        HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        HEAD + b"Content-Length: x\r\n\r\n{}",
        b"garbage\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"CONNECT localhost:443 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"CONNECT localhost:443 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}",
    ],
)
def test_malformed_http_is_400(strict: ServerUnderTest, sent: bytes) -> None:
    with connect(strict) as connection:
        connection.sendall(sent)
        assert error_in(everything(connection), 400)["code"] == "invalid_http"


@pytest.mark.parametrize("piece", [2_000_000, 1_000])
def test_oversized_head_is_431(strict: ServerUnderTest, piece: int) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 200_000 + b"\r\n\r\n"
    with connect(strict) as connection:
        try:
            for start in range(0, len(head), piece):
                connection.sendall(head[start : start + piece])
        except (BrokenPipeError, ConnectionResetError):
            return  # it was refused while it was sent
        try:
            answer = everything(connection)
        except ConnectionResetError:
            return
    assert error_in(answer, 431)["code"] == "head_too_large"


CHUNKED = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"


def test_trailers_are_not_headers(strict: ServerUnderTest) -> None:
    body = b"c\r\n" + b'{"text":"a"}' + b"\r\n0\r\n"
    with connect(strict) as connection:
        connection.sendall(CHUNKED + b"Connection: close\r\n\r\n" + body + b"Content-Type: application/json\r\n\r\n")
        assert error_in(everything(connection), 415)["code"] == "unsupported_media_type"


@pytest.mark.parametrize("start", [b"0\r\nX: ", b"5;", b"0\r\n"])
def test_oversized_trailers_and_chunk_extensions_are_431(strict: ServerUnderTest, start: bytes) -> None:
    """Trailers, and the extensions of chunks."""
    piece = b"X: y\r\n" * 1_000 if start == b"0\r\n" else b"x" * 6_000
    with connect(strict) as connection:
        connection.sendall(CHUNKED + b"Content-Type: application/json\r\n\r\n" + start)
        for _ in range(6):
            connection.sendall(piece)
        assert error_in(everything(connection), 431)["code"] == "head_too_large"


def test_slow_head_times_out(strict: ServerUnderTest) -> None:
    for is_second in (False, True):
        with connect(strict) as connection:
            if is_second:
                ask_health(connection)
            connection.sendall(b"GET /health HT")
            assert error_in(everything(connection), 408)["code"] == "request_timeout"


@pytest.mark.parametrize("sent", [b"", HEALTH, b"\r\n"])
def test_idle_connection_is_closed(strict: ServerUnderTest, sent: bytes) -> None:
    with connect(strict) as connection:
        connection.sendall(sent)
        answer = everything(connection)
        assert answer.count(b"HTTP/1.1 ") == sent.count(b"GET")


def test_empty_lines_do_not_keep_connection_open(strict: ServerUnderTest) -> None:
    with connect(strict) as connection:
        ask_health(connection)
        connection.sendall(b"\r\n")
        assert everything(connection) == b""


@pytest.mark.parametrize("path", ["/generate", "/nothing"])
def test_slow_body_times_out(strict: ServerUnderTest, path: str) -> None:
    with connect(strict) as connection:
        connection.sendall(raw_post(b"x" * 100).replace(b"/generate", path.encode())[:-50])
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 408 " if path == "/generate" else b"HTTP/1.1 404 ")


def test_steady_upload_extends_the_body_timeout(strict: ServerUnderTest) -> None:
    body = json.dumps({"text": " " * 100_000}).encode()
    sent = raw_post(body)
    with connect(strict) as connection:
        for start in range(0, len(sent), 10_000):
            connection.sendall(sent[start : start + 10_000])
            time.sleep(0.08)  # 120 KB a second; all of it takes longer than the time of a slow one
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")  # longer than the context


def test_abandoned_upload_is_logged_in_one_line(strict: ServerUnderTest) -> None:
    with connect(strict) as connection:
        connection.sendall(raw_post(b"x" * 100).replace(b"/generate", b"/release")[:-50])
    strict.wait_until(lambda: "POST /release was abandoned by its client" in strict.log, "it is in the log")
    lines = [line for line in strict.log.splitlines() if "/release" in line]
    assert len(lines) == 1 and " DEBUG " in lines[0]


def test_excess_connections_are_refused(strict: ServerUnderTest) -> None:
    strict.client.close()
    held = [connect(strict) for _ in range(8)]
    try:
        with connect(strict) as late:
            late.sendall(HEALTH)
            answer = everything(late)
        assert error_in(answer, 503)["code"] == "overloaded" and b"retry-after: 1" in answer
    finally:
        for connection in held:
            connection.close()
    strict.client = type(strict.client)(base_url=strict.url, timeout=60)
    strict.wait_until(lambda: strict.client.get("/health").status_code == 200, "there is room again")
    assert error_of(strict.generate(text=""), 400)
