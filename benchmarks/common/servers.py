"""Baton's server in its own process, for benchmarks that use it over HTTP."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx


class Server:
    """Started with these flags on a free port, and ready. Raises SystemExit if it ends before that."""

    def __init__(self, model: Path, flags: Sequence[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "baton.entrypoints.launch_server", "--model-path", str(model)]
        command += ["--port", str(port), "--log-level", "error", *flags]
        self.url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(command)
        self.client = httpx.Client(base_url=self.url, timeout=600)
        while True:
            if self._process.poll() is not None:
                raise SystemExit(f"the server ended with status {self._process.returncode}")
            try:
                if self.client.get("/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)

    def close(self) -> None:
        self.client.close()
        self._process.terminate()
        self._process.wait(60)
