"""Says of each prompt token that a request computes why it was not found in the cache.

    prompt   |-- found: device, host, disk, remote --|-- missed, in spans of one reason each --|
             0                                      found                                   prompt_len

The report is made once, when the request is first admitted: it tells what the cache had at that moment. The history of
the cache (radix/history.py) knows what it had before, of all clients. A client is told of its own tokens only: what
another one has computed counts as never seen once it is gone, or where it does not fill a page. Otherwise the report
would tell which prompts others have sent, token by token.
"""

from __future__ import annotations

import logging

import numpy as np

from ..radix.cache import RadixCache
from ..radix.history import CacheHistory
from ..radix.past_node import Departure, PastNode, Pressure
from .outcome import ANOTHER_CLIENT, RUNNING_REQUESTS, CacheReport, MissedSpan, MissReason
from .request import Request

logger = logging.getLogger(__name__)

MAX_SPANS = 64
"""Spans of tokens that left the cache, in one report. Further ones are joined with the last of them."""


class CacheReporter:
    """Makes the reports. Changes nothing of the cache, and nothing that the history says of it."""

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
        return spans.take_spans()

    def _trace(self, request: Request, limit: int, spans: _Spans, now: float) -> None:
        """Add the spans from the first token that was not found to ``limit``."""
        kv = request.held_kv
        assert kv.node is not None
        ids = request.token_ids.view(0, limit)
        client = request.spec.client
        traced = self._history.trace_prompt(kv.node, request.namespace, ids, spans.end)
        live = sum(tokens for tokens, past in traced if past.live)  # they come first
        if live:
            usable = self._usable(request, ids, spans.end, live)
            useless = self._useless(request, ids, spans.end, usable)
            took_over = request.inheritance is not None and request.inheritance.took_over
            spans.add_tokens("not_looked_up" if took_over else "not_loaded", usable - useless)
            spans.add_tokens("no_state" if self._cache.windows is None else "no_window", useless)
            traced = _without(usable, traced)
        diverged = request.diverged_at
        end = spans.end
        for tokens, past in traced:
            end += tokens
            if past.client != client:
                continue
            spans.add_unknown(end - tokens, diverged)
            if past.live or past.departure is Departure.PAGE:
                spans.add_tokens("page", tokens)
            else:
                assert past.departure is not None
                ago, by = max(0.0, now - past.left_at), _named(past.pressure, client)
                spans.add_tokens(past.departure.value, tokens, ago, by)
        elsewhere = self._history.find_elsewhere(client, request.namespace, ids, spans.end)
        spans.add_tokens("namespace", elsewhere)
        spans.add_unknown(limit, diverged)

    def _usable(self, request: Request, ids: np.ndarray, start: int, tokens: int) -> int:
        """How many of so many tokens from ``start`` on, all of which the cache has, are in whole pages of the prompt.
        ids: int32 [n], the prompt up to the last that could be looked up."""
        page = self._cache.page_size
        if (start + tokens) // page == start // page:
            return 0
        return min(tokens, max(0, self._cache.find_prefix(request.namespace, ids)[1] - start))

    def _useless(self, request: Request, ids: np.ndarray, start: int, usable: int) -> int:
        """How many of the ``usable`` tokens from ``start`` on have no recurrent state behind them, or lie behind the
        last place before which the window is whole."""
        if self._cache.states is None and self._cache.windows is None:
            return 0
        reach = self._cache.match_len(request.namespace, ids) - start
        return usable - min(usable, max(0, reach))


def _without(count: int, traced: list[tuple[int, PastNode]]) -> list[tuple[int, PastNode]]:
    """What was traced, without its first tokens."""
    rest: list[tuple[int, PastNode]] = []
    for tokens, past in traced:
        left_out = min(count, tokens)
        count -= left_out
        if tokens > left_out:
            rest.append((tokens - left_out, past))
    return rest


def _named(pressure: Pressure | None, client: str) -> str | None:
    """The cause of an eviction as this client may see it."""
    if pressure is None:
        return None
    if pressure.rid is None:
        return RUNNING_REQUESTS
    return pressure.rid if pressure.client == client else ANOTHER_CLIENT


class _Spans:
    """Spans while they are collected; equal neighbours are joined."""

    __slots__ = ("_ago", "_by", "_reason", "_spans", "_start", "end")

    def __init__(self, start: int) -> None:
        self._start = self.end = start
        """Where the last span begins, which is not among the others yet, and where it ends."""
        self._reason: MissReason | None = None
        self._ago: float | None = None
        self._by: str | None = None
        self._spans: list[MissedSpan] = []

    def add_tokens(
        self, reason: MissReason, tokens: int, seconds_ago: float | None = None, by: str | None = None
    ) -> None:
        """Add so many tokens; none if that is not above 0."""
        if tokens <= 0:
            return
        is_same = reason == self._reason and by == self._by
        both_left = seconds_ago is not None and self._ago is not None
        if is_same or (both_left and len(self._spans) >= MAX_SPANS - 1):
            if seconds_ago is not None and self._ago is not None:
                self._ago = min(seconds_ago, self._ago)
            if not is_same:
                self._by = None
        else:
            self._end_span()
            self._reason, self._ago, self._by = reason, seconds_ago, by
        self.end += tokens

    def add_unknown(self, end: int, diverged: int | None) -> None:
        """Add the tokens up to ``end`` as such that the client never had. diverged: where the prompt left an earlier
        one, if it did."""
        if diverged is not None:
            self.add_tokens("unseen", min(end, diverged) - self.end)
        self.add_tokens("unseen" if diverged is None else "diverged", end - self.end)

    def take_spans(self) -> tuple[MissedSpan, ...]:
        self._end_span()
        return tuple(self._spans)

    def _end_span(self) -> None:
        if self._reason is not None:
            self._spans.append(MissedSpan(self._reason, self._start, self.end - self._start, self._ago, self._by))
        self._start, self._reason = self.end, None
