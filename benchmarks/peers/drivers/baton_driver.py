"""Baton's Engine in this process; see serve.py. Stage 2 is a continuation of stage 1, which is leased."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

from benchmarks.common.clients import GREEDY, SAMPLED, Call, EngineClient, native_fields
from benchmarks.peers.drivers.arrivals import step_times
from benchmarks.serving.two_stage import press

RETAIN_S = 3600.0
"""Longer than any round."""


class Engine:
    def __init__(
        self, model: str, dtype: str, cores: list[int], rows: int, kv_tokens: int, quantization: str | None = None
    ) -> None:
        import torch

        self._client = EngineClient(
            {
                "model_path": model,
                "dtype": dtype,
                "device": "cpu",
                "max_running_requests": rows,
                "max_total_tokens": kv_tokens,
                "max_leased_requests": rows,
                "max_leased_ratio": 0.9,
                "log_level": "warning",
                **({} if quantization is None else {"quantization": quantization}),
            }
        )
        asyncio.run(self._client.open_session())
        self._rng = np.random.default_rng()
        self.about = {"torch": torch.__version__}

    def generate(self, requests: list[dict[str, Any]], stream: bool) -> dict[str, Any]:
        return asyncio.run(self._generate(requests, stream))

    async def _generate(self, requests: list[dict[str, Any]], stream: bool) -> dict[str, Any]:
        began = time.perf_counter()
        found = await asyncio.gather(*(self._one(request, stream, began) for request in requests))
        seconds = time.perf_counter() - began
        arrivals = [request.pop("arrivals") for request in found]
        return {"seconds": seconds, "steps_s": step_times(arrivals) if stream else [], "requests": found}

    async def _one(self, request: dict[str, Any], stream: bool, began: float) -> dict[str, Any]:
        parent, seed = request.get("parent"), request.get("seed")
        call = Call(
            prompt=request["suffix"] if parent else request["ids"],
            max_tokens=request["tokens"],
            sampling=GREEDY if seed is None else SAMPLED | {"seed": seed},
            stream=stream,
            parent=parent,
            retain_ttl=RETAIN_S if request.get("keep") else None,
        )
        answer = await self._client.answer(native_fields(call))
        arrivals: list[tuple[float, int]] = []
        if stream:
            updates, answer = answer, {}
            async for answer in updates:
                arrivals.append((time.perf_counter() - began, len(answer["output_ids"])))
        meta = answer["meta_info"]
        return {
            "name": meta["id"],
            "ids": answer["output_ids"],
            "first_s": arrivals[0][0] if arrivals else None,
            "total_s": time.perf_counter() - began,
            "cached": meta["cached_tokens"],
            "path": meta.get("continuation", {}).get("path"),
            "arrivals": arrivals,
        }

    def beam(self, requests: list[dict[str, Any]], width: int, steps: int) -> dict[str, Any]:
        return asyncio.run(self._beam(requests, width, steps))

    async def _beam(self, requests: list[dict[str, Any]], width: int, steps: int) -> dict[str, Any]:
        sampling = {"beam_width": width, "n": width, "max_new_tokens": steps, "ignore_eos": True}

        async def search(request: dict[str, Any]) -> tuple[float, list[dict[str, Any]]]:
            fields: dict[str, Any] = {"sampling_params": sampling}
            if parent := request.get("parent"):
                fields |= {"continuation_of": parent, "continuation_ids": request["suffix"]}
            else:
                fields["input_ids"] = request["ids"]
            outputs = await self._client.answer(fields)
            return time.perf_counter() - began, outputs

        began = time.perf_counter()
        found = await asyncio.gather(*map(search, requests))
        return {
            "seconds": [seconds for seconds, _ in found],
            "sequences": [[output["output_ids"] for output in outputs] for _, outputs in found],
            "paths": [outputs[0]["meta_info"].get("continuation", {}).get("path") for _, outputs in found],
        }

    def press(self) -> dict[str, int]:
        async def fill() -> int:
            stats = await self._client.stats()
            await press(self._client, self._rng, 0)
            return stats["free_tokens"] + stats["evictable_tokens"]

        return {"tokens": asyncio.run(fill())}
