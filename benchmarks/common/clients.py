"""A common interface to engines: in this process, over Baton's HTTP API, or over any OpenAI-compatible one.

A prompt is a list of token ids if the engine accepts them, else text; both can be joined with outputs by +.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

import numpy as np

Tokens = Any
"""list[int] or str, one of them throughout a client."""

SAMPLED: dict[str, Any] = {"temperature": 0.6, "top_p": 0.95, "top_k": 50}
GREEDY: dict[str, Any] = {"temperature": 0.0}


# Names are made up here, and cheaply: the call that makes one is being timed.
_RUN = uuid4().hex
_NUMBERS = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request; ``max_tokens`` tokens come whatever they are. With ``parent``, ``prompt`` is only the suffix."""

    prompt: Tokens
    max_tokens: int
    sampling: dict[str, Any] = field(default_factory=lambda: GREEDY)
    stream: bool = False
    parent: str | None = None
    retain_ttl: float | None = None


@dataclass(frozen=True, kw_only=True)
class Reply:
    """ttft and total in seconds from the call; ttft is total where the call did not stream.

    cached_tokens: None where the server does not tell. path: of a continuation. refused: why nothing was retained.
    """

    name: str
    output: Tokens
    ttft: float
    total: float
    prompt_tokens: int
    cached_tokens: int | None = None
    path: str | None = None
    refused: str | None = None

    @property
    def computed_tokens(self) -> int | None:
        """Prompt tokens that were not in the cache."""
        return None if self.cached_tokens is None else self.prompt_tokens - self.cached_tokens


class Client(Protocol):
    name: str
    continues: bool
    """True if the engine supports continuations."""

    async def open_session(self) -> None: ...

    async def close(self) -> None: ...

    def make_prompt(self, rng: np.random.Generator, num_tokens: int) -> Tokens:
        """Random, about ``num_tokens`` long, and unlike any other from its first token on."""
        ...

    async def send_call(self, call: Call) -> Reply: ...

    async def flush(self) -> bool:
        """Empty the cache; False if the server has no way to do that."""
        ...

    async def stats(self) -> dict[str, Any] | None:
        """The worker's statistics, None where there are none."""
        ...


