"""Servers for tests of the remote store: a Redis that can be stopped and started again, and one that says what it is
told to. The Redis is Debian's redis-server where there is one, else fakeredis behind a socket."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

import redis
from fakeredis import TcpFakeServer

BINARY = shutil.which("redis-server")


class RedisServer:
    """Listens on a port of its own, on loopback; what it holds is gone when it stops."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        self._process: subprocess.Popen | None = None
        self._fake: TcpFakeServer | None = None
        if BINARY is None:
            self._fake = TcpFakeServer(("127.0.0.1", self.port))
            self._thread = threading.Thread(target=self._fake.serve_forever, kwargs={"poll_interval": 0.01})
            self._thread.start()
            return
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen([BINARY, *options], stdout=subprocess.DEVNULL)
        give_up = time.monotonic() + 60
        while time.monotonic() < give_up:
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.ConnectionError:
                time.sleep(0.01)
        raise TimeoutError("redis-server does not answer")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._fake is not None:
            self._fake.shutdown()
            self._fake.server_close()  # waits for the threads of its clients
            self._thread.join()
        self._process = self._fake = None

    def client(self) -> redis.Redis:
        """A client of the test's own."""
        return redis.Redis(port=self.port, protocol=2)


class ScriptedServer:
    """Answers each command with what ``answer`` makes of it: bytes as they go over the wire, b"" for silence."""

    def __init__(self, answer: Callable[[list[bytes]], bytes], tls: ssl.SSLContext | None = None) -> None:
        self._answer = answer
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        self.commands: list[list[bytes]] = []
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for connection in self._open:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # its client closed it
                continue
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
                if self._tls is not None:
                    connection = self._tls.wrap_socket(connection, server_side=True)
            except ssl.SSLError:  # the client does not trust us
                continue
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            try:
                while line := lines.readline():
                    assert line[:1] == b"*", line
                    parts = [lines.read(int(lines.readline()[1:]) + 2)[:-2] for _ in range(int(line[1:]))]
                    self.commands.append(parts)
                    connection.sendall(self._answer(parts))
            except OSError:
                return


class Blocks:
    """A `BlockSource` and `BlockTarget` of separate buffers."""

    def __init__(self, payloads: Sequence, rooms: Sequence = ()) -> None:
        self.payloads, self.rooms = payloads, rooms
        self.asked: list[int] = []
        self.accepted: list[int] = []
        self.wanted: Callable[[], bool] = lambda: True

    def block(self, index: int):
        self.asked.append(index)
        return self.payloads[index]

    def room(self, index: int):
        return self.rooms[index]

    def accept(self, index: int) -> None:
        self.accepted.append(index)
