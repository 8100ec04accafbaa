"""Outputs in the shape of SGLang's ``/generate`` responses, so that its clients work unchanged:
{text, output_ids, meta_info}, with ``prompt_token_ids`` if asked for. Streamed events also carry an ``index`` if the
request is answered with a list."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from typing import Any

from ...runtime.answer import Answer, Output, TokenLogprob
from ...scheduler.request import FinishReason
from ..description.json_schema import (
    COUNT,
    IDS,
    TOKEN_ID,
    answered,
    either,
    enum,
    list_of,
    nullable,
    number,
    string,
    whole,
)
from ..fields.output_details import (
    BEAM_SCORES,
    CACHE_REPORT,
    CACHED_TOKENS,
    DRAFT_COUNTS,
    STAGE_DETAILS,
    beam_scores,
    cache_report,
    cached_tokens,
    draft_counts,
    stage_details,
)
from ..fields.prompts import PromptBatch


def whole_response(outputs: list[Output], batch: PromptBatch) -> dict | list[dict]:
    """The response to a request that does not stream, from all its outputs."""
    return [dressed(output) for output in outputs] if batch.is_list else dressed(outputs[0])


def lazy_response(outputs: list[Output], batch: PromptBatch) -> dict | Iterator[dict]:
    """The same with iterators in place of the lists that may be long."""
    parts = (dressed(output, iter) for output in outputs)
    return parts if batch.is_list else next(parts)


async def stream_events(answer: Answer, batch: PromptBatch, *, incremental: bool) -> AsyncGenerator[dict, None]:
    """The events of a streamed request. Each holds the whole output so far, or with ``incremental`` only what is new.
    Raises RequestRefused."""
    so_far: defaultdict[int, _OutputSoFar] = defaultdict(_OutputSoFar)
    async for output in answer.updates():
        event = dressed(output)
        if not incremental:
            so_far[output.position].complete_event(event)
        if batch.is_list:
            event["index"] = output.position
        yield event


def dressed(output: Output, rows: Callable[[Iterable], Any] = list) -> dict[str, Any]:
    """The dict for an output, or for the new part of one. rows: what is made of lists that may be long; ``iter``
    makes their elements as they are read."""
    prompt, finish = output.prompt, output.finish
    meta: dict[str, Any] = {
        "id": prompt.rid,
        "finish_reason": None,
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": output.completion_tokens,
        **cached_tokens(output.found),
    }
    if finish is not None:
        meta["finish_reason"] = _finish_reason(finish, output.completion_tokens)
        meta["e2e_latency"] = output.e2e_latency
        meta |= cache_report(output, default=True) | beam_scores(output) | draft_counts(output) | stage_details(output)
    if (logprobs := prompt.spec.logprobs) is not None:
        meta["input_token_logprobs"] = rows(map(_row, output.input_logprobs.without_top()))
        meta["output_token_logprobs"] = rows(map(_row, output.output_logprobs.without_top()))
        if logprobs.top_k:
            meta["input_top_logprobs"] = rows(map(_top_rows, output.input_logprobs))
            meta["output_top_logprobs"] = rows(map(_top_rows, output.output_logprobs))
        if logprobs.token_ids:
            meta["input_token_ids_logprobs"] = rows(map(_rows, output.input_logprobs.named()))
            meta["output_token_ids_logprobs"] = rows(map(_rows, output.output_logprobs.named()))
    answer = {"text": output.text, "output_ids": output.token_ids, "meta_info": meta}
    return answer | {"prompt_token_ids": rows(output.prompt_token_ids)} if output.prompt_ids else answer


class _OutputSoFar:
    """Accumulates the events of one output."""

    def __init__(self) -> None:
        self._text = ""
        self._ids: list[int] = []
        self._prompt_ids: list[int] | None = None
        self._logprobs: defaultdict[str, list] = defaultdict(list)

    def complete_event(self, event: dict[str, Any]) -> None:
        """Put everything that came before in front of what is new. The event gets its own copies of the lists."""
        self._text += event["text"]
        self._ids += event["output_ids"]
        event["text"], event["output_ids"] = self._text, self._ids.copy()
        self._prompt_ids = event.get("prompt_token_ids", self._prompt_ids)
        if self._prompt_ids is not None:
            event["prompt_token_ids"] = self._prompt_ids
        meta = event["meta_info"]
        if "output_token_logprobs" in meta:
            for name in _LOGPROBS:
                if name in meta:
                    so_far = self._logprobs[name]
                    so_far += meta[name]
                    meta[name] = so_far.copy()


_LOGPROBS = (
    "input_token_logprobs", "output_token_logprobs", "input_top_logprobs", "output_top_logprobs",
    "input_token_ids_logprobs", "output_token_ids_logprobs",
)  # fmt: skip


def _row(token: TokenLogprob) -> list:
    return [token.logprob, token.id, token.text]


def _top_rows(token: TokenLogprob) -> list[list] | None:
    return _rows(token.top)


def _rows(tokens: list[TokenLogprob] | None) -> list[list] | None:
    return None if tokens is None else list(map(_row, tokens))


def _finish_reason(finish: FinishReason, completion_tokens: int) -> dict[str, Any]:
    reason: dict[str, Any] = {"type": finish.type}
    if finish.type == "stop":
        reason["matched"] = finish.matched
    elif finish.type == "length":
        reason["length"] = completion_tokens
    else:
        reason["message"] = finish.message or "aborted"
    return reason


# -- as /openapi.json describes it -------------------------------------------------------------------------------------

_ROW = list_of({}, "[logprob or null, token id, text or null]", least=3, most=3)

_FINISH = either(
    answered({"type": enum("stop"), "matched": either(string(), TOKEN_ID, {"type": "null"})}),
    answered({"type": enum("length"), "length": COUNT}),
    answered({"type": enum("abort"), "message": string()}),
    {"type": "null"},
    about="null in the events before the last.",
)

_META_INFO = answered(
    {
        "id": string("The rid."),
        "finish_reason": _FINISH,
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        **CACHED_TOKENS,
    },
    title="MetaInfo",
    optional={
        "e2e_latency": number("Seconds, at the end.", 0),
        **CACHE_REPORT,
        **BEAM_SCORES,
        **DRAFT_COUNTS,
        **STAGE_DETAILS,
        "input_token_logprobs": list_of(_ROW),
        "output_token_logprobs": list_of(_ROW),
        "input_top_logprobs": list_of(nullable(list_of(_ROW))),
        "output_top_logprobs": list_of(nullable(list_of(_ROW))),
        "input_token_ids_logprobs": list_of(nullable(list_of(_ROW))),
        "output_token_ids_logprobs": list_of(nullable(list_of(_ROW))),
    },
)

OUTPUT = answered(
    {"text": string(), "output_ids": IDS, "meta_info": _META_INFO},
    title="GenerateOutput",
    optional={"index": whole("In streams of several outputs: which one.", 0), "prompt_token_ids": IDS},
)

ANSWER = either(OUTPUT, list_of(OUTPUT), about="A list for a batch, and for n over 1.")
