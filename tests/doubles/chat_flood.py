"""Chats of other clients that take the whole KV pool: all different, each sent once and never continued.

python chat_flood.py URL POOL [WORDS]     for a tool of another program; WORDS: of each chat
"""

from __future__ import annotations

import random
import sys

import httpx

FLOOD = "flood"
"""The last word of each; a script answers it with a few words (`tests/doubles/scripted_worker.py`)."""


class ChatFlood:
    """pool: the server's, in tokens. words: of each chat, four to six tokens each."""

    def __init__(self, url: str, seed: str, pool: int, words: int = 70) -> None:
        self._url = url
        self._pool = pool
        self._words = words
        self._rng = random.Random(seed)

    def fill_pool(self) -> None:
        """Send as many as the pool holds, so that everything is evicted that nothing keeps."""
        tokens = 0
        with httpx.Client(timeout=60) as client:
            while tokens < self._pool:
                words = " ".join(str(self._rng.randrange(10**6)) for _ in range(self._words))
                body = {"model": "any", "messages": [{"role": "user", "content": f"{words} {FLOOD}"}]}
                answer = client.post(f"{self._url}/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
                tokens += answer.json()["usage"]["prompt_tokens"]


if __name__ == "__main__":
    ChatFlood(sys.argv[1], "program", int(sys.argv[2]), *map(int, sys.argv[3:])).fill_pool()
