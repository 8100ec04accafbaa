"""A server that serves the dashboard's files and sends the events that a test writes, as the real one would."""

from __future__ import annotations

import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "entrypoints" / "http" / "dashboard" / "static"
POLICY = "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_LISTEN_S = 0.02


class FakeDashboard:
    """What a page gets when it connects is the state: ``hello``, ``update`` (with all of ``lives``) and ``tree``.
    ``key``: what it wants to see, None: nothing. ``refuse``: (status, message) of the stream."""

    def __init__(self, hello: dict[str, Any], update: dict[str, Any], tree: dict[str, Any] | None = None) -> None:
        self.hello = hello
        self.update = update
        self.tree = tree
        self.key: str | None = None
        self.refuse: tuple[int, str] | None = None
        self.lives: dict[tuple[str, int], dict[str, Any]] = {}
        self.connections = 0
        self._readers: set[queue.Queue[bytes | None]] = set()
        self._lock = threading.Lock()
        self._port = 0
        self._http: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/dashboard"

    @property
    def readers(self) -> int:
        with self._lock:
            return len(self._readers)

    def start(self) -> FakeDashboard:
        """Listen; the second time on the port of the first."""
        self._http = _Listener(("127.0.0.1", self._port), type("Handler", (_Handler,), {"dashboard": self}))
        self._port = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, args=(_LISTEN_S,), daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Cut every stream, and take no connection any more."""
        self.cut()
        if self._http is not None and self._thread is not None:
            self._http.shutdown()
            self._http.server_close()
            self._thread.join()
        self._http = self._thread = None

    def __enter__(self) -> FakeDashboard:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def cut(self) -> None:
        with self._lock:
            for reader in self._readers:
                reader.put(None)

    def send(self, name: str, data: dict[str, Any]) -> None:
        self.send_raw(event(name, data))

    def send_raw(self, content: bytes) -> None:
        with self._lock:
            for reader in self._readers:
                reader.put(content)

    def send_update(self, *lives: dict[str, Any], **fields: Any) -> None:
        """The update with some fields changed, and these lives; what connects later gets them, too."""
        for life in lives:
            self.lives[life["rid"], life["index"]] = life
        self.update = self.update | fields
        self.send("update", self.update | {"lives": list(lives)})

    def send_tree(self, tree: dict[str, Any]) -> None:
        self.tree = tree
        self.send("tree", tree)

    def opening(self) -> bytes:
        """What a reader that connects gets first."""
        parts = [event("hello", self.hello), event("update", self.update | {"lives": list(self.lives.values())})]
        if self.tree is not None:
            parts.append(event("tree", self.tree))
        return b"".join(parts)

    def join(self) -> queue.Queue[bytes | None]:
        reader: queue.Queue[bytes | None] = queue.Queue()
        with self._lock:
            self.connections += 1
            reader.put(self.opening())
            self._readers.add(reader)
        return reader

    def leave(self, reader: queue.Queue[bytes | None]) -> None:
        with self._lock:
            self._readers.discard(reader)


def event(name: str, data: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle is no news."""


class _Handler(BaseHTTPRequestHandler):
    dashboard: FakeDashboard
    protocol_version = "HTTP/1.0"  # a connection for each request: none outlives ``stop``

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path == "/dashboard/events":
            self._events()
        elif path == "/dashboard":
            self._file("index.html")
        else:
            self._file(path.removeprefix("/dashboard/"))

    def _file(self, name: str) -> None:
        file = (PAGE / name).resolve()
        if not file.is_relative_to(PAGE) or not file.is_file():
            self._answer(404, b"{}", "application/json")
            return
        self._answer(200, file.read_bytes(), _KINDS[file.suffix])

    def _answer(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def _refuse(self, status: int, message: str) -> None:
        self._answer(status, json.dumps({"error": {"message": message}}).encode(), "application/json")

    def _events(self) -> None:
        dashboard = self.dashboard
        if dashboard.refuse is not None:
            self._refuse(*dashboard.refuse)
            return
        if dashboard.key is not None and self.headers.get("Authorization") != f"Bearer {dashboard.key}":
            self._refuse(401, "this endpoint wants the admin key, as Authorization: Bearer KEY")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        reader = dashboard.join()
        try:
            while (content := reader.get()) is not None:
                self.wfile.write(content)
        finally:
            dashboard.leave(reader)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the test says what went wrong."""
