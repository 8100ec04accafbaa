"""The lines of ``--log-requests``: one when a request arrives and one when it ends, each a name and a JSON object.

    level 0    lengths, whether it has a namespace, job, adapter, finish reason, times
    level 1    sampling parameters, too
    level 2    the first 2,048 characters of prompt and output, too: the log contains user text
    level 3    the whole prompt and output

The levels are SGLang's. JSON escapes line breaks and control characters, so that no text can forge a line.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..scheduler.request_spec import RequestSpec
from .messages import RequestError, TextOutput
from .prompt import Prompt

logger = logging.getLogger(__name__)

TEXT_LEVEL, WHOLE_LEVEL = 2, 3
SHOWN_CHARS = 2048


@dataclass(slots=True)
class _Open:
    started: float
    texts: dict[int, list[str]] = field(default_factory=dict)
    """Pieces of the output by sample; empty below level 2."""
    num_chars: dict[int, int] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float | None = None


class RequestLog:
    """Logs the requests of a TokenizerManager."""

    def __init__(self, level: int) -> None:
        self._level = level
        self._open: dict[str, _Open] = {}

    def open_request(self, prompt: Prompt, spec: RequestSpec) -> None:
        """Log a request that was sent. The server's own probes, which belong to no call, are skipped."""
        if not prompt.group:
            return
        self._open[spec.rid] = _Open(time.monotonic())
        shown: dict[str, Any] = {"tokens": len(spec.token_ids), "stream": spec.stream, "salted": bool(spec.namespace)}
        optional = {
            "client": spec.client if "/" in spec.rid else "",
            "adapter": spec.adapter,
            "job_id": spec.job_id,
            "continuation_of": spec.continuation.parent_rid if spec.continuation is not None else None,
            "priority": spec.priority,
        }
        shown |= {name: value for name, value in optional.items() if value}
        if self._level >= 1:
            shown["sampling_params"] = msgspec.to_builtins(spec.sampling)
        if self._level >= TEXT_LEVEL:
            text = prompt.text if prompt.continuation is None else prompt.continuation.suffix_text
            if text is not None:
                shown["text"] = self._cut(text)
            else:
                shown["input_ids"] = spec.token_ids[: None if self._level >= WHOLE_LEVEL else SHOWN_CHARS].tolist()
        self._log("arrived", spec.rid, shown)

    def record_output(self, update: TextOutput) -> None:
        """Note new text, or the end, of an output."""
        output = update.output
        request = self._open.get(output.rid)
        if request is None:
            return
        if request.first_token_s is None and (output.new_ids or output.finish is not None):
            request.first_token_s = time.monotonic() - request.started
        if self._level >= TEXT_LEVEL:
            length = request.num_chars.get(output.index, 0)
            if self._level >= WHOLE_LEVEL or length < SHOWN_CHARS:
                request.texts.setdefault(output.index, []).append(update.text)
                request.num_chars[output.index] = length + len(update.text)
        if output.finish is not None:
            request.finish[output.index] = output.finish.type
            request.prompt_tokens = output.prompt_tokens
            request.completion_tokens += output.completion_tokens
            if output.index == 0:
                request.cached_tokens = output.found.total

    def end_request(self, rid: str) -> None:
        """Log a request with all its outputs ended."""
        request = self._open.pop(rid, None)
        if request is None:
            return
        ends = [request.finish[index] for index in sorted(request.finish)]
        shown: dict[str, Any] = {
            "finish": ends[0] if len(set(ends)) == 1 else ends,
            "prompt_tokens": request.prompt_tokens,
            "cached_tokens": request.cached_tokens,
            "completion_tokens": request.completion_tokens,
            "first_token_s": None if request.first_token_s is None else round(request.first_token_s, 3),
            "seconds": round(time.monotonic() - request.started, 3),
        }
        if self._level >= TEXT_LEVEL:
            shown["text"] = [self._cut("".join(request.texts[index])) for index in sorted(request.texts)]
        self._log("ended", rid, shown)

    def fail_request(self, error: RequestError) -> None:
        """Log a request that was refused or failed."""
        if self._open.pop(error.rid, None) is not None:
            shown = {"code": error.code}
            self._log("failed", error.rid, shown | ({"message": error.message} if self._level >= 1 else {}))

    def _cut(self, text: str) -> str:
        return text if self._level >= WHOLE_LEVEL or len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS]

    def _log(self, event: str, rid: str, shown: dict[str, Any]) -> None:
        line = msgspec.json.encode({"rid": rid} | shown).decode()
        logger.info("request %s: %s", event, line)
