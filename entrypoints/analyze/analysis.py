"""One pass over the requests of a log, in bounded memory: collects everything that a report needs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from heapq import heappop, heappush

from .log.logged_request import LoggedRequest, Units
from .reuse.curve import Curve, sizes
from .reuse.forgotten import Forgotten
from .reuse.histogram import Histogram
from .reuse.reuse_tree import Access, ReuseTree
from .reuse.sharing import Sharing
from .reuse.state_pools import StatePools
from .reuse.tree_node import Node
from .reuse.turns import Turns
from .reuse.working_set import WorkingSet

WINDOWS_S = (60.0, 600.0, 3600.0)
WINDOWS_REQUESTS = (100.0, 1000.0, 10_000.0)

_CHUNK_TOKENS = 64
"""Chunk of the filter of forgotten prefixes."""

MAX_RUNNING = 100_000
"""Limit of requests that count as running at once; more mean that the log's times are wrong."""


MAX_REASONS = 64


@dataclass(slots=True)
class Totals:
    """Totals over the log, in tokens unless they count requests. recorded_hits: prompt tokens that the server found,
    where the log tells."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    longest: int = 0
    """Prompt and output of one request."""
    endless_hits: int = 0
    """Prompt tokens that an infinite cache has."""
    hinted: int = 0
    """Requests with ``no_reuse_from``."""
    recorded: int = 0
    """Prompt tokens of the requests for which the log tells how many were cached."""
    recorded_hits: int = 0
    missed_tokens: dict[str, int] = field(default_factory=dict)
    """Reason -> prompt tokens that the recording server did not find, where the log tells; of unknown reasons, the
    first `MAX_REASONS`."""
    missed_requests: dict[str, int] = field(default_factory=dict)
    """Reason -> requests with such tokens."""

    def add_misses(self, missed: dict[str, int]) -> None:
        for reason, tokens in missed.items():
            if reason in self.missed_tokens or len(self.missed_tokens) < MAX_REASONS:
                self.missed_tokens[reason] = self.missed_tokens.get(reason, 0) + tokens
                self.missed_requests[reason] = self.missed_requests.get(reason, 0) + 1


class RunningPeak:
    """The peak of concurrent requests, from the times of a log. Requests come roughly in order of arrival."""

    def __init__(self) -> None:
        self.peak_requests = 0
        self.peak_tokens = 0
        """Tokens of prompts and outputs; shared ones count for each request."""
        self._ends: list[tuple[float, int]] = []
        self._tokens = 0

    def add_request(self, arrived: float, seconds: float, tokens: int) -> None:
        ends = self._ends
        while ends and (ends[0][0] <= arrived or len(ends) >= MAX_RUNNING):
            self._tokens -= heappop(ends)[1]
        heappush(ends, (arrived + seconds, tokens))
        self._tokens += tokens
        self.peak_requests = max(self.peak_requests, len(ends))
        self.peak_tokens = max(self.peak_tokens, self._tokens)


class Analysis:
    """Takes the requests in the log's order: each is looked up, and then inserted as a whole, before the next."""

    def __init__(
        self,
        units: Units,
        *,
        max_bytes: int,
        has_times: bool,
        grid: list[int] | None = None,
        has_states: bool = False,
    ) -> None:
        """max_bytes: memory of the tree; 0 for no limit. grid: sizes in units for the curves, instead of `sizes`.
        has_states: the model has recurrent states."""
        self.units = units
        self.has_times = has_times
        self.totals = Totals()
        self.tree = ReuseTree(units.num_bytes, max_bytes)
        grid = grid or sizes()
        self.curve = Curve(grid)
        self.turns = Turns(Curve(grid))
        self.states = StatePools(self.tree) if has_states else None
        self.sharing = Sharing()
        self.running = RunningPeak()
        self.working_set = WorkingSet(self.tree, WINDOWS_S if has_times else WINDOWS_REQUESTS)
        self.forgotten: Forgotten | None = None
        self.lengths = Histogram()
        self.span = 0.0
        """Seconds from the first request to the last; 0 for a log without times."""
        self._began: float | None = None
        self._points_at = 0.0

    @property
    def exact_tokens(self) -> int | None:
        """Sizes up to this number of tokens are exact; None for all."""
        exact = self.tree.exact_units
        return None if exact is None else exact * self.units.tokens

    def add_request(self, request: LoggedRequest) -> None:
        totals = self.totals
        totals.requests += 1
        totals.prompt_tokens += request.prompt_tokens
        totals.output_tokens += request.output_tokens
        longest = request.prompt_tokens + request.output_tokens // max(1, len(request.outputs))
        totals.longest = max(totals.longest, longest)
        totals.hinted += request.hinted
        self.turns.named += request.continues
        self.lengths.add_value(request.prompt_tokens)
        if request.cached_tokens is not None:
            totals.recorded += request.prompt_tokens
            totals.recorded_hits += request.cached_tokens
        totals.add_misses(request.missed)
        at = self._moment(request)
        self.working_set.before_access(at)
        found = self._use(request)
        totals.endless_hits += found
        self.sharing.add_request(request.prompt_tokens, found)
        self.working_set.after_access(at, totals.prompt_tokens, totals.endless_hits)
        self._forget()

    def end_log(self) -> None:
        """Take the last point of the working set; call it after the last request."""
        if self.totals.requests:
            totals = self.totals
            self.working_set.after_access(self._points_at, totals.prompt_tokens, totals.endless_hits, last=True)

    def _moment(self, request: LoggedRequest) -> float:
        """The position on the working set's axis: seconds since the log began, never decreasing, or the number of
        requests so far."""
        if not self.has_times:
            self._points_at = float(self.totals.requests)
        elif request.time is not None and math.isfinite(request.time):
            if self._began is None:
                self._began = request.time
            self._points_at = max(self._points_at, request.time - self._began)
            self.span = self._points_at
            if math.isfinite(request.seconds):
                self.running.add_request(request.time, request.seconds, request.prompt_tokens + request.output_tokens)
        return self._points_at

    def _use(self, request: LoggedRequest) -> int:
        """Look up a request's prompt and insert it, with its outputs, into the tree. Returns the prompt tokens that an
        infinite cache has."""
        per_unit = self.units.tokens
        limit = (request.prompt_tokens - 1) // per_unit  # at least the last token is computed
        first, *others = self._sequences(request)
        ended = None if request.time is None else request.time + request.seconds
        found = inherited = 0
        access: Access | None = None
        ends: list[Node] = []
        if first:
            access = self.tree.access(request.namespace, first)
            found, inherited = self._count(request, access, first, limit)
            self.turns.note_end(access.last, request.prompt_tokens + self._output_tokens(request, 0), ended)
            ends.append(access.last)
        for number, key in enumerate(others, 1):
            if key:
                last = self.tree.access(request.namespace, key, counts=False).last
                self.turns.note_end(last, request.prompt_tokens + self._output_tokens(request, number), ended)
                ends.append(last)
        if self.states is not None and access is not None:
            self.states.add_request(
                access,
                limit,
                inherited=inherited,
                points=[point // per_unit for point in request.state_points],
                continues=request.continues,
                ends=ends,
                turns_kept=request.retain_states,
                is_aborted=request.is_aborted,
            )
        return found * per_unit

    def _count(self, request: LoggedRequest, access: Access, key: bytes, limit: int) -> tuple[int, int]:
        """(prompt's units that an infinite cache has, units of the request that it continues)"""
        left = limit
        for above, units in access.runs:
            self.curve.add_run(above, min(units, left))
            left -= min(units, left)
        inherited = self.turns.note_arrival(access, limit, request.prompt_tokens, self.units.num_bytes, request.time)
        found = min(access.known, limit)
        if self.forgotten is not None and access.known < limit:
            found += self.forgotten.count_known(request.namespace, key, access.known, limit)
        return found, inherited

    def _sequences(self, request: LoggedRequest) -> list[bytes]:
        """The whole units of prompt and output that have KV at the end, for each output. The last token of an output
        has none."""
        width, per_unit = self.units.num_bytes, self.units.tokens
        if not request.has_outputs:
            return [request.prompt[: request.prompt_tokens // per_unit * width]]
        found = []
        for number, output in enumerate(request.outputs):
            committed = (request.prompt_tokens + self._output_tokens(request, number) - 1) // per_unit * width
            found.append((request.prompt + output)[:committed])
        return [key[: len(key) // width * width] for key in found]

    def _output_tokens(self, request: LoggedRequest, number: int) -> int:
        """Tokens of one output. Hashes cover only whole blocks, so several outputs count as equally long."""
        if len(request.outputs) < 2:
            return request.output_tokens if request.has_outputs else 0
        total = sum(map(len, request.outputs))
        if not total:
            return request.output_tokens // len(request.outputs)
        return round(request.output_tokens * len(request.outputs[number]) / total)

    def _forget(self) -> None:
        for namespace, key, start in self.tree.forget_oldest():
            if self.forgotten is None:
                self.forgotten = Forgotten(self.units.num_bytes, max(1, _CHUNK_TOKENS // self.units.tokens))
            self.forgotten.add_path(namespace, key, start)
