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
from collections.abc import AsyncIterator, Callable
from itertools import repeat
from typing import Any

import msgspec

from ..scheduler.outcome import FinishReason, RequestRefused
from .messages import BeamOutput, ContinuationOutput, LogprobChunk, RetainedOutput, TextOutput
from .prompt import Prompt

# Structs, not dataclasses: each streamed token makes one of each, and structs take a third of the time.


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """logprob: None for the first prompt token, which follows nothing, and for minus infinity, which JSON lacks.
    text: None unless the prompt asked for it. top: the likeliest tokens at that position, best first; None if none
    were asked for, or if the token itself has no logprob."""

    logprob: float | None
    id: int
    text: str | None = None
    top: list[TokenLogprob] | None = None


class Output(msgspec.Struct):
    """One output, or an update to it. In an update ``text``, ``token_ids`` and the logprobs hold only what is new; the
    other fields hold their current values.

    position: among the call's outputs. sample: among those of its prompt. e2e_latency: seconds from the call's arrival.
    It comes with ``finish``, as do ``beam``, ``continuation`` and ``retained``; the last two only if asked for.
    """

    prompt: Prompt
    position: int
    sample: int
    text: str
    token_ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    input_logprobs: list[TokenLogprob] = []
    output_logprobs: list[TokenLogprob] = []
    finish: FinishReason | None = None
    e2e_latency: float | None = None
    beam: BeamOutput | None = None
    continuation: ContinuationOutput | None = None
    retained: RetainedOutput | None = None

    def extend(self, newer: Output) -> None:
        """Merge the next update of the same output into this one."""
        self.text += newer.text
        self.token_ids += newer.token_ids
        self.input_logprobs += newer.input_logprobs
        self.output_logprobs += newer.output_logprobs
        self.prompt_tokens, self.cached_tokens = newer.prompt_tokens, newer.cached_tokens
        self.completion_tokens = newer.completion_tokens
        self.finish, self.e2e_latency, self.beam = newer.finish, newer.e2e_latency, newer.beam
        self.continuation, self.retained = newer.continuation, newer.retained


class Answer:
    """The answer to one API call. The TokenizerManager feeds it; the caller reads it, with either `outputs` or
    `updates`.

    `close` must be called when the reader stops, whatever the reason (``with answer:``); it aborts what is unfinished.
    """

    def __init__(self, prompts: list[Prompt], started: float, abandon: Callable[[Answer], None]) -> None:
        """``started``: when the call arrived, on the clock of `feed`."""
        self.prompts = prompts
        self._started = started
        self._samples = [(prompt, sample) for prompt in prompts for sample in range(prompt.sampling.n)]
        self._num_unfinished = len(self._samples)
        self._abandon = abandon
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
        """An output has grown or ended."""
        prompt, sample = self._samples[position]
        news = _output(prompt, position, sample, update)
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


def _output(prompt: Prompt, position: int, sample: int, update: TextOutput) -> Output:
    output, with_text = update.output, prompt.return_text_in_logprobs
    news = Output(
        prompt, position, sample, update.text, _ids(output.new_ids),
        output.prompt_tokens, output.completion_tokens, output.cached_tokens,
    )  # fmt: skip
    if output.input_logprobs is not None:
        news.input_logprobs = _token_logprobs(output.input_logprobs, update.input_logprob_texts if with_text else None)
    if output.output_logprobs is not None:
        texts = update.output_logprob_texts if with_text else None
        news.output_logprobs = _token_logprobs(output.output_logprobs, texts)
    if output.finish is not None:
        news.finish, news.beam, news.continuation = output.finish, output.beam, output.continuation
        retained = output.retained
        # Without a ttl it was leased only for children already waiting; the caller did not ask for it.
        if retained is not None and (retained.refused is not None or retained.ttl > 0):
            news.retained = retained
    return news


def _token_logprobs(chunk: LogprobChunk, texts: list[str] | None) -> list[TokenLogprob]:
    """``texts``: those of all tokens, then those of all their top entries."""
    ids, values, top_ids = _ids(chunk.ids), _floats(chunk.values), _ids(chunk.top_ids)
    if not top_ids:
        return list(map(TokenLogprob, values, ids, texts or repeat(None)))
    width, num_tokens = len(top_ids) // len(ids), len(ids)
    top = list(map(TokenLogprob, _floats(chunk.top_values), top_ids, texts[num_tokens:] if texts else repeat(None)))
    return [
        TokenLogprob(value, token_id, text, None if value is None else top[at : at + width])
        for at, value, token_id, text in zip(range(0, len(top), width), values, ids, texts or repeat(None))
    ]


def _ids(data: bytes) -> list[int]:
    """Like `unpack_ids`, at half the cost for a single token, which is what most updates bring."""
    return memoryview(data).cast("i").tolist() if data else []


def _floats(data: bytes) -> list[float | None]:
    """float32 bytes -> numbers; NaN and minus infinity, which JSON cannot express, become None."""
    values: list[Any] = memoryview(data).cast("f").tolist() if data else []
    if math.isfinite(sum(values)):  # then all of them are
        return values
    return [value if math.isfinite(value) else None for value in values]
