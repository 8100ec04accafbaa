"""Chats of other clients that take the whole KV pool: all different, each sent once and never continued."""

from __future__ import annotations

import random

import httpx

FLOOD = "flood"
"""The last word of each; a script answers it with a few words (`tests/doubles/scripted_worker.py`)."""


class ChatFlood:
    """pool: the server's, in tokens."""

    def __init__(self, url: str, seed: str, pool: int) -> None:
        self._url = url
        self._pool = pool
        self._rng = random.Random(seed)

    def fill_pool(self) -> None:
        """Send as many as the pool holds, so that everything is evicted that nothing keeps."""
        tokens = 0
        with httpx.Client(timeout=60) as client:
            while tokens < self._pool:
                words = " ".join(str(self._rng.randrange(10**6)) for _ in range(70))
                body = {"model": "any", "messages": [{"role": "user", "content": f"{words} {FLOOD}"}]}
                answer = client.post(f"{self._url}/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
                tokens += answer.json()["usage"]["prompt_tokens"]
