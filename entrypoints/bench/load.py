"""Sends conversations to a server as they arrive, and records each request."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .apis import Answer, Api, Turn
from .connections import Connections, RequestFailed


@dataclass(frozen=True)
class Record:
    """One request. conversation, turn: from 0. error: why it failed, None for one with a whole answer."""

    conversation: int
    turn: int
    answer: Answer
    error: str | None = None


@dataclass(frozen=True)
class Run:
    """seconds: from the start to the end of the last request. began: time.perf_counter at the start."""

    records: list[Record]
    began: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Load:
    """offsets: arrivals of the conversations, in seconds from the start. max_concurrency: None is no limit. timeout_s:
    a request that takes longer has failed."""

    api: Api
    connections: Connections
    output_tokens: int
    offsets: Sequence[float]
    max_concurrency: int | None
    timeout_s: float

    async def run(self, way: str, conversations: list[list[str]], progress: Callable[[int], object]) -> Run:
        """progress: called with the number of finished requests after each. A failed turn ends its
        conversation, since a turn needs the answers before it: its later turns are not sent."""
        free = asyncio.Semaphore(self.max_concurrency or len(conversations))
        records: list[Record] = []
        began = time.perf_counter()

        async def converse(number: int, texts: list[str]) -> None:
            await asyncio.sleep(max(0.0, began + self.offsets[number] - time.perf_counter()))
            async with free:
                before: list[tuple[str, Answer]] = []
                for index, text in enumerate(texts):
                    answer = Answer()
                    turn = Turn(text, before, is_last=index == len(texts) - 1)
                    error = await self._send(turn, way, answer)
                    records.append(Record(number, index, answer, error))
                    progress(1)
                    if error is not None:
                        progress(len(texts) - 1 - index)
                        return
                    before.append((text, answer))

        async with asyncio.TaskGroup() as group:
            for number, texts in enumerate(conversations):
                group.create_task(converse(number, texts))
        ended = max((record.answer.ended for record in records), default=began)
        return Run(sorted(records, key=lambda record: (record.conversation, record.turn)), began, ended - began)

    async def _send(self, turn: Turn, way: str, answer: Answer) -> str | None:
        try:
            await ask(
                self.connections, self.api, self.api.request(turn, way, self.output_tokens), answer, self.timeout_s
            )
        except RequestFailed as failed:
            answer.ended = time.perf_counter()
            return str(failed)
        return None


async def ask(connections: Connections, api: Api, fields: dict[str, object], answer: Answer, timeout_s: float) -> None:
    """Send one request and fill in its answer. Raises RequestFailed."""

    def sent(now: float) -> None:
        answer.started = now

    answer.started = time.perf_counter()  # for requests that cannot even be sent
    try:
        async with (
            asyncio.timeout(timeout_s),
            contextlib.aclosing(connections.events(api.path, fields, sent)) as events,
        ):
            async for event in events:
                try:
                    api.read_event(event, time.perf_counter(), answer)
                except (KeyError, TypeError, AttributeError):
                    raise RequestFailed(
                        f"{api.path} sent an event that is none of its API: {str(event)[:200]}"
                    ) from None
    except TimeoutError:
        raise RequestFailed(f"{api.path}: no whole answer within {timeout_s:g} s (--timeout)") from None
    answer.ended = time.perf_counter()
    if answer.prompt_tokens is None or answer.output_tokens is None:
        raise RequestFailed(f"{api.path}: the stream has no usage, so tokens cannot be counted")
    if not answer.output_tokens:
        raise RequestFailed(f"{api.path}: the answer has no token")
    if not answer.arrivals:  # tokens without text
        answer.arrivals.append(answer.ended)


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds from the start; the first is 0. With an infinite rate all are 0. Otherwise they are a
    Poisson process of that many arrivals a second, whose gaps are exponentially distributed."""
    if rate == float("inf"):
        return [0.0] * count
    gaps = np.random.default_rng(seed).exponential(1 / rate, size=max(0, count - 1))
    return [0.0, *np.cumsum(gaps).tolist()][:count]
