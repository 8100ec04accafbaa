"""One API call while it is open: its prompts' samples, put together from what the detokenizer sends.

A call with P prompts and n samples each has P x n outputs; output ``prompt * n + sample`` is the sample's position. The
results of a beam search are its samples, best first; where it finds fewer than n, the last positions stay empty. The
dicts have the shape of SGLang's ``/generate`` responses, so that its clients work unchanged.

Reading is pull: a reader that falls behind finds the newest state of a sample, not a queue of old ones, so a slow
client costs no memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import msgspec

from ..scheduler.outcome import FinishReason
from ..scheduler.refusal import RequestRefused
from ..scheduler.token_buffer import unpack_ids
from .messages import BeamOutput, LogprobChunk, RetainedOutput, TextOutput
from .prompt import Prompt


@dataclass(slots=True)
class _Logprobs:
    """Logprobs of the tokens so far, in SGLang's lists of [logprob, token id, text or None]."""

    tokens: list[list] = field(default_factory=list)
    top: list[list | None] = field(default_factory=list)

    def add(self, chunk: LogprobChunk, texts: list[str] | None) -> None:
        ids = unpack_ids(chunk.ids).tolist()
        values = _floats(chunk.values)
        top_ids = unpack_ids(chunk.top_ids).tolist()
        top_values = _floats(chunk.top_values)
        named = texts if texts is not None else [None] * (len(ids) + len(top_ids))
        self.tokens.extend([value, token_id, text] for value, token_id, text in zip(values, ids, named))
        if not top_ids:
            return
        width = len(top_ids) // len(ids)
        rows = [list(row) for row in zip(top_values, top_ids, named[len(ids) :])]
        for position, value in enumerate(values):
            # The first prompt token follows nothing: it has neither a logprob nor alternatives.
            self.top.append(None if value is None else rows[position * width : (position + 1) * width])


class Sample:
    """One output of a call: everything known of it so far."""

    def __init__(self, prompt: Prompt, started: float) -> None:
        self.prompt = prompt
        self.started = started
        self.finished = False
        self.is_missing = False
        """Of a beam search that found fewer sequences than it was asked for; finished, too."""
        self._text = ""
        self._output_ids: list[int] = []
        self._input = _Logprobs()
        self._output = _Logprobs()
        self._meta: dict = {}
        # How much `take` has handed out already.
        self._taken_chars = 0
        self._taken_ids = 0
        self._taken_input = 0
        self._taken_output = 0

    @property
    def completion_tokens(self) -> int:
        return self._meta.get("completion_tokens", 0)

    @property
    def prompt_tokens(self) -> int:
        return self._meta.get("prompt_tokens", 0)

    def add(self, update: TextOutput, now: float) -> None:
        output = update.output
        self._text += update.text
        self._output_ids.extend(unpack_ids(output.new_ids).tolist())
        with_text = self.prompt.return_text_in_logprobs
        if output.input_logprobs is not None:
            self._input.add(output.input_logprobs, update.input_logprob_texts if with_text else None)
        if output.output_logprobs is not None:
            self._output.add(output.output_logprobs, update.output_logprob_texts if with_text else None)
        self._meta = {
            "id": self.prompt.rid,
            "finish_reason": None,
            "prompt_tokens": output.prompt_tokens,
            "completion_tokens": output.completion_tokens,
            "cached_tokens": output.cached_tokens,
        }
        if output.finish is not None:
            self.finished = True
            self._meta["finish_reason"] = _finish_reason(output.finish, output.completion_tokens)
            self._meta["e2e_latency"] = now - self.started
            if output.beam is not None:
                self._meta |= _beam(output.beam)
            if output.continuation is not None:
                self._meta["continuation"] = msgspec.structs.asdict(output.continuation)
            if output.retained is not None and (retained := _retained(output.retained)):
                self._meta["retained"] = retained

    def snapshot(self) -> dict:
        """The whole output so far."""
        return self._shape(0, 0, 0, 0)

    def take(self) -> dict:
        """What is new since the last `take`."""
        shaped = self._shape(self._taken_chars, self._taken_ids, self._taken_input, self._taken_output)
        self._taken_chars = len(self._text)
        self._taken_ids = len(self._output_ids)
        self._taken_input = len(self._input.tokens)
        self._taken_output = len(self._output.tokens)
        return shaped

    def _shape(self, char: int, token: int, input_from: int, output_from: int) -> dict:
        meta = dict(self._meta)
        if self.prompt.return_logprob:
            meta["input_token_logprobs"] = self._input.tokens[input_from:]
            meta["output_token_logprobs"] = self._output.tokens[output_from:]
            if self.prompt.top_logprobs_num:
                meta["input_top_logprobs"] = self._input.top[input_from:]
                meta["output_top_logprobs"] = self._output.top[output_from:]
        return {"text": self._text[char:], "output_ids": self._output_ids[token:], "meta_info": meta}


