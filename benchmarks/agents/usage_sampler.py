"""Samples the KV cache usage from /metrics, on Baton and other servers."""

from __future__ import annotations

import asyncio
import contextlib
from statistics import fmean

import httpx

KV_USAGE = ("baton:kv_cache_usage_perc", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
"""Names of the metric "share of the slots in use, 0 to 1", by server."""

LEASED = ("baton:leased_tokens",)


def gauge(text: str, names: tuple[str, ...]) -> float | None:
    """The sum of the first of these metrics that the page has, over its labels; None if it has none of them."""
    for name in names:
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith((f"{name} ", f"{name}{{")) and " " in line
        ]
        if values:
            return sum(values)
    return None


class UsageSampler:
    """Reads /metrics periodically while it is open. A server without that page gives no samples."""

    def __init__(self, url: str, api_key: str, every_s: float = 0.5) -> None:
        self._url, self._every_s = f"{url}/metrics", every_s
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self.values: list[float] = []

    async def __aenter__(self) -> UsageSampler:
        self._task = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _look(self) -> None:
        async with httpx.AsyncClient(headers=self._headers, timeout=10) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError, ValueError):
                    usage = gauge((await client.get(self._url)).text, KV_USAGE)
                    if usage is not None:
                        self.values.append(usage)
                await asyncio.sleep(self._every_s)

    def report(self) -> dict[str, float] | None:
        return {"avg": fmean(self.values), "max": max(self.values)} if self.values else None
