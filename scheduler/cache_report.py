"""Says of each prompt token that a request computes why it was not found in the cache.

    prompt   |-- found: device, host, disk, remote --|-- missed, in spans of one reason each --|
             0                                      found                                   prompt_len

The report is made once, when the request is first admitted: it tells what the cache had at that moment. The history of
the cache (radix/history.py) knows what it had before.
"""

from __future__ import annotations

import logging

from ..radix.cache import RadixCache
from ..radix.history import CacheHistory
from ..radix.past_node import Departure, Pressure
from .outcome import ANOTHER_CLIENT, RUNNING_REQUESTS, CacheReport, MissedSpan, MissReason
from .request import Request

logger = logging.getLogger(__name__)

MAX_SPANS = 64
"""Spans of tokens that left the cache, in one report. Further ones are joined with the last of them."""


class CacheReporter:
    """Makes the reports. Reads cache and history, and changes neither."""

    def __init__(self, cache: RadixCache, history: CacheHistory) -> None:
        self._cache = cache
        self._history = history

    def report_request(self, request: Request, now: float) -> None:
        """Set the report of a request that was just opened, unless it was admitted before. A fault is logged, and does
        not affect the request."""
        if request.queried:
            return
        try:
            request.cache_report = CacheReport(self._missed(request, now), request.diverged_at)
        except Exception:
            request.cache_report = None
            logger.exception("the cache report of a request could not be made; the request is not affected")

    def _missed(self, request: Request, now: float) -> tuple[MissedSpan, ...]:
        found, end = request.found.total, request.prompt_len
        limit = max(found, min(request.prefix_limit, end))
        spans = _Spans(found)
        if self._cache.disabled:
            spans.add_tokens("disabled", limit - found)
        else:
            self._trace(request, limit, spans, now)
        spans.add_tokens("required", end - limit)
        return tuple(spans.spans)

    def _trace(self, request: Request, limit: int, spans: _Spans, now: float) -> None:
        """Add the spans from the first token that was not found to ``limit``."""
        kv = request.held_kv
        assert kv.node is not None
        ids = request.token_ids.view(0, limit)
        client, looked_up = request.spec.client, -1
        for past in self._history.trace_prompt(kv.node, request.namespace, ids, spans.end):
            if past.departure is None:  # the cache has it
                if looked_up < 0:
                    looked_up = self._cache.find_prefix(request.namespace, ids)[1]
                took_over = request.inheritance is not None and request.inheritance.took_over
                usable = min(past.tokens, max(0, looked_up - spans.end))
                spans.add_tokens("not_looked_up" if took_over else "not_loaded", usable)
                spans.add_tokens("page", past.tokens - usable)
            elif past.departure is Departure.PAGE:
                spans.add_tokens("page", past.tokens)
            else:
                ago, by = max(0.0, now - past.left_at), _named(past.pressure, client)
                spans.add_tokens(past.departure.value, past.tokens, ago, by)
        elsewhere = self._history.find_elsewhere(client, request.namespace, ids, spans.end)
        spans.add_tokens("namespace", elsewhere)
        diverged = request.diverged_at
        if diverged is not None:
            spans.add_tokens("unseen", min(limit, diverged) - spans.end)
        spans.add_tokens("unseen" if diverged is None else "diverged", limit - spans.end)


def _named(pressure: Pressure | None, client: str) -> str | None:
    """The cause of an eviction as this client may see it."""
    if pressure is None:
        return None
    if pressure.rid is None:
        return RUNNING_REQUESTS
    return pressure.rid if pressure.client == client else ANOTHER_CLIENT


class _Spans:
    """Spans while they are collected; equal neighbours are joined."""

    def __init__(self, start: int) -> None:
        self.end = start
        self.spans: list[MissedSpan] = []

    def add_tokens(
        self, reason: MissReason, tokens: int, seconds_ago: float | None = None, by: str | None = None
    ) -> None:
        """Add so many tokens; none if that is not above 0."""
        if tokens <= 0:
            return
        last = self.spans[-1] if self.spans else None
        is_same = last is not None and (last.reason, last.by) == (reason, by)
        both_left = last is not None and last.seconds_ago is not None and seconds_ago is not None
        if last is not None and (is_same or (both_left and len(self.spans) >= MAX_SPANS)):
            if last.seconds_ago is not None and seconds_ago is not None:
                seconds_ago = min(seconds_ago, last.seconds_ago)
            by = by if is_same else None
            self.spans[-1] = MissedSpan(last.reason, last.start, last.tokens + tokens, seconds_ago, by)
        else:
            self.spans.append(MissedSpan(reason, self.end, tokens, seconds_ago, by))
        self.end += tokens
