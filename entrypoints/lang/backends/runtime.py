"""A server that the program starts, in processes of its own, and that ends with the program."""

from __future__ import annotations

import argparse
import asyncio
import atexit
import collections
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

from ...http.keys import in_environment, read_keys
from ...server_args import build_parser, compose, own_settings
from ...server_config import SECRETS
from .http_backend import RuntimeEndpoint

_LAUNCH = """
import os, signal, sys, threading
from baton.entrypoints.launch_server import main

def end_with_parent():
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=end_with_parent, daemon=True).start()
sys.exit(main(sys.argv[1:]))
"""
"""The server watches its stdin, a pipe from this process: when this process ends in any way, the server ends, too."""

_LAST_LINES = 3
"""Last lines of the server's log that an error quotes."""

_AFTER_DRAIN_S = 10.0
"""Seconds beyond --drain-timeout after which a terminated server is killed."""


class Runtime:
    """Starts a server and waits until it serves: ``settings`` are its flags in snake_case. Use it as a backend, over
    ``url``, or in a ``with``; `shutdown` or the program's end ends it.

    Without ``port`` it takes a free one. Raises UsageError for a wrong setting, RuntimeError if the server ends before
    it is ready, TimeoutError after ``launch_timeout`` seconds.
    """

    def __init__(self, log_level: str = "error", launch_timeout: float = 300.0, **settings: Any) -> None:
        settings = {"port": _free_port(), **settings, "log_level": log_level}
        self.server_args = compose(settings)
        settings, _ = own_settings(settings)
        server = self.server_args.server
        if server.ssl_certfile or server.port == 0:
            raise ValueError("Runtime: ssl_certfile and port=0 are for servers of their own: leave them out")
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{server.port}"
        self.generate_url = self.url + "/generate"
        keys = read_keys(server, dict(os.environ))
        secrets = {
            f"BATON_{name.upper()}": in_environment(settings.pop(name)) for name in SECRETS if settings.get(name)
        }
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, *command_line(settings)],
            env=os.environ | secrets,  # a command line can be read by all users of the machine
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the program, which may want to abort its requests
        )
        atexit.register(self.shutdown)
        self._said: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self._log = threading.Thread(target=self._forward_log, name="baton-runtime-log", daemon=True)
        self._log.start()
        try:
            self._wait_ready(launch_timeout)
            self.endpoint = RuntimeEndpoint(self.url, keys.most_powerful)
        except BaseException:
            self.shutdown()
            raise

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def pid(self) -> int | None:
        """The process id of the server; None once it has ended."""
        return self._process.pid if self._process.poll() is None else None

    def shutdown(self) -> None:
        """End the server; its open requests get `--drain-timeout` seconds to finish. Safe to call twice."""
        atexit.unregister(self.shutdown)
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(self.server_args.server.drain_timeout + _AFTER_DRAIN_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._log.join()

    def generate(
        self,
        prompt: str | list[str],
        sampling_params: dict[str, Any] | None = None,
        return_logprob: bool | list[bool] | None = False,
        logprob_start_len: int | list[int] | None = None,
        top_logprobs_num: int | list[int] | None = None,
        lora_path: list[str | None] | None = None,
        session_id: str | None = None,
    ) -> str:
        """The answer of ``POST /generate``, as JSON text."""
        fields = {
            "text": prompt,
            "sampling_params": sampling_params,
            "return_logprob": return_logprob,
            "logprob_start_len": logprob_start_len,
            "top_logprobs_num": top_logprobs_num,
            "lora_path": lora_path,
            "session_id": session_id,
        }
        return json.dumps(self.endpoint.generate(fields))

    async def async_generate(
        self, prompt: str, sampling_params: dict[str, Any] | None = None, session_id: str | None = None
    ) -> AsyncIterator[str]:
        """The text that follows the prompt, in pieces as it arrives."""
        fields = {"text": prompt, "sampling_params": sampling_params, "session_id": session_id}
        outputs = await asyncio.to_thread(self.endpoint.stream, fields)
        length = 0
        try:
            while (output := await asyncio.to_thread(next, outputs, None)) is not None:
                if piece := output["text"][length:]:
                    length += len(piece)
                    yield piece
        finally:
            await asyncio.to_thread(_close, outputs)

    add_request = async_generate

    def cache_prefix(self, prefix: str) -> None:
        """See `RuntimeEndpoint.cache_prefix`."""
        self.endpoint.cache_prefix(prefix)

    def start_profile(self) -> None:
        self.endpoint.start_profile()

    def stop_profile(self) -> dict[str, Any]:
        return self.endpoint.stop_profile()

    async def get_server_info(self) -> dict[str, Any]:
        """The server's settings, and the worker's current report."""
        return await asyncio.to_thread(self.endpoint.get_server_info)

    def _wait_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._is_ready():
            if (status := self._process.poll()) is not None:
                self._log.join()
                raise RuntimeError(f"the server ended with status {status}: {' / '.join(self._said) or 'no reason'}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server was not ready within {timeout_s} s; raise launch_timeout")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        request = urllib.request.Request(self.url + "/ready")
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.status == 200
        except OSError:  # HTTPError is one: 503 until the model is loaded
            return False

    def _forward_log(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                text = line.decode(errors="replace")
                self._said.append(text.strip())
                sys.stderr.write(text)


def command_line(settings: dict[str, Any]) -> list[str]:
    """Settings by snake_case name, checked by `compose` -> the equivalent flags."""
    actions: dict[str, argparse.Action] = {action.dest: action for action in build_parser()._actions}
    flags: list[str] = []
    for name, value in settings.items():
        on, *off = actions[name].option_strings
        if isinstance(value, bool):
            flags += [on] if value else off  # where there is no --no-…, off is the default
        elif value is not None:
            values = value if isinstance(value, list | tuple) else [value]
            flags += [f"{on}={os.fspath(item) if isinstance(item, os.PathLike) else item}" for item in values]
    return flags


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _close(outputs: Iterator[Any]) -> None:
    if (close := getattr(outputs, "close", None)) is not None:
        close()
