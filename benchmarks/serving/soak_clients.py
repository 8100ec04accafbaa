"""The clients of the soak run: every kind of request at once, with every kind of misbehaviour.

A kind is one coroutine function: it sends a request, and returns a description of any fault in the answer, or None.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

VOCAB, BAD_TOKEN = 1000, 1500
"""Prompts are drawn from the first; the second's weights are NaN."""

TRIE_ITEMS = [[3, 5, 7], [3, 5, 9], [4, 8, 15], [16, 23, 42]]


@dataclass
class Soak:
    """The state that the clients share."""

    http: httpx.AsyncClient
    rng: random.Random
    numbers: itertools.count = field(default_factory=itertools.count)
    sent: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    """Faults, by kind and finding."""
    finished: list[str] = field(default_factory=list)
    """Rids that others may continue."""

    def name(self, kind: str) -> str:
        return f"{kind}-{next(self.numbers)}"

    def ids(self, most: int = 60) -> list[int]:
        """Prompts share long beginnings."""
        stem = [self.rng.randrange(3)] * self.rng.randrange(1, 120)
        return stem + [self.rng.randrange(VOCAB) for _ in range(self.rng.randrange(1, most))]

    def body(self, kind: str, new: int = 24, **more: Any) -> dict[str, Any]:
        sampling: dict[str, Any] = {
            "max_new_tokens": self.rng.randrange(1, new),
            "temperature": self.rng.choice([0, 0.8]),
        }
        sampling |= {"logit_bias": {str(BAD_TOKEN): -100.0}}  # no other request may generate it by chance
        sampling |= more.pop("sampling", {})
        return {"rid": self.name(kind), "input_ids": self.ids(), "sampling_params": sampling, **more}


def wrong(answer: httpx.Response, *allowed: int) -> str | None:
    return None if answer.status_code in allowed else f"{answer.status_code}: {answer.text[:200]}"


async def plain(soak: Soak) -> str | None:
    body = soak.body("plain", retain_ttl=soak.rng.choice([0, 0, 3.0]), user=f"user{soak.rng.randrange(5)}")
    answer = await soak.http.post("/generate", json=body)
    if answer.status_code == 200:
        soak.finished = [*soak.finished[-50:], body["rid"]]
    return wrong(answer, 200)


async def stream(soak: Soak) -> str | None:
    return await _read_stream(soak, soak.body("stream", 48, stream=True), pause=0.0, leave_after=None)


async def slow_reader(soak: Soak) -> str | None:
    return await _read_stream(soak, soak.body("slow", 48, stream=True), pause=0.05, leave_after=None)


async def killed_client(soak: Soak) -> str | None:
    return await _read_stream(soak, soak.body("killed", 48, stream=True), pause=0.0, leave_after=3)


async def _read_stream(soak: Soak, body: dict[str, Any], *, pause: float, leave_after: int | None) -> str | None:
    events = 0
    async with soak.http.stream("POST", "/generate", json=body) as answer:
        if answer.status_code != 200:
            return f"{answer.status_code}"
        async for line in answer.aiter_lines():
            events += bool(line)
            if '"error"' in line:
                return line[:200]
            if leave_after is not None and events >= leave_after:
                return None
            await asyncio.sleep(pause)
    return None


async def chain(soak: Soak) -> str | None:
    """Three stages, each sent before the last has ended."""
    parent = soak.body("chain", retain_ttl=2.0)
    sent = [soak.http.post("/generate", json=parent)]
    for _ in range(2):
        child = soak.body("chain", retain_ttl=2.0)
        child |= {"continuation_of": parent["rid"], "continuation_ids": child.pop("input_ids")[-5:]}
        sent.append(soak.http.post("/generate", json=child))
        parent = child
    for answer in await asyncio.gather(*sent):
        if found := wrong(answer, 200, 404):  # a child may overtake its parent on the way
            return found
    return None


async def late_child(soak: Soak) -> str | None:
    if not soak.finished:
        return None
    body = soak.body("late", keep_parent=soak.rng.random() < 0.5)
    body |= {"continuation_of": soak.rng.choice(soak.finished), "continuation_ids": body.pop("input_ids")[-3:]}
    return wrong(await soak.http.post("/generate", json=body), 200, 404, 410)


async def beams(soak: Soak) -> str | None:
    sampling: dict[str, Any] = {"beam_width": soak.rng.choice([2, 8]), "max_new_tokens": 6, "temperature": 0}
    if soak.rng.random() < 0.5:
        sampling["item_trie"] = "items"
    return wrong(await soak.http.post("/generate", json=soak.body("beams", sampling=sampling)), 200)


async def abort(soak: Soak) -> str | None:
    body = soak.body("abort", sampling={"max_new_tokens": 200, "ignore_eos": True})
    asked = asyncio.create_task(soak.http.post("/generate", json=body))
    await asyncio.sleep(soak.rng.random() * 0.3)
    ended = await soak.http.post("/abort_request", json={"rid": body["rid"]})
    return wrong(ended, 200, 404) or wrong(await asked, 200)


async def not_finite(soak: Soak) -> str | None:
    body = soak.body("nan")
    body["input_ids"].append(BAD_TOKEN)
    return wrong(await soak.http.post("/generate", json=body), 500)


async def garbage(soak: Soak) -> str | None:
    """Bodies that are no request. Each is refused with a 4xx, and nothing else happens."""
    body = soak.rng.choice(
        [b"", b"{", b"[]", b'{"text": 5}', b'{"text": "a", "n": 1e9}', b'{"input_ids": [-1]}', b"\xff\xfe" * 500]
    )
    answer = await soak.http.post("/generate", content=body, headers={"Content-Type": "application/json"})
    return None if 400 <= answer.status_code < 500 else wrong(answer)


KINDS: dict[Callable[[Soak], Awaitable[str | None]], int] = {
    plain: 30, stream: 12, slow_reader: 3, killed_client: 8, chain: 8, late_child: 8, beams: 6, abort: 6, not_finite: 2,
    garbage: 4,
}  # fmt: skip
"""With how often each is sent."""


async def run_clients(soak: Soak, concurrency: int, until: asyncio.Event) -> None:
    """Send until the event is set; every client then finishes what it has begun."""

    async def client() -> None:
        kinds, weights = list(KINDS), list(KINDS.values())
        while not until.is_set():
            kind = soak.rng.choices(kinds, weights)[0]
            soak.sent[kind.__name__] += 1
            try:
                found = await kind(soak)
            except httpx.HTTPError as error:
                found = f"{type(error).__name__}: {error}"
            if found:
                soak.errors[f"{kind.__name__}: {found}"] += 1

    await asyncio.gather(*(client() for _ in range(concurrency)))
