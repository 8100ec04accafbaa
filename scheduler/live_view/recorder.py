"""Records the lives of requests while a watcher is connected.

    record_arrivals ──▶ record_turn: ended chunks │ changed statuses │ chunks that begin │ ended leases
                             └──▶ take_lives: the lives that have changed

Called once a turn, after the step was formed. It reads requests and batches, and changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from ...radix.lease import Lease
from ..batch import ScheduleBatch
from ..request import Request, RequestStatus
from ..scheduler import Scheduler
from .reports import MAX_MISSES, MAX_PHASES, Life, Phase, PhaseKind
from .snapshots import num_output

MAX_LIVES = 200
"""Live requests followed at the same time; of leases on ended ones, as many again."""

MAX_REFUSED = 50
"""Refused requests in one report; beyond that, the oldest are dropped."""

_COMPUTING = (RequestStatus.PREFILLING, RequestStatus.RUNNING)


class _Phase:
    __slots__ = ("begin", "end", "kind", "tokens")

    def __init__(self, kind: PhaseKind, begin: float, tokens: int, end: float | None = None) -> None:
        self.kind: PhaseKind = kind
        self.begin, self.end, self.tokens = begin, end, tokens


class _Recorded:
    """A life that is being recorded."""

    def __init__(self, request: Request, began: float) -> None:
        self.life = Life(request.rid, request.index, request.arrival - began, request.prompt_len, 0, 0, [])
        self.life.job_id = request.job_id
        self.key = request.key
        self.request = request
        self.status = request.status
        self.phases: list[_Phase] = []
        self.chunks: deque[tuple[int, _Phase]] = deque()
        """Chunks with a step in flight, each after the step's id."""
        self.is_admitted = False
        self.is_decoding = False
        """The last chunk of its prompt is in a step, or has been."""
        self.decoded = 0
        """Output tokens at the time it last began to decode."""

    def begin_phase(self, kind: PhaseKind, at: float, tokens: int) -> _Phase:
        """Begin a phase. This ends the others, except chunks, which end with their step."""
        for phase in self.phases:
            if phase.end is None and not (kind == phase.kind == "prefill"):
                phase.end = at
        phase = _Phase(kind, at, tokens)
        self.phases.append(phase)
        if len(self.phases) > MAX_PHASES:
            self._shorten()
        return phase

    def _shorten(self) -> None:
        for place, (one, next_) in enumerate(zip(self.phases, self.phases[1:])):
            if one.kind == next_.kind and next_.end is not None:
                self.phases[place : place + 2] = [_Phase(one.kind, one.begin, one.tokens + next_.tokens, next_.end)]
                return
        del self.phases[1]

    def end_open(self, at: float) -> None:
        for phase in self.phases:
            if phase.end is None:
                phase.end = at
        self.chunks.clear()


