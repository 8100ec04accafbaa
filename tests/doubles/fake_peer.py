"""An engine for benchmarks/peers/drivers/serve.py: it answers at once, and can misbehave where it is told to."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any


class Engine:
    def __init__(
        self, trace: str = "", at: str = "", what: str = "", name: str = "fake", without_ids: bool = False, **_: Any
    ) -> None:
        """trace: file that gets a line per call. at: the method at which it does ``what``: raise, die, hang or short
        (a token too few); "start" for its start. without_ids: its answers have only the numbers of tokens."""
        self._without_ids = without_ids
        print("this library greets on stdout", flush=True)
        self._trace, self._at, self._what, self._name = trace, at, what, name
        self._note("start")
        self._misbehave("start")
        self.about = {"version": "1.2.3"}

    def generate(self, requests: list[dict[str, Any]], stream: bool) -> dict[str, Any]:
        print("and speaks of requests", flush=True)
        self._note(f"generate {len(requests)}")
        if any(each["tokens"] > 1 for each in requests):  # so that a prefill is spared
            self._misbehave("generate")
        tokens = max(each["tokens"] for each in requests)
        fewer = 1 if self._at == "generate" and self._what == "short" else 0
        found = [
            {"name": "r", "ids": [7] * (each["tokens"] - fewer), "first_s": 0.01, "total_s": 0.02} for each in requests
        ]
        if self._without_ids:
            found = [{**one, "tokens": len(one["ids"]), "ids": []} for one in found]
        return {"seconds": 0.5, "steps_s": [0.003] * (tokens - 1) if stream else [], "requests": found}

    def beam(self, requests: list[dict[str, Any]], width: int, steps: int) -> dict[str, Any]:
        self._note("beam")
        self._misbehave("beam")
        return {"seconds": [0.1] * len(requests), "sequences": [[[i] * steps for i in range(width)] for _ in requests]}

    def press(self) -> dict[str, int]:
        self._note("press")
        return {"tokens": 0}

    def _note(self, what: str) -> None:
        if self._trace:
            with open(self._trace, "a") as file:
                file.write(f"{self._name} {what}\n")

    def _misbehave(self, method: str) -> None:
        if method != self._at:
            return
        if self._what == "raise":
            raise RuntimeError("no room for this")
        if self._what == "die":
            os.write(2, b"first line\nSegmentation fault of a kind\n")
            os._exit(3)
        if self._what == "hang":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            os.write(2, f"child {child.pid}\n".encode())
            time.sleep(600)
