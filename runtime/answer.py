"""The outputs of one open API call, as plain typed data that each API turns into its own objects.

A call with P prompts and n samples each has P x n outputs, numbered ``prompt * n + sample``. The results of a beam
search are its samples, best first; where it finds fewer than n, the last positions stay empty.

The reader pulls. What arrives while it is busy is merged into the update that waits for it, not queued, so a slow
client gets fewer, larger updates.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count, repeat
from typing import Any

import msgspec

from ..scheduler.outcome import NO_DRAFTS, CacheReport, DraftCounts, FinishReason, FoundTokens, RequestRefused
from .messages import BeamOutput, ContinuationOutput, LogprobChunk, RetainedOutput, TextOutput
from .prompt import Prompt

_ID_BYTES = 4

# Structs, not dataclasses: each streamed token makes one of each, and structs take a third of the time.


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """logprob: None for the first prompt token, which follows nothing, and for minus infinity, which JSON lacks.
    text: None unless the prompt asked for it. top: the likeliest tokens at that position, best first; None if none
    were asked for, or if the token itself has no logprob. rank: 1 for the likeliest; None if not asked for."""

    logprob: float | None
    id: int
    text: str | None = None
    top: list[TokenLogprob] | None = None
    rank: int | None = None


class Logprobs(msgspec.Struct):
    """Logprobs of consecutive tokens, packed as they came: an entry takes 8 bytes, and more than a hundred as an
    object. A request may ask for millions. Iterating unpacks one token after the other.

    token_text: the text of a token; None if none is wanted. token_ids: those that the request names.
    """

    chunks: list[LogprobChunk] = []
    token_text: Callable[[int], str] | None = None
    token_ids: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Tokens."""
        return sum(len(chunk.ids) for chunk in self.chunks) // _ID_BYTES

    @property
    def num_entries(self) -> int:
        """Tokens, their top entries, and those of named ids."""
        more = sum(len(chunk.top_ids) + len(chunk.named_values) for chunk in self.chunks)
        return len(self) + more // _ID_BYTES

    def __iter__(self) -> Iterator[TokenLogprob]:
        for chunk in self.chunks:
            yield from self._unpacked(chunk)

    def without_top(self) -> Logprobs:
        return Logprobs([LogprobChunk(ids=chunk.ids, values=chunk.values) for chunk in self.chunks], self.token_text)

    def extend(self, newer: Logprobs) -> None:
        if newer.chunks:
            self.chunks += newer.chunks
            self.token_text, self.token_ids = newer.token_text, newer.token_ids

    def named(self) -> Iterator[list[TokenLogprob] | None]:
        """Yield, for each position, the logprobs of ``token_ids`` in that order; None for the first prompt token."""
        texts = [self.token_text(token_id) if self.token_text else None for token_id in self.token_ids]
        width = len(self.token_ids) * _ID_BYTES
        for chunk in self.chunks:
            for place, value in enumerate(memoryview(chunk.values).cast("f") if chunk.values else ()):
                values = _floats(chunk.named_values[place * width : (place + 1) * width])
                yield None if math.isnan(value) else list(map(TokenLogprob, values, self.token_ids, texts))

    def _unpacked(self, chunk: LogprobChunk) -> Iterator[TokenLogprob]:
        tokens = self._entries(chunk.ids, chunk.values)
        width = len(chunk.top_ids) // max(1, len(chunk.ids)) * _ID_BYTES
        if not width and not chunk.ranks:
            yield from tokens
            return
        ranks = _ids(chunk.ranks) or repeat(None)
        for at, token, rank in zip(count(0, width), tokens, ranks):
            top = None
            if token.logprob is not None and width:
                top = list(self._entries(chunk.top_ids[at : at + width], chunk.top_values[at : at + width]))
            yield TokenLogprob(token.logprob, token.id, token.text, top, rank)

    def _entries(self, packed_ids: bytes, packed_values: bytes) -> Iterator[TokenLogprob]:
        ids = _ids(packed_ids)
        return map(
            TokenLogprob, _floats(packed_values), ids, map(self.token_text, ids) if self.token_text else repeat(None)
        )


class Output(msgspec.Struct):
    """One output, or an update to it. In an update ``text``, ``token_ids`` and the logprobs hold only what is new; the
    other fields hold their current values.

    position: among the call's outputs. sample: among those of its prompt. prompt_ids: packed int32, with the first
    update of an output with ``returns_prompt`` in its spec. e2e_latency: seconds from the call's arrival. It comes with
    ``finish``, as do ``beam``, ``drafts``, ``cache_report``, ``continuation`` and ``retained``; the last two only if
    asked for. vector: float32, with ``finish`` of a prompt that is pooled.
    """

    prompt: Prompt
    position: int
    sample: int
    text: str
    token_ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    found: FoundTokens
    prompt_ids: bytes = b""
    input_logprobs: Logprobs = msgspec.field(default_factory=Logprobs)
    output_logprobs: Logprobs = msgspec.field(default_factory=Logprobs)
    finish: FinishReason | None = None
    e2e_latency: float | None = None
    beam: BeamOutput | None = None
    continuation: ContinuationOutput | None = None
    retained: RetainedOutput | None = None
    drafts: DraftCounts = NO_DRAFTS
    cache_report: CacheReport | None = None
    prepared_tokens: int = 0
    vector: bytes = b""

    @property
    def prompt_token_ids(self) -> memoryview:
        """``prompt_ids``, to be iterated over."""
        return memoryview(self.prompt_ids).cast("i")

    def extend(self, newer: Output) -> None:
        """Merge the next update of the same output into this one."""
        self.text += newer.text
        self.token_ids += newer.token_ids
        self.input_logprobs.extend(newer.input_logprobs)
        self.output_logprobs.extend(newer.output_logprobs)
        self.prompt_tokens, self.found = newer.prompt_tokens, newer.found
        self.prepared_tokens = newer.prepared_tokens
        self.completion_tokens = newer.completion_tokens
        self.finish, self.e2e_latency, self.beam = newer.finish, newer.e2e_latency, newer.beam
        self.continuation, self.retained, self.drafts = newer.continuation, newer.retained, newer.drafts
        self.cache_report, self.vector = newer.cache_report, newer.vector