class LifeRecorder:
    """Records the lives of one scheduler's requests. began: the scheduler's time from which lives count."""

    def __init__(self, scheduler: Scheduler, began: float) -> None:
        self._scheduler = scheduler
        self._began = began
        self._open: dict[int, _Recorded] = {}
        """By the request's serial."""
        self._leased: dict[Lease, tuple[_Recorded, _Phase]] = {}
        self._by_key: dict[tuple[str, int], _Recorded] = {}
        """The lives in the two tables above, by rid and index."""
        self._changed: dict[tuple[str, int], _Recorded] = {}
        """Lives that have changed since the last take, the latest change last."""
        self._refused: deque[Life] = deque(maxlen=MAX_REFUSED)
        """Requests that never began, since the last take."""
        self._failed: set[str] = set()
        """Rids that end with an error in this turn."""
        self._missed = False
        """Some requests are not followed, because there were too many."""
        self._lease_ends = -1
        self._is_stirred = True
        """Something has happened in this turn that changes statuses."""
        self._last_rows = -1
        """Number of rows in the last step if that was a decode, else -1."""
        self._num_loading = 0

    # -- events from the loop -----------------------------------------------------------------------------------------

    def follow_live_requests(self, now: float) -> None:
        """Follow the requests that are live already, from now on."""
        self._adopt(now)

    def record_arrivals(self, requests: Iterable[Request], now: float) -> None:
        for request in requests:
            if len(self._open) >= MAX_LIVES:
                self._missed = True
                return
            kind = "loading" if request.status is RequestStatus.LOADING else "queued"
            self._follow(request).begin_phase(kind, now - self._began, request.prompt_len)

    def record_refusal(self, rid: str, now: float) -> None:
        """Record that a rid has ended with an error, or never began."""
        if any(recorded.life.rid == rid for recorded in self._open.values()):
            self._failed.add(rid)
            return
        at = now - self._began
        self._refused.append(Life(rid, 0, at, 0, 0, 0, [("queued", at, at, 0)], end="error"))

    def record_turn(self, ended: Sequence[ScheduleBatch], launched: ScheduleBatch | None, now: float) -> bool:
        """Record a turn. ended: the steps that have been committed, or have failed. True if there is something to
        take."""
        at = now - self._began
        for batch in ended:
            self._end_chunks(batch, at)
        moved = self._moved() if self._may_have_moved(launched) else []
        gone = [recorded for recorded in moved if self._has_ended(recorded, at)]
        if moved:
            self._num_loading = sum(each.status is RequestStatus.LOADING for each in self._open.values())
        for recorded in gone:
            self._end(recorded, at)
        if launched is not None and launched.is_extend:
            self._begin_chunks(launched, at)
        self._end_leases(at)
        for recorded in gone:
            self._forget(recorded)
        self._failed.clear()
        return bool(self._changed or self._refused)

    def note_end(self) -> None:
        """Note that a request has ended in this turn."""
        self._is_stirred = True

    def _may_have_moved(self, launched: ScheduleBatch | None) -> bool:
        """False after most decode steps, which saves a scan of all requests: an arrival, an end or a retraction would
        have stirred the recorder or changed the number of rows."""
        rows = -1 if launched is None or launched.is_extend else len(launched)
        is_like_the_last, self._last_rows = rows == self._last_rows and rows >= 0, rows
        is_stirred, self._is_stirred = self._is_stirred, False
        return is_stirred or not is_like_the_last or self._num_loading > 0

    def _moved(self) -> list[_Recorded]:
        return [recorded for recorded in self._open.values() if recorded.request.status is not recorded.status]

    # -- requests -----------------------------------------------------------------------------------------------------

    def _follow(self, request: Request) -> _Recorded:
        recorded = _Recorded(request, self._began)
        self._open[request.serial] = self._by_key[recorded.key] = recorded
        self._change(recorded)
        self._is_stirred = True
        self._num_loading += request.status is RequestStatus.LOADING
        return recorded

    def _adopt(self, now: float) -> None:
        self._missed = False
        for request in self._scheduler.live_requests:
            if request.serial in self._open or request.is_preparation:
                continue
            if len(self._open) >= MAX_LIVES:
                self._missed = True
                return
            recorded = self._follow(request)
            if request.status in _COMPUTING:
                self._admit(recorded)
                recorded.is_decoding = request.status is RequestStatus.RUNNING
                recorded.decoded = num_output(request)
                if recorded.is_decoding:
                    recorded.begin_phase("decode", now - self._began, 0)
            else:
                waits = request.status is RequestStatus.WAITING and not request.retractions
                kind = "loading" if request.status is RequestStatus.LOADING else "queued"
                recorded.begin_phase(kind, recorded.life.arrival if waits else now - self._began, request.prompt_len)

    def _has_ended(self, recorded: _Recorded, at: float) -> bool:
        """Record the new status of a request; True if the request has ended."""
        request = recorded.request
        was, status = recorded.status, request.status
        recorded.status = status
        if status is RequestStatus.FINISHED:
            return True
        if status is RequestStatus.LOADING:
            recorded.begin_phase("loading", at, request.prompt_len)
        elif was is RequestStatus.PARKED:
            recorded.phases[-1].tokens = request.prompt_len  # its parent's tokens are known now
        elif status is RequestStatus.WAITING:
            retracted = was in _COMPUTING
            self._count_decoded(recorded)
            recorded.chunks.clear()
            recorded.begin_phase("retracted" if retracted else "queued", at, request.prompt_len + num_output(request))
            recorded.is_decoding = False
        self._change(recorded)
        return False

    def _admit(self, recorded: _Recorded) -> None:
        """Record what a request begins with, which is known once it is first computed."""
        request = recorded.request
        recorded.is_admitted = True
        life, inheritance = recorded.life, request.inheritance
        life.prompt, life.cached = request.prompt_len, request.found.total
        if (report := request.cache_report) is not None:
            spans = report.missed[:MAX_MISSES]
            life.missed = [(span.reason, span.start, span.tokens, span.seconds_ago, span.by) for span in spans]
        if inheritance is None:
            return
        life.path = "match" if inheritance.path == "tier" else inheritance.path
        if inheritance.parent is not None:
            life.parent = inheritance.parent[0]
            parent = self._parent(inheritance.parent)
            if parent is not None and inheritance.path == "handoff" and inheritance.copied is None:
                parent.life.child = request.rid
                self._change(parent)

    def _parent(self, name: tuple[str, int]) -> _Recorded | None:
        """The recorded life of a parent; all results of a search share one life."""
        if (recorded := self._by_key.get(name)) is None:
            first = self._by_key.get((name[0], 0))
            recorded = first if first is not None and first.request.is_search else None
        return recorded

    def _begin_chunks(self, batch: ScheduleBatch, at: float) -> None:
        for serial, tokens in zip(batch.serials.tolist(), batch.extend_lens.tolist()):
            recorded = self._open.get(serial)
            if recorded is None or recorded.is_decoding:
                continue
            request = recorded.request
            if not recorded.is_admitted:
                self._admit(recorded)
            recorded.chunks.append((batch.step_id, recorded.begin_phase("prefill", at, tokens)))
            recorded.status = request.status
            recorded.is_decoding = request.status is RequestStatus.RUNNING
            self._change(recorded)

    def _end_chunks(self, batch: ScheduleBatch, at: float) -> None:
        if not batch.is_extend:
            return
        for serial in batch.serials.tolist():
            recorded = self._open.get(serial)
            if recorded is None or not recorded.chunks or recorded.chunks[0][0] != batch.step_id:
                continue
            recorded.chunks.popleft()[1].end = at
            if recorded.chunks:
                recorded.chunks[0][1].begin = at  # steps are computed one after the other
            elif recorded.is_decoding and recorded.request.status is RequestStatus.RUNNING:
                recorded.begin_phase("decode", at, 0)
                recorded.decoded = max(0, num_output(recorded.request) - 1)  # the chunk's own token counts
            self._change(recorded)

    def _count_decoded(self, recorded: _Recorded) -> None:
        output = num_output(recorded.request)
        if output != recorded.life.output:
            recorded.life.output = output
            self._change(recorded)
        last = recorded.phases[-1] if recorded.phases else None
        if last is not None and last.kind == "decode" and last.end is None:
            last.tokens = output - recorded.decoded

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _end(self, recorded: _Recorded, at: float) -> None:
        request, life = recorded.request, recorded.life
        assert request.finish is not None
        self._count_decoded(recorded)
        recorded.end_open(at)
        life.prompt = request.prompt_len
        life.end = "error" if request.rid in self._failed else request.finish.type
        for index, lease in self._scheduler.leases_of(request.rid).items():
            if (request.is_search or index == request.index) and lease not in self._leased:
                phase = _Phase("leased", at, lease.tokens)
                recorded.phases.append(phase)
                self._leased[lease] = recorded, phase
        while len(self._leased) > MAX_LIVES:
            oldest = next(iter(self._leased))
            self._let_go(oldest)
        del self._open[request.serial]
        self._change(recorded)

    def _end_leases(self, at: float) -> None:
        counts = self._scheduler.lease_counts
        ends = counts.handed_off + counts.expired + counts.broken + counts.released
        if ends == self._lease_ends:
            return
        self._lease_ends = ends
        for lease in [lease for lease in self._leased if not lease.is_live]:
            recorded, phase = self._leased[lease]
            phase.end = at
            self._change(recorded)
            self._let_go(lease)

    def _let_go(self, lease: Lease) -> None:
        recorded, _ = self._leased.pop(lease)
        self._forget(recorded)

    def _forget(self, recorded: _Recorded) -> None:
        """Drop a life from the index by key, if no lease of it is left."""
        is_leased = any(other is recorded for other, _ in self._leased.values())
        if self._by_key.get(recorded.key) is recorded and not is_leased:
            del self._by_key[recorded.key]

    # -- reports to the watcher ---------------------------------------------------------------------------------------

    def _change(self, recorded: _Recorded) -> None:
        later = self._by_key.get(recorded.key)
        if later is not None and later is not recorded:
            return  # another request has taken its rid
        self._changed.pop(recorded.key, None)
        self._changed[recorded.key] = recorded
        if len(self._changed) > 2 * MAX_LIVES:
            del self._changed[next(iter(self._changed))]

    def refresh(self, now: float) -> None:
        """Prepare for `take_lives`: count what has been decoded, and follow the requests for which there was no
        room."""
        for recorded in self._open.values():
            if recorded.is_decoding:
                self._count_decoded(recorded)
        if self._missed and len(self._open) < MAX_LIVES:
            self._adopt(now)

    def take_lives(self, most: int) -> list[Life]:
        """Lives that have changed, at most ``most``; [] once all have been taken."""
        taken: list[Life] = []
        while self._refused and len(taken) < most:
            taken.append(self._refused.popleft())
        while self._changed and len(taken) < most:
            recorded = self._changed.pop(next(iter(self._changed)))
            phases: list[Phase] = [(p.kind, p.begin, p.end, p.tokens) for p in recorded.phases]
            taken.append(msgspec.structs.replace(recorded.life, phases=phases))
        return taken
