"""llama.cpp's server in this process, by the package xllamacpp; see serve.py. Requests are calls, each in a thread.

Its streams have texts and no token ids: outputs are counted, and not compared with the others'."""

from __future__ import annotations

import importlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

MOST_HELD_BACK = 4
"""Tokens at the end of a stream without an event of their own: text that ends within a character is held back, and a
character has four bytes at most."""


class Engine:
    def __init__(self, model: str, cores: list[int], kv: str, n_parallel: int, n_ctx: int) -> None:
        self._step_times = importlib.import_module("arrivals").step_times
        package: Any = importlib.import_module("xllamacpp")
        self._server = importlib.import_module("llama_server").start(
            model,
            len(cores),
            kv,
            n_parallel=n_parallel,
            n_ctx=n_ctx,
            kv_unified=True,
            cache_ram_mib=0,  # no prompt comes again
        )
        self._pool = ThreadPoolExecutor(n_parallel)
        features = str(package.get_system_info())
        vectors = "AVX-512" if "AVX512 = 1" in features else "AVX2" if "AVX2 = 1" in features else features
        self.about = {"version": package.__version__, "build": vectors}

    def generate(self, requests: list[dict[str, Any]], stream: bool) -> dict[str, Any]:
        began = time.perf_counter()
        found = list(self._pool.map(lambda request: self._one(request, stream, began), requests))
        seconds = time.perf_counter() - began
        arrivals = [request.pop("arrivals") for request in found]
        return {"seconds": seconds, "steps_s": self._step_times(arrivals) if stream else [], "requests": found}

    def _one(self, request: dict[str, Any], stream: bool, began: float) -> dict[str, Any]:
        fields: dict[str, Any] = {"prompt": request["ids"], "max_tokens": request["tokens"], "ignore_eos": True}
        fields |= {"temperature": 0, "stream": stream, "cache_prompt": False}
        fields |= {"timings_per_token": True}  # the events of a stream cannot be counted, see MOST_HELD_BACK
        if request.get("seed") is not None:
            fields |= {"temperature": 0.6, "top_p": 0.95, "top_k": 50, "seed": request["seed"]}
        arrivals: list[tuple[float, int]] = []
        last: dict[str, Any] = {}

        def take(event: dict[str, Any]) -> bool:
            last.update(event)
            if event.get("choices") and event["choices"][0]["finish_reason"] is None:
                arrivals.append((time.perf_counter() - began, event["timings"]["predicted_n"]))
            return False

        answer = self._server.handle_completions(fields, *([take] if stream else []))
        usage = (last or answer).get("usage")
        if usage is None or usage["prompt_tokens"] != len(request["ids"]):
            raise RuntimeError(f"a prompt of {len(request['ids'])} tokens was answered with {last or answer}")
        seen, tokens = arrivals[-1][1] if arrivals else 0, usage["completion_tokens"]
        if stream and not tokens - MOST_HELD_BACK <= seen <= tokens:
            raise RuntimeError(f"a stream of {tokens} tokens had events for {seen}")
        return {
            "name": "",
            "ids": [],
            "tokens": tokens,
            "first_s": arrivals[0][0] if arrivals else None,
            "total_s": time.perf_counter() - began,
            "arrivals": arrivals,
        }
