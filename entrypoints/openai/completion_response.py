"""Turns the outputs of one completion into OpenAI's objects: one whole response, or the chunks of a stream."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Iterable
from itertools import chain
from typing import Any

from ...runtime.answer import Logprobs, Output, TokenLogprob
from ...runtime.prompt import Prompt
from ...runtime.text.incremental_decode import IncrementalDecoder, decode_all
from ...runtime.text.token_bytes import TokenBytes
from ...runtime.text.tokenizer import Tokenizer
from ..description.json_schema import (
    IDS,
    Properties,
    answered,
    enum,
    list_of,
    nullable,
    number,
    open_object,
    string,
    whole,
)
from ..fields.output_details import BEAM_SCORES, RID_AND_INDEX, STAGE_DETAILS, beam_scores, stage_details
from .common import FINISH_REASONS, MATCHED_STOP, PROMPT_LOGPROBS, USAGE, prompt_logprobs, usage
from .completions import COMPLETION_NAMES, CompletionRequest


class CompletionResponse:
    """Builds the response to one request."""

    def __init__(self, request: CompletionRequest, model: str, tokenizer: Tokenizer) -> None:
        """``model``: the served name."""
        self._include_usage = request.include_usage
        head = {"id": request.response_id, "object": "text_completion", "created": int(time.time()), "model": model}
        self._head = head
        self._choices = [
            _Choice(request, prompt, tokenizer) for prompt in request.batch.prompts for _ in range(prompt.sampling.n)
        ]

    def whole(self, outputs: list[Output]) -> dict:
        """The response to a request that does not stream, from all its outputs; where lists may be long there are
        iterators."""
        choices = [self._choices[output.position].add_output(output, iter) for output in outputs]
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def chunks(self, updates: AsyncIterator[Output]) -> AsyncIterator[dict]:
        """The events of a stream, from the updates of an `Answer`. Raises RequestRefused with OpenAI's field names."""
        extra = {"usage": None} if self._include_usage else {}
        with COMPLETION_NAMES.translated():
            async for output in updates:
                choice = self._choices[output.position].add_output(output)
                if choice["text"] or choice["finish_reason"] or choice["logprobs"] or choice.get("token_ids"):
                    yield {**self._head, "choices": [choice], **extra}
        if self._include_usage:
            yield {**self._head, "choices": [], "usage": self._usage()}

    def _usage(self) -> dict:
        # A search may find fewer outputs than it was asked for.
        return usage(choice.newest for choice in self._choices if choice.newest is not None)


class _Choice:
    """One choice, as it grows. ``newest``: the latest update of its output."""

    def __init__(self, request: CompletionRequest, prompt: Prompt, tokenizer: Tokenizer) -> None:
        self.newest: Output | None = None
        self._request = request
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._logprobs: LogprobsBuilder | None = None

    def add_output(self, output: Output, rows: Callable[[Iterable], Any] = list) -> dict:
        """OpenAI's choice object for what is new in the output. rows: see `LogprobsBuilder.add_output`."""
        text = output.text if self.newest is not None else self._begin(output) + output.text
        self.newest = output
        finish = output.finish
        choice: dict[str, Any] = {
            "index": output.position,
            "text": text,
            "logprobs": None if self._logprobs is None else self._logprobs.add_output(output, rows),
            "finish_reason": None if finish is None else finish.type,
        }
        if (num_top := self._request.prompt_logprobs) is not None:
            choice["prompt_logprobs"] = rows(prompt_logprobs(output, num_top))
        if self._request.token_ids:
            choice["token_ids"] = output.token_ids
            if output.prompt_ids:
                choice["prompt_token_ids"] = rows(output.prompt_token_ids)
        if finish is not None:
            choice["matched_stop"] = finish.matched
            details = stage_details(output) | beam_scores(output)
            choice["baton"] = {"rid": output.prompt.rid, "index": output.sample, **details}
        return choice

    def _begin(self, first: Output) -> str:
        """Starts the choice; returns the text before the output's own: the echoed prompt, or none."""
        request, tokenizer = self._request, self._tokenizer
        echo = _prompt_text(self._prompt, first, tokenizer) if request.echo else None
        if request.logprobs is not None:
            skip = self._prompt.sampling.skip_special_tokens
            self._logprobs = LogprobsBuilder(
                tokenizer.token_bytes, echo, num_top=request.logprobs, skip_special_tokens=skip
            )
        return echo or ""


