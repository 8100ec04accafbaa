"""A gateway of others in front of servers of Baton, in a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from tests.doubles.foreign_envs import env_folder, env_python
from tests.doubles.server_under_test import ServerUnderTest, free_port

COMMANDS = {
    "smg": ("smg", "launch"),
    "sglang-router": ("python", "-m", "sglang_router.launch_router"),
    "vllm-router": ("vllm-router",),
}


class GatewayUnderTest:
    """``flags``: the gateway's own, beside addresses. Use as a context; then all servers are known to it."""

    def __init__(self, kind: str, servers: Sequence[ServerUnderTest], folder: Path, *flags: str) -> None:
        env_python(kind)  # skips
        self._servers = servers
        port = free_port()
        self._log = folder / f"{kind}-{port}.log"
        program, *arguments = COMMANDS[kind]
        command = [str(env_folder(kind) / "bin" / program), *arguments]
        command += ["--worker-urls", *(server.url for server in servers), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()), *flags]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def __enter__(self) -> GatewayUnderTest:
        deadline = time.monotonic() + 60
        while self.healthy_workers() < len(self._servers):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.process.kill()  # asked kindly it waits for minutes, for streams that might still come
        self.process.wait()

    def healthy_workers(self) -> int:
        with contextlib.suppress(httpx.TransportError, ValueError):
            workers = self.client.get("/workers")
            if workers.status_code == 200:
                return sum(worker["is_healthy"] for worker in workers.json()["workers"])
        return 0


def outputs_of(server: ServerUnderTest) -> float:
    """How many outputs a server has ended."""
    lines = server.client.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("baton:request_success_total{"))
