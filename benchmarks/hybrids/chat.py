"""A chat of many turns with a server, over OpenAI's completions and on token ids, as in benchmarks.peers.

    turn      |<-- what the server may still have: prompts and answers of all turns before -->|<-- user -->|
    computed                                                                                 1 +   user

The last token of an answer is sampled and never computed, so one token more than the user's is new in each turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import msgspec
import numpy as np
import tokenizers

from benchmarks.common.clients import random_ids

Ids = list[int]

CALM, PRESSURE, EDITED, RESTART = "calm", "under pressure", "edited", "after a restart"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """In tokens, but for turns, others (prompts between two turns, under pressure) and rest_s (seconds before each
    turn: the threads of the server that had its turn before may spin for a while, as those of OpenMP do for 0.2 s)."""

    turns: int = 10
    first: int = 512
    user: int = 64
    answer: int = 32
    others: int = 3
    other: int = 600
    rest_s: float = 0.5

    @property
    def context(self) -> int:
        """Room for KV: the whole chat and one prompt of the others fit, and no second one."""
        longest = self.first + (self.turns - 1) * self.user + self.turns * self.answer
        return longest + self.other * 5 // 4


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One request. name: the server's. ttft, total: seconds. computed: prompt tokens that were not in the server's
    cache, as it says."""

    name: str
    ttft: float
    total: float
    prompt: int
    computed: int
    output: Ids

    def report(self) -> dict[str, Any]:
        return asdict(self)


class Completions:
    """A server's completions of token ids, greedy and streamed."""

    def __init__(self, url: str, tokenizer: Path, limit_s: float) -> None:
        # A connection for each request: llama.cpp closes one that is idle for some seconds.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(base_url=url, timeout=limit_s, limits=limits)
        self._tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer))

    def close(self) -> None:
        self._client.close()

    def complete(self, ids: Ids, tokens: int, fields: Mapping[str, Any]) -> Turn:
        """Raises RuntimeError if the answer has not exactly as many tokens."""
        body: dict[str, Any] = {"model": "model", "prompt": ids, "max_tokens": tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, **fields}
        text, name, first, usage = "", "", None, {}
        sent = time.perf_counter()
        with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.is_error:
                raise RuntimeError(f"status {response.status_code}: {response.read().decode()[:300]}")
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = msgspec.json.decode(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                if event["choices"]:
                    first = first or time.perf_counter()
                    text += event["choices"][0]["text"]
                usage, name = event.get("usage") or usage, event["id"]
        ended = time.perf_counter()
        output = self._tokenizer.encode(text, add_special_tokens=False).ids
        if len(output) != tokens or usage["prompt_tokens"] != len(ids):
            raise RuntimeError(f"{len(output)} tokens for {len(ids)}, where {tokens} were asked for; usage: {usage}")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Turn(
            name=name,
            ttft=(first or ended) - sent,
            total=ended - sent,
            prompt=len(ids),
            computed=len(ids) - cached,
            output=output,
        )

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A call beside the completions. Raises httpx.HTTPStatusError if it is refused."""
        return self._client.post(path, json=body).raise_for_status().json()


class Server(Protocol):
    """The server of a chat."""

    completions: Completions
    """Its client, another one after each restart."""

    def restart(self) -> None:
        """Stop it and start it again, until it is ready."""
        ...


class Chat:
    """One chat with one server. The user's messages depend on the seed alone, the rest on the server's answers."""

    def __init__(
        self, server: Server, sizes: Sizes, vocab_size: int, seed: Sequence[int], fields: Mapping[str, Any]
    ) -> None:
        """fields: of every request of the chat, beside its prompt and length."""
        self._server, self._sizes, self._vocab_size = server, sizes, vocab_size
        self._fields = fields
        self._rng = np.random.default_rng(seed)
        self._history: Ids = []
        self._before: Ids = []
        """The history without the last turn."""
        self._leased: Turn | None = None
        self.turns: list[Turn] = []
        self.edits: list[Turn] = []

    def take_turn(self) -> None:
        self._before = self._history
        self.turns.append(self._say(self._sizes.user if self._history else self._sizes.first))

    def edit_last(self) -> None:
        """Take the last turn again with another message, and continue from there."""
        self._history = self._before
        self.edits.append(self._say(self._sizes.user))

    def answer_others(self) -> None:
        """Prompts that have nothing to do with the chat."""
        for _ in range(self._sizes.others):
            self._server.completions.complete(self._make_prompt(self._sizes.other), 2, {})

    def _say(self, tokens: int) -> Turn:
        prompt = self._history + self._make_prompt(tokens)
        turn = self._server.completions.complete(prompt, self._sizes.answer, self._fields)
        self._history = prompt + turn.output
        if "retain_ttl" in self._fields:
            self.end()
            self._leased = turn
        return turn

    def restart_server(self) -> None:
        self._server.restart()

    def end(self) -> None:
        """Nothing is leased any more."""
        if self._leased is not None:
            self._server.completions.post("/release", {"rid": self._leased.name})  # also if the lease was broken
            self._leased = None

    def _make_prompt(self, tokens: int) -> Ids:
        return random_ids(self._rng, tokens, self._vocab_size)


def calm(chat: Chat, turn: int) -> None:
    chat.take_turn()


def under_pressure(chat: Chat, turn: int) -> None:
    if turn:
        chat.answer_others()
    chat.take_turn()


def edited(chat: Chat, turn: int) -> None:
    chat.take_turn()
    if turn:
        chat.edit_last()


def after_restarts(chat: Chat, turn: int) -> None:
    if turn:
        chat.restart_server()
    chat.take_turn()


SCENARIOS: dict[str, Callable[[Chat, int], None]] = {
    CALM: calm,
    PRESSURE: under_pressure,
    EDITED: edited,
    RESTART: after_restarts,
}
