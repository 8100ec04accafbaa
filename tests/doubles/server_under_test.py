"""A server in processes of its own, for tests: start it, talk to it, look at its children, see how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil

DOUBLES = Path(__file__).parent
ROOT = DOUBLES.parents[1]


def free_port() -> int:
    """Free until the server listens on it, too: test processes beside this one draw from other ports, and those that
    the system gives to outgoing connections begin above them."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    while True:
        port = 12_000 + count * secrets.randbelow(20_000 // count) + number
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


class ServerUnderTest:
    """``behaviour``: of the fake worker; None starts the real launcher with the real worker. launcher: a double
    that is started in place of either, with ``environment``."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *flags: str,
        behaviour: dict[str, Any] | None,
        port: int = 0,
        launcher: str = "fake_server.py",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / f"server-{self.port}-{time.monotonic_ns()}.log"
        # Not in the test's folder, whose path is too long for a Unix socket: the server would go elsewhere.
        self.tmp = Path(tempfile.mkdtemp(prefix="t"))
        what = ["-m", "baton.entrypoints.launch_server"] if behaviour is None else [str(DOUBLES / launcher)]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "BATON_FAKE_WORKER": json.dumps(behaviour or {}),
            "TMPDIR": str(self.tmp),
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        }
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *what, "--model-path", str(model), "--port", str(self.port), *flags],
                env=env,
                stderr=log,
                stdout=log,
            )
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def __enter__(self) -> ServerUnderTest:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self.tmp, ignore_errors=True)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_ready(self, timeout_s: float = 60) -> ServerUnderTest:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log}")
            try:
                if self.client.get("/ready").status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"the server was not ready within {timeout_s} s:\n{self.log}")

    def generate(self, **fields: Any) -> httpx.Response:
        return self.client.post("/generate", json=fields)

    def children(self) -> dict[str, psutil.Process]:
        """Role -> process, by the title each gave itself."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            role = "worker" if "worker" in " ".join(child.cmdline()) else "detokenizer"
            found[role] = child
        return found

    def metric(self, name: str) -> float:
        """A gauge of /metrics; those of the worker are at most a second old."""
        text = self.client.get("/metrics").text
        line = next(line for line in text.splitlines() if line.startswith(f"baton:{name}{{"))
        return float(line.rsplit(" ", 1)[1])

    def running(self) -> int:
        return int(self.metric("num_running_reqs"))

    def wait_until(self, condition: Any, what: str, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s} s:\n{self.log}"
            time.sleep(0.05)  # conditions are often requests, which cost both processes a few milliseconds