class Answer:
    """The answer to one API call. The TokenizerManager feeds it; the caller reads it, with either `outputs` or
    `updates`.

    `close` must be called when the reader stops, whatever the reason (``with answer:``); it aborts what is unfinished.
    """

    def __init__(
        self,
        prompts: list[Prompt],
        started: float,
        abandon: Callable[[Answer], None],
        token_text: Callable[[int], str],
    ) -> None:
        """started: when the call arrived, on the clock of `feed`. token_text: for logprobs that are wanted with it."""
        self.prompts = prompts
        self._started = started
        self._samples = [(prompt, sample) for prompt in prompts for sample in range(prompt.sampling.n)]
        self._num_unfinished = len(self._samples)
        self._abandon = abandon
        self._token_text = token_text
        self._unread: dict[int, Output] = {}
        self._changed = asyncio.Event()
        self._error: RequestRefused | None = None

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def finished(self) -> bool:
        return self._error is not None or self._num_unfinished == 0

    def feed(self, position: int, update: TextOutput, now: float) -> None:
        """Add an update: an output has grown or ended."""
        prompt, sample = self._samples[position]
        token_text = self._token_text if prompt.return_text_in_logprobs else None
        news = _output(prompt, position, sample, update, token_text)
        if news.finish is not None:
            news.e2e_latency = now - self._started
            self._num_unfinished -= 1
        unread = self._unread.setdefault(position, news)
        if unread is not news:
            unread.extend(news)
        self._changed.set()

    def leave_empty(self, positions: range) -> None:
        """Expect no output at these positions: the search found fewer than n results."""
        self._num_unfinished -= len(positions)
        self._changed.set()

    def fail(self, error: RequestRefused) -> None:
        """End the call with an error; its unread outputs are dropped."""
        if self._error is None:
            self._error = error
            self._changed.set()

    async def outputs(self) -> list[Output]:
        """Wait for all outputs and return them in order of position. Raises RequestRefused if a prompt failed."""
        while not self.finished:
            await self.wait()
        if self._error is not None:
            raise self._error
        return [self._unread[position] for position in sorted(self._unread)]

    async def updates(self) -> AsyncIterator[Output]:
        """Yield an update whenever an output has grown. Raises RequestRefused if a prompt of the call failed."""
        while True:
            if self._error is not None:
                raise self._error
            for position in sorted(self._unread):
                yield self._unread.pop(position)
            if not self._unread and self._error is None:
                if self.finished:
                    return
                await self.wait()

    def close(self) -> None:
        """Abort what is unfinished. Safe to call twice."""
        self._abandon(self)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait until something has changed since the last `wait`, or the time is over."""
        if timeout_s is None:  # the cheap way, which a stream takes with every token
            await self._changed.wait()
        else:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout_s)
        self._changed.clear()


def _output(
    prompt: Prompt, position: int, sample: int, update: TextOutput, token_text: Callable[[int], str] | None
) -> Output:
    output = update.output
    news = Output(
        prompt, position, sample, update.text, _ids(output.new_ids),
        output.prompt_tokens, output.completion_tokens, output.found,
    )  # fmt: skip
    news.prepared_tokens = output.prepared_tokens
    if prompt.spec.returns_prompt:  # the server may have requested them for itself
        news.prompt_ids = output.prompt_ids
    named = prompt.spec.logprobs.token_ids if prompt.spec.logprobs is not None else ()
    if output.input_logprobs is not None:
        news.input_logprobs = Logprobs([output.input_logprobs], token_text, named)
    if output.output_logprobs is not None:
        news.output_logprobs = Logprobs([output.output_logprobs], token_text, named)
    if output.finish is not None:
        news.finish, news.beam, news.continuation = output.finish, output.beam, output.continuation
        news.drafts, news.cache_report, news.vector = output.drafts, output.cache_report, output.vector
        retained = output.retained
        # Without a ttl it was leased only for children already waiting; the caller did not ask for it.
        if retained is not None and (retained.refused is not None or retained.ttl > 0):
            news.retained = retained
    return news


def _ids(data: bytes) -> list[int]:
    """Like `unpack_ids`, at half the cost for a single token, which is what most updates bring."""
    return memoryview(data).cast("i").tolist() if data else []


def _floats(data: bytes) -> list[float | None]:
    """float32 bytes -> numbers; NaN and minus infinity, which JSON cannot express, become None."""
    values: list[Any] = memoryview(data).cast("f").tolist() if data else []
    if math.isfinite(sum(values)):  # then all of them are
        return values
    return [value if math.isfinite(value) else None for value in values]