class Call:
    """The open outputs of one API call. Owned by its reader; the TokenizerManager feeds it.

    `close` must be called when the reader stops, whatever the reason (``with call:``); it aborts what is unfinished.
    """

    def __init__(self, prompts: list[Prompt], started: float, abandon: Callable[[Call], None]) -> None:
        self.prompts = prompts
        self.started = started
        self.samples = [Sample(prompt, started) for prompt in prompts for _ in range(prompt.sampling.n)]
        self._abandon = abandon
        self._dirty: set[int] = set()
        self._changed = asyncio.Event()
        self._error: RequestRefused | None = None

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def finished(self) -> bool:
        return self._error is not None or all(sample.finished for sample in self.samples)

    def feed(self, position: int, update: TextOutput, now: float) -> None:
        """A sample has grown or ended."""
        self.samples[position].add(update, now)
        self._dirty.add(position)
        self._changed.set()

    def leave_empty(self, positions: range) -> None:
        """No output will come for these: their search has found no more."""
        for position in positions:
            self.samples[position].finished = self.samples[position].is_missing = True
        self._changed.set()

    def fail(self, error: RequestRefused) -> None:
        """The call ends with an error; what its samples had is dropped."""
        if self._error is None:
            self._error = error
            self._changed.set()

    async def results(self) -> list[dict]:
        """Every output, whole, in order of position. Raises RequestRefused when a prompt of the call failed."""
        return [output for _, output in await self.outputs()]

    async def outputs(self) -> list[tuple[int, dict]]:
        """`results`, each with its position."""
        while not self.finished:
            await self.wait()
        if self._error is not None:
            raise self._error
        samples = enumerate(self.samples)
        return [(position, sample.snapshot()) for position, sample in samples if not sample.is_missing]

    async def updates(self, *, incremental: bool = False) -> AsyncIterator[tuple[int, dict]]:
        """(position, output so far) whenever one has grown, or only what is new where ``incremental``.

        Raises RequestRefused when a prompt of the call failed.
        """
        while True:
            if self._error is not None:
                raise self._error
            dirty, self._dirty = sorted(self._dirty), set()
            for position in dirty:
                sample = self.samples[position]
                yield position, sample.take() if incremental else sample.snapshot()
            if not self._dirty and self._error is None:
                if self.finished:
                    return
                await self.wait()

    def close(self) -> None:
        """Abort what is unfinished. Safe to call twice."""
        self._abandon(self)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Until something has changed since the last `wait`, or the time is over."""
        if timeout_s is None:  # what a stream waits for with every token
            await self._changed.wait()
        else:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout_s)
        self._changed.clear()


def _finish_reason(finish: FinishReason, completion_tokens: int) -> dict:
    reason: dict = {"type": finish.type}
    if finish.type == "stop":
        reason["matched"] = finish.matched
    elif finish.type == "length":
        reason["length"] = completion_tokens
    else:
        reason["message"] = finish.message or "aborted"
    return reason


def _beam(beam: BeamOutput) -> dict:
    scores: dict = {"cumulative_logprob": beam.cumulative_logprob, "sequence_score": beam.sequence_score}
    if beam.shortfall is not None:
        scores["beam_search"] = {"results": beam.num_results, "reason": beam.shortfall}
    return scores


def _retained(retained: RetainedOutput) -> dict:
    """Empty where the request did not ask for it: then its end was leased for nobody but children that waited."""
    if retained.refused is not None:
        return {"refused": retained.refused}
    return {"tokens": retained.tokens, "ttl": retained.ttl} if retained.ttl > 0 else {}


def _floats(data: bytes) -> list[float | None]:
    """float32 bytes -> numbers; NaN, and minus infinity, which JSON cannot say, become None."""
    values = memoryview(data).cast("f").tolist() if data else []
    return [value if math.isfinite(value) else None for value in values]
