"""Outputs in the shape of SGLang's ``/generate`` responses, so that its clients work unchanged:
{text, output_ids, meta_info}. Streamed events also carry an ``index`` if the request is answered with a list."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from ...runtime.answer import Answer, Output, TokenLogprob
from ...scheduler.request import FinishReason
from ..fields.output_details import beam_scores, stage_details
from ..fields.prompts import PromptBatch


def whole_response(outputs: list[Output], batch: PromptBatch) -> dict | list[dict]:
    """The response to a request that does not stream, from all its outputs."""
    return list(dressed_in_turn(outputs)) if batch.is_list else dressed(outputs[0])


def dressed_in_turn(outputs: list[Output]) -> Iterator[dict]:
    """The objects of a list's outputs. Each output is dropped when its object is made: with logprobs both are large."""
    outputs.reverse()
    while outputs:
        yield dressed(outputs.pop())


async def stream_events(answer: Answer, batch: PromptBatch, *, incremental: bool) -> AsyncGenerator[dict, None]:
    """The events of a streamed request. Each holds the whole output so far, or with ``incremental`` only what is new.
    Raises RequestRefused."""
    so_far: defaultdict[int, _OutputSoFar] = defaultdict(_OutputSoFar)
    async for output in answer.updates():
        event = dressed(output)
        if not incremental:
            so_far[output.position].complete(event)
        if batch.is_list:
            event["index"] = output.position
        yield event


def dressed(output: Output) -> dict[str, Any]:
    """The dict for an output, or for the new part of one."""
    prompt, finish = output.prompt, output.finish
    meta: dict[str, Any] = {
        "id": prompt.rid,
        "finish_reason": None,
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": output.completion_tokens,
        "cached_tokens": output.cached_tokens,
    }
    if finish is not None:
        meta["finish_reason"] = _finish_reason(finish, output.completion_tokens)
        meta["e2e_latency"] = output.e2e_latency
        meta |= beam_scores(output) | stage_details(output)
    if (logprobs := prompt.spec.logprobs) is not None:
        meta["input_token_logprobs"] = _rows(output.input_logprobs)
        meta["output_token_logprobs"] = _rows(output.output_logprobs)
        if logprobs.top_k:
            meta["input_top_logprobs"] = _top_rows(output.input_logprobs)
            meta["output_top_logprobs"] = _top_rows(output.output_logprobs)
    return {"text": output.text, "output_ids": output.token_ids, "meta_info": meta}


class _OutputSoFar:
    """Accumulates the events of one output."""

    def __init__(self) -> None:
        self._text = ""
        self._ids: list[int] = []
        self._logprobs: defaultdict[str, list] = defaultdict(list)

    def complete(self, event: dict[str, Any]) -> None:
        """Put everything that came before in front of what is new. The event gets its own copies of the lists."""
        self._text += event["text"]
        self._ids += event["output_ids"]
        event["text"], event["output_ids"] = self._text, self._ids.copy()
        meta = event["meta_info"]
        if "output_token_logprobs" in meta:
            for name in _LOGPROBS:
                if name in meta:
                    so_far = self._logprobs[name]
                    so_far += meta[name]
                    meta[name] = so_far.copy()


_LOGPROBS = ("input_token_logprobs", "output_token_logprobs", "input_top_logprobs", "output_top_logprobs")


def _rows(tokens: list[TokenLogprob]) -> list[list]:
    """[logprob, token id, text or None] for each token."""
    return [[token.logprob, token.id, token.text] for token in tokens]


def _top_rows(tokens: list[TokenLogprob]) -> list[list[list] | None]:
    return [None if token.top is None else _rows(token.top) for token in tokens]


def _finish_reason(finish: FinishReason, completion_tokens: int) -> dict[str, Any]:
    reason: dict[str, Any] = {"type": finish.type}
    if finish.type == "stop":
        reason["matched"] = finish.matched
    elif finish.type == "length":
        reason["length"] = completion_tokens
    else:
        reason["message"] = finish.message or "aborted"
    return reason
