"""Collects what a log is to have of each open request: its ids, as they pass by."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec

from ...scheduler.request_spec import RequestSpec
from ..config import RecordingConfig
from ..messages import TokenOutput
from ..metrics import ServerMetrics
from ..prompt import Prompt
from .lines import RecordedRequest
from .request_log import RequestLog


@dataclass(slots=True)
class _Open:
    spec: RequestSpec
    time: float
    started: float
    prompt_ids: bytes
    """Empty until the worker tells, for a continuation."""
    outputs: dict[int, bytearray] = field(default_factory=dict)
    cached_tokens: int = 0
    finish: str = ""


class RequestRecorder:
    """Collects each request of a TokenizerManager until it ends, then logs it."""

    def __init__(self, log: RequestLog) -> None:
        self._log = log
        self._open: dict[str, _Open] = {}

    @staticmethod
    def asking(spec: RequestSpec) -> RequestSpec:
        """The spec to send in place of ``spec``: it asks for the whole prompt of a continuation, which only the worker
        has."""
        return spec if spec.continuation is None else msgspec.structs.replace(spec, returns_prompt=True)

    def opened(self, prompt: Prompt, spec: RequestSpec) -> None:
        """Start recording a request that was sent. The server's own probes, which belong to no call, are skipped."""
        if prompt.group:
            known = spec.input_ids if spec.continuation is None else b""
            self._open[spec.rid] = _Open(spec, time.time(), time.monotonic(), known)

    def record_output(self, output: TokenOutput) -> None:
        """Add new tokens, or the end, of an output."""
        request = self._open.get(output.rid)
        if request is None:
            return
        if output.prompt_ids:
            request.prompt_ids = output.prompt_ids
        request.outputs.setdefault(output.index, bytearray()).extend(output.new_ids)
        if output.finish is not None:
            request.finish = output.finish.type
            if output.index == 0:  # the other samples find what the first one has computed
                request.cached_tokens = output.found.total

    def ended(self, rid: str) -> None:
        """All outputs have ended: log the request. One aborted before its first token is skipped: its prompt may be
        unknown, as it may have waited for its parent."""
        request = self._open.pop(rid, None)
        if (
            request is None
            or not request.prompt_ids
            or (request.finish == "abort" and not any(request.outputs.values()))
        ):
            return
        spec = request.spec
        recorded = RecordedRequest(
            rid=rid,
            prompt_ids=request.prompt_ids,
            output_ids=tuple(bytes(ids) for _, ids in sorted(request.outputs.items()) if ids),
            time=request.time,
            seconds=time.monotonic() - request.started,
            finish=request.finish,
            cached_tokens=request.cached_tokens,
            namespace=spec.namespace,
            job_id=spec.job_id,
            parent_rid=spec.continuation.parent_rid if spec.continuation is not None else None,
            no_reuse_from=spec.no_reuse_from,
        )
        self._log.put(recorded)

    def forget_request(self, rid: str) -> None:
        """Drop a request that was refused or failed."""
        self._open.pop(rid, None)

    def close(self) -> None:
        """Write what is waiting to be written; what is still open is not recorded."""
        self._open.clear()
        self._log.close()


def open_recorder(config: RecordingConfig, metrics: ServerMetrics) -> RequestRecorder | None:
    """None where nothing is to be recorded. Raises RecordingError."""
    if not config.record_requests:
        return None

    def count(recorded: bool) -> None:
        (metrics.recorded_requests if recorded else metrics.unrecorded_requests).inc()

    return RequestRecorder(RequestLog(config, count))