def random_ids(rng: np.random.Generator, num_tokens: int, vocab_size: int) -> list[int]:
    # The first ids of many vocabularies are special.
    return rng.integers(min(300, vocab_size // 2), vocab_size, num_tokens).tolist()


def native_fields(call: Call) -> dict[str, Any]:
    """Fields of `POST /generate`."""
    fields: dict[str, Any] = {
        "rid": f"{_RUN}-{next(_NUMBERS)}",
        "sampling_params": {**call.sampling, "max_new_tokens": call.max_tokens, "ignore_eos": True},
        "stream": call.stream,
    }
    if call.parent is None:
        fields["input_ids"] = call.prompt
    else:
        fields |= {"continuation_of": call.parent, "continuation_ids": call.prompt}
    if call.retain_ttl is not None:
        fields["retain_ttl"] = call.retain_ttl
    return fields


def native_reply(answer: dict[str, Any], started: float, first: float | None) -> Reply:
    meta = answer["meta_info"]
    if meta["finish_reason"]["type"] != "length":
        raise RuntimeError(f"request {meta['id']} ended with {meta['finish_reason']}")
    ended = time.perf_counter()
    return Reply(
        name=meta["id"],
        output=answer["output_ids"],
        ttft=(first or ended) - started,
        total=ended - started,
        prompt_tokens=meta["prompt_tokens"],
        cached_tokens=meta["cached_tokens"],
        path=meta.get("continuation", {}).get("path"),
        refused=meta.get("retained", {}).get("refused"),
    )


class EngineClient:
    """The Engine in this process, on token ids. ``settings``: its keywords."""

    name = "engine"
    continues = True

    def __init__(self, settings: dict[str, Any]) -> None:
        from baton.entrypoints.engine import Engine

        self._engine = Engine(**settings)

    async def open_session(self) -> None:
        self._vocab_size = (await asyncio.to_thread(self._engine.get_server_info))["vocab_size"]

    async def close(self) -> None:
        await asyncio.to_thread(self._engine.shutdown)

    def make_prompt(self, rng: np.random.Generator, num_tokens: int) -> list[int]:
        return random_ids(rng, num_tokens, self._vocab_size)

    async def answer(self, fields: dict[str, Any]) -> Any:
        """The answer of `POST /generate` to these fields, not streamed."""
        return await self._engine.async_generate(**fields)

    async def send_call(self, call: Call) -> Reply:
        started, first = time.perf_counter(), None
        answer = await self.answer(native_fields(call))
        if call.stream:
            updates = answer
            async for update in updates:
                answer, first = update, first or time.perf_counter()
        return native_reply(answer, started, first)

    async def flush(self) -> bool:
        await asyncio.to_thread(self._engine.flush_cache)
        return True

    async def stats(self) -> dict[str, Any]:
        return (await self.info())["stats"]

    async def info(self) -> dict[str, Any]:
        """The worker's report."""
        return await asyncio.to_thread(self._engine.get_server_info)

    async def start_profile(self) -> None:
        await self._engine.async_start_profile()

    async def stop_profile(self) -> dict[str, Any]:
        return await self._engine.async_stop_profile()


class HTTPClient:
    """The common part of both HTTP clients."""

    def __init__(self, url: str, api_key: str, timeout_s: float) -> None:
        import httpx

        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(base_url=url.rstrip("/"), headers=headers, timeout=timeout_s, limits=limits)

    async def close(self) -> None:
        await self._http.aclose()

    async def _get(self, path: str) -> Any:
        return _checked(await self._http.get(path)).json()

    async def _post(self, path: str, body: dict) -> Any:
        return _checked(await self._http.post(path, json=body)).json()

    async def _events(self, path: str, body: dict) -> AsyncIterator[dict]:
        """Server-sent events up to [DONE]."""
        async with self._http.stream("POST", path, json=body) as response:
            if response.is_error:
                await response.aread()
            _checked(response)
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise RuntimeError(f"{path}: {event['error']}")
                yield event


def _checked(response: Any) -> Any:
    if response.is_error:
        raise RuntimeError(f"{response.request.url} answered {response.status_code}: {response.text[:500]}")
    return response


class NativeClient(HTTPClient):
    """Our own server, native API, on token ids."""

    name = "http"
    continues = True

    async def open_session(self) -> None:
        self._vocab_size = (await self._get("/model_info"))["vocab_size"]

    def make_prompt(self, rng: np.random.Generator, num_tokens: int) -> list[int]:
        return random_ids(rng, num_tokens, self._vocab_size)

    async def answer(self, fields: dict[str, Any]) -> Any:
        """The answer of `POST /generate` to these fields, not streamed."""
        return await self._post("/generate", fields)

    async def send_call(self, call: Call) -> Reply:
        fields = native_fields(call)
        started, first = time.perf_counter(), None
        if not call.stream:
            return native_reply(await self.answer(fields), started, first)
        answer: dict[str, Any] = {}
        async for event in self._events("/generate", fields):
            answer, first = event, first or time.perf_counter()
        return native_reply(answer, started, first)

    async def flush(self) -> bool:
        _checked(await self._http.post("/flush_cache"))
        return True

    async def stats(self) -> dict[str, Any]:
        return (await self.info())["stats"]

    async def info(self) -> dict[str, Any]:
        """The worker's report."""
        return (await self._get("/server_info"))["internal_states"][0]

    async def start_profile(self) -> None:
        _checked(await self._http.post("/start_profile"))

    async def stop_profile(self) -> dict[str, Any]:
        return _checked(await self._http.post("/stop_profile")).json()


class OpenAIClient(HTTPClient):
    """Any server with ``/v1/completions``, on text. Continues only where the server is ours."""

    name = "openai"
    continues = False
    _words_per_token = 1.0

    async def open_session(self) -> None:
        model = (await self._get("/v1/models"))["data"][0]
        self._model = model["id"]
        self.continues = model.get("owned_by") == "baton"
        probe = await self.send_call(Call(prompt=self.make_prompt(np.random.default_rng(0), 200), max_tokens=1))
        self._words_per_token = 200 / probe.prompt_tokens

    def make_prompt(self, rng: np.random.Generator, num_tokens: int) -> str:
        count = max(1, round(num_tokens * self._words_per_token))
        return " ".join(str(number) for number in rng.integers(1000, 10_000, count))

    async def send_call(self, call: Call) -> Reply:
        body: dict[str, Any] = {
            **call.sampling,
            "model": self._model,
            "max_tokens": call.max_tokens,
            "ignore_eos": True,
            "stream": call.stream,
        }
        if call.parent is None:
            body["prompt"] = call.prompt
        else:
            body |= {"continuation_of": call.parent, "continuation_suffix": call.prompt}
        if call.retain_ttl is not None:
            body["retain_ttl"] = call.retain_ttl
        started, first = time.perf_counter(), None
        if call.stream:
            body["stream_options"] = {"include_usage": True}
            answer: dict[str, Any] = {"usage": {}, "text": "", "choice": {}}
            async for event in self._events("/v1/completions", body):
                if event["choices"]:
                    first = first or time.perf_counter()
                    answer["choice"] |= event["choices"][0]
                    answer["text"] += event["choices"][0]["text"]
                answer["usage"] = event.get("usage") or answer["usage"]
                answer["id"] = event["id"]
        else:
            answer = await self._post("/v1/completions", body)
            answer |= {"choice": answer["choices"][0], "text": answer["choices"][0]["text"]}
        ended = time.perf_counter()
        ours = answer["choice"].get("baton", {})
        return Reply(
            name=answer["id"],
            output=answer["text"],
            ttft=(first or ended) - started,
            total=ended - started,
            prompt_tokens=answer["usage"].get("prompt_tokens", 0),
            cached_tokens=(answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens"),
            path=ours.get("continuation", {}).get("path"),
            refused=ours.get("retained", {}).get("refused"),
        )

    async def flush(self) -> bool:
        for path in ("/flush_cache", "/reset_prefix_cache"):
            if (await self._http.post(path)).is_success:
                return True
        return False

    async def stats(self) -> None:
        return None
