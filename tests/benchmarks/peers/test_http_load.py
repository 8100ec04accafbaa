"""The closed loop of streams, against a server of a few lines."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from benchmarks.peers.driver import EngineFailed
from benchmarks.peers.http_load import Load, answers
from benchmarks.peers.work import Prompts

LOAD = Load(
    rate="rate",
    times={name: name for name in ("TTFT p50", "TTFT p99", "ITL p50", "ITL p99")},
    clients=3,
    requests=7,
    prompt=5,
    tokens=4,
)
PAUSE_S = 0.02


class Completions:
    """Streams four tokens, one event each. status: of its answers; tokens: that it counts; pause: between events."""

    def __init__(self) -> None:
        self.status, self.tokens, self.pause = 200, 4, PAUSE_S
        self.bodies: list[dict[str, Any]] = []
        self.most = self._open = 0
        self._lock, self._ended = threading.Lock(), threading.Event()
        scene = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                self.send_response(scene.status if self.path == "/ready" else 503)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_POST(self) -> None:
                with scene.counted(json.loads(self.rfile.read(int(self.headers["Content-Length"])))):
                    scene.answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    @contextlib.contextmanager
    def counted(self, body: dict[str, Any]) -> Iterator[None]:
        with self._lock:
            self.bodies.append(body)
            self._open += 1
            self.most = max(self.most, self._open)
        yield
        with self._lock:
            self._open -= 1

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(self.status)
        if self.status != 200:
            handler.send_header("Content-Length", "5")
            handler.end_headers()
            handler.wfile.write(b"sorry")
            return
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        events = [{"choices": [{"text": "x"}]}] * 4 + [{"choices": [], "usage": {"completion_tokens": self.tokens}}]
        for event in [*map(json.dumps, events), "[DONE]"]:
            data = f"data: {event}\n\n".encode()
            handler.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            if self._ended.wait(self.pause):
                return
        handler.wfile.write(b"0\r\n\r\n")

    def close(self) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Completions]:
    made = Completions()
    yield made
    made.close()


def run(server: Completions, limit_s: float = 60) -> Any:
    return LOAD(f"http://127.0.0.1:{server.port}", Prompts((1,), 1000), limit_s)


def test_closed_loop_keeps_concurrency_and_reports_latencies(server: Completions) -> None:
    found = run(server)
    assert len(server.bodies) == 3 + 7 and server.most == 3
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 10
    assert all(body["max_tokens"] == 4 and body["stream"] and body["ignore_eos"] for body in server.bodies)
    assert PAUSE_S * 1e3 <= found.figures["ITL p50"] <= found.figures["ITL p99"]
    assert found.figures["TTFT p50"] <= found.figures["TTFT p99"]
    assert 0 < found.figures["rate"] <= 3 / (5 * PAUSE_S) and found.extra == {"events_per_request": 4.0}


def test_answers_of_wrong_length_fail(server: Completions) -> None:
    server.tokens = 3
    with pytest.raises(EngineFailed, match=r"answers of \[3\] tokens, where 4 were wanted"):
        run(server)


def test_http_error_status_is_reported(server: Completions) -> None:
    server.status = 404
    with pytest.raises(EngineFailed, match=r"/v1/completions answered http/1.1 404 not found: sorry"):
        run(server)


def test_stalled_server_times_out(server: Completions) -> None:
    server.pause = 30
    with pytest.raises(EngineFailed, match="not done within 1 s"):
        run(server, limit_s=1)


def test_readiness_requires_status_200(server: Completions) -> None:
    assert answers(server.port, "/ready")
    assert not answers(server.port, "/health")
    server.status = 503
    assert not answers(server.port, "/ready")
    assert not answers(1, "/ready"), "nobody listens there"