def _prompt_text(prompt: Prompt, first: Output, tokenizer: Tokenizer) -> str:
    """The prompt as it was sent, for ``echo``; of one that was truncated what is left. first: an output's first
    update."""
    if prompt.truncate_to is None:
        return prompt.text if prompt.text is not None else tokenizer.decode(prompt.input_ids or [], False)
    kept = tokenizer.decode(list(first.prompt_token_ids), False)
    # A whole prompt may have a token before it that its sender did not write.
    return prompt.text if prompt.text is not None and kept.endswith(prompt.text) else kept


class LogprobsBuilder:
    """Builds {tokens, token_logprobs, top_logprobs, text_offset} for one choice, as it grows.

    text_offset: where a token's text begins, in characters from the start of the choice's text, echoed prompt included.
    A token inside a character begins where the character does. Tokens of a stop string that was cut off lie past the
    end of the text.
    """

    def __init__(self, token_bytes: TokenBytes, echo: str | None, *, num_top: int, skip_special_tokens: bool) -> None:
        """``echo``: the prompt's text if the choice's text starts with it. num_top: alternatives of each token."""
        self._token_bytes = token_bytes
        self._echo = echo
        self._num_top = num_top
        self._decoder = IncrementalDecoder(token_bytes, skip_special_tokens=skip_special_tokens)
        self._position = len(echo or "")

    def add_output(self, output: Output, rows: Callable[[Iterable], Any] = list) -> dict | None:
        """The logprobs object for the new tokens of ``output``; None if it has no new logprobs. rows: what is made of
        the alternatives of all tokens; ``iter`` makes them as they are read."""
        echoed = Logprobs() if self._echo is None else output.input_logprobs
        prompt, new = list(echoed.without_top()), list(output.output_logprobs.without_top())
        if not prompt and not new:
            return None
        offsets = self._prompt_offsets([token.id for token in prompt]) if prompt else []
        for token in new:
            offsets.append(self._position)
            self._position += len(self._decoder.push_ids((token.id,)))
        return {
            "tokens": [token.text for token in prompt + new],
            "token_logprobs": [token.logprob for token in prompt + new],
            "top_logprobs": rows(map(self._alternatives, chain(echoed, output.output_logprobs))),
            "text_offset": offsets,
        }

    def _prompt_offsets(self, ids: list[int]) -> list[int]:
        """Offsets of the prompt's tokens. A bos token that the tokenizer put before the text takes no room in it."""
        added = len(decode_all(self._token_bytes, ids, skip_special_tokens=False)) - len(self._echo or "")
        decoder = IncrementalDecoder(self._token_bytes, skip_special_tokens=False)
        offsets, position = [], -max(0, added)
        for token_id in ids:
            offsets.append(max(0, position))
            position += len(decoder.push_ids((token_id,)))
        return offsets

    def _alternatives(self, token: TokenLogprob) -> dict[str | None, float | None] | None:
        """Text -> logprob, for the best tokens and the chosen one; of tokens with the same text the best counts. None
        for the first prompt token, which follows nothing."""
        if token.logprob is None:
            return None
        entries = sorted([*(token.top or ())[: self._num_top], token], key=_likelihood, reverse=True)
        found: dict[str | None, float | None] = {}
        for entry in entries:
            found.setdefault(entry.text, entry.logprob)
        return found


def _likelihood(token: TokenLogprob) -> float:
    return -math.inf if token.logprob is None else token.logprob


# -- as /openapi.json describes it -------------------------------------------------------------------------------------

_LOGPROBS = answered(
    {
        "tokens": list_of(nullable(string())),
        "token_logprobs": list_of(nullable(number())),
        "top_logprobs": list_of(nullable(open_object(values=nullable(number())))),
        "text_offset": list_of(whole("", 0)),
    },
    title="CompletionLogprobs",
)

_CHOICE = answered(
    {
        "index": whole("", 0),
        "text": string(),
        "logprobs": nullable(_LOGPROBS),
        "finish_reason": enum(*FINISH_REASONS, None),
    },
    title="CompletionChoice",
    optional={
        "matched_stop": MATCHED_STOP,
        "token_ids": IDS,
        "prompt_token_ids": IDS,
        "prompt_logprobs": PROMPT_LOGPROBS,
        "baton": answered(RID_AND_INDEX, title="CompletionDetails", optional={**STAGE_DETAILS, **BEAM_SCORES}),
    },
)

_HEAD: Properties = {
    "id": string("cmpl-, and the rid."),
    "object": enum("text_completion"),
    "created": whole("Unix time.", 0),
    "model": string(),
    "choices": list_of(_CHOICE),
}

ANSWER = answered({**_HEAD, "usage": USAGE}, title="Completion")
CHUNK = answered(_HEAD, title="CompletionChunk", optional={"usage": nullable(USAGE)})
