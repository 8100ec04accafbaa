"""Prompts of other clients that take every page of the KV pool for a moment, at little cost.

To compute a whole pool of prompts takes the fill time by its definition. These are short, and each takes a page of its
own while it runs, so with large pages they evict all that nothing keeps in a small share of that time.
"""

from __future__ import annotations

import random

import httpx

TOKENS = 10
"""Tokens of each prompt."""


class PageFlood:
    """pages: of the server's pool."""

    def __init__(self, url: str, seed: str, pages: int) -> None:
        self._url = url
        self._pages = pages
        self._rng = random.Random(seed)

    def fill_pool(self) -> None:
        """Send more prompts at once than the pool has pages: some have to wait, and ask for what leases keep."""
        prompts = [[self._rng.randrange(100, 1600) for _ in range(TOKENS)] for _ in range(2 * self._pages)]
        body = {"input_ids": prompts, "sampling_params": {"max_new_tokens": 12}}
        answer = httpx.post(f"{self._url}/generate", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
