"""Keeps the KV of a job's finished step until the job's next step, and no longer: a pin.

    request arrives ──▶ it names its job, or its ids extend a finished turn of one; otherwise it may begin a job
                        the time since the job's last step is how long its tool took; the request may use its lease
    request ends    ──▶ pinned: leased for a moment (the policy's `ttl` without calls), until its text has been parsed
    calls are known ──▶ the policy's `ttl` for this tool extends the lease or lets it go; without a call it is given up
                        where nearly no such conversation continues (jobs/returns.py)
    last step, or `end_job` ──▶ all leases of the job are given up
    a child of the job computes ──▶ its leases do not expire (jobs/family.py)

A pin is a lease like any other (radix/lease.py): it counts in the budgets, and breaks where memory is needed more.
Pinning KV for the time of a tool call, and ordering steps by their job's arrival, are ideas from Continuum, a fork of
vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from typing import Any

from ..radix.discarding import retire
from ..radix.lease import Lease, LeaseState, LeaseTable, LeaseTerms
from .continuation.records import SampleRecord
from .jobs.calls import ToolCall
from .jobs.family import adopt_child, ancestors, hold_for_children, note_activity
from .jobs.finished_turns import FinishedTurn, FinishedTurns
from .jobs.job import FinishedStep, Job, describe_job
from .jobs.job_table import JobTable
from .jobs.kept_turn import KeptTurn, Worth
from .jobs.returns import FIRST_TURNS, Returns, TurnKind
from .policies.job_policies import MAX_PIN_S
from .policies.policy import PolicyTools, SchedulePolicy
from .request import Request
from .stats import JobStats
from .token_buffer import unpack_ids

COPIED = 0.9
"""Share of a step's KV that a tier must hold, or have promised, to count as having a copy of it."""

LIKELY = 0.5
"""A first turn of a client that continues at least this share of them is kept as if it were asked for."""

UNLIKELY = 0.25
"""A turn of a client that continues less than this share of such turns is worth no more than a plain first one."""

OVER = 0.1
"""Where the client's own turns show that less than this share of them is continued, the conversation counts as over."""

USUAL = 0.9
"""A conversation is overdue once it has been away for longer than this share of those that returned."""

USUAL_S = 20.0
"""Seconds after which it is overdue as long as few have returned."""

MAX_EVENTS = 100_000
"""Events kept until `take_events` is called; later ones are dropped, and counted."""

_ENDS = {
    LeaseState.HANDED_OFF: "hits",
    LeaseState.EXPIRED: "expired",
    LeaseState.BROKEN: "broken",
    LeaseState.RELEASED: "released",
}


class PinManager:
    """Called by the scheduler as requests arrive and end, and once a turn."""

    def __init__(
        self, tools: PolicyTools, leases: LeaseTable, policy: SchedulePolicy, max_jobs: int, max_turns: int
    ) -> None:
        """max_jobs, max_turns: the most jobs, and finished turns for `find_job`, on record."""
        self._cache = tools.cache
        self.times = tools.times
        self._fill_time = tools.fill_time
        self._leases = leases
        self._policy = policy
        self._moment_s = tools.provisional_s
        self._returns = Returns()
        self._table = JobTable(max_jobs)
        self._turns = FinishedTurns(max_turns)
        self._pins: dict[Lease, FinishedStep] = {}
        """The pinned step of each lease, until the lease's end has been counted."""
        self._pinned_at_arrival: dict[Request, int] = {}
        self._ending: dict[Request, FinishedStep] = {}
        """Finished steps that `extend_retention` has prepared, by request, until `record_end` records them."""
        self._expected: list[tuple[float, int, Lease]] = []
        """Heap of (latest time at which its job is expected back, a running number, the lease)."""
        self._numbers = count()
        self._unsettled: list[Job] = []
        """Jobs after a call without the time: `settle_pins` holds their family, or lets it go."""
        self._stats = JobStats()
        self._next_loss = -math.inf
        """No job is overdue or lost before that; -inf after a change of what that depends on."""
        self._ended_leases = 0
        """`LeaseTable.num_ended` when the ends of pins were counted last."""
        self.trace = JobTrace()

    # -- requests arrive ----------------------------------------------------------------------------------------------

    def find_job(self, requests: Sequence[Request], now: float) -> list[tuple[str, int]]:
        """Find the job of a new request that names none: that of the finished turn which its ids extend, of its parent,
        or one of its own. Returns the steps that it may continue: rid and index of the extended turn and of its job's
        last steps, the latest first. A prompt that is pooled is no step of any job, and continues nothing."""
        first, spec, steps = requests[0], requests[0].spec, []
        if spec.pooling is not None:
            return []
        if spec.job_id is None:
            job_id, turn = self._known_job(first)
            if turn is not None:
                steps = [turn.name]
            if job_id is None or self._table.find_active(spec.namespace, job_id, now) is None:
                job_id = f"{spec.rid}:{first.serial}" if self._may_return(first) else None
            for request in requests:
                request.job_id = job_id
        job = self._table.find_active(spec.namespace, first.job_id, now) if first.job_id is not None else None
        steps += [(step.rid, step.index) for step in reversed(job.steps)] if job is not None else []
        return list(dict.fromkeys(steps))

    def _known_job(self, request: Request) -> tuple[str | None, FinishedTurn | None]:
        """The job of a request that names none, and the finished turn that it extends."""
        spec, ids = request.spec, request.own_ids
        if spec.continuation is not None:
            job = self._table.job_of_rid(spec.continuation.parent_rid)
            if job is not None and job.namespace == spec.namespace:
                return job.id, None
            if spec.continuation.fallback_ids is None:
                return None, None
            ids = unpack_ids(spec.continuation.fallback_ids)
        elif spec.predecessor is not None:
            return None, None  # its sender knows better what it extends
        turn = self._turns.find_turn(spec.client, request.namespace, ids)
        return (turn.job_id, turn) if turn is not None else (None, None)

    def _may_return(self, request: Request) -> bool:
        """Does a request that belongs to no job begin one? Only where its KV may be pinned and another turn may be
        recognized: not where its client takes the best of several answers, or none."""
        spec, sampling = request.spec, request.sampling
        pins = self._policy.pins_steps and self._turns.max_turns > 0
        alone = sampling.n == 1 and not request.is_search and sampling.max_new_tokens != 0
        return pins and alone and not spec.is_last_step and spec.no_reuse_from is None

    def record_arrival(self, requests: Sequence[Request], now: float) -> None:
        """Record the sequences of a new request."""
        first, spec = requests[0], requests[0].spec
        if first.job_id is None:
            self._table.forget_steps_of(spec.rid)
            return
        job, forgotten = self._table.open_job(spec.namespace, first.job_id, now, first.serial, spec.client)
        for old in forgotten:
            self._count_unreturned(old)
            self._let_go(old)
        if not job.turns and not job.open_rids:
            job.is_unasked = first.is_unasked
        if job.ended is not None and not job.open_rids:
            self._count_return_to(job)
            job.returns += 1
            if job.parent is None and job.last_step is not None and job.last_step.calls == ():
                job.asked = first.arrival, first.serial
            self.trace.record_return(job, now)
            if self._table.mark_returned(job):
                self._note_duration(job, now - job.ended)
                self._count_away(job, now - job.ended)
            job.ended = None
        self._pinned_at_arrival[first] = max((step.tokens for step in job.pinned_steps()), default=0)
        self._table.open_request(job, spec.rid, len(requests))
        for request in requests:
            request.job = job
        if spec.parent_job_id is not None:
            parent = self._table.find_active(spec.namespace, spec.parent_job_id, now)
            if parent is not None:
                adopt_child(parent, job)
        note_activity(job)
        self._hold_family(job, now)
        self.trace.record_arrival(job, first, now)

    # -- requests end -------------------------------------------------------------------------------------------------

    def extend_retention(self, request: Request, now: float) -> None:
        """Before a sequence ends well, extend its ``retain_ttl`` to the time for which the policy pins its KV. With a
        requested time of 0, nothing is kept."""
        job, spec = request.job, request.spec
        if job is None or job.is_over or spec.is_last_step or request.is_search or spec.retain_ttl == 0:
            return
        step = _finished_step(job, request, request.index, now, request.committed_len)
        step.asked_until = now + request.retain_ttl
        ttl = self._policy.ttl(step, now)
        request.expected_until = now + ttl
        request.retain_ttl = max(request.retain_ttl, ttl)
        self._ending[request] = step

    def record_end(self, request: Request, samples: dict[int, SampleRecord], now: float) -> None:
        """Record the end of a sequence. samples: its results; empty if it did not end well."""
        job, step = request.job, self._ending.pop(request, None)
        if not request.spec.is_last_step and (job is None or not job.is_over):
            self._record_turns(request, samples)
        if job is None:
            return
        self._table.close_sequence(job, request.rid)
        self._table.touch_job(job, now)
        self._count_return(request)
        if request.finish is None or request.finish.type == "abort":
            self.trace.record_departure(job, request, now)
            self._hold_family(job, now)
            return
        if request.index == 0:
            job.turns += 1
            job.prompt_tokens += request.prompt_len
            job.hit_tokens += request.found.total
            if job.shared_tokens is None:
                job.shared_tokens = request.found.total
        if not job.open_rids:
            job.ended = now
            if not request.spec.is_last_step:
                self._table.mark_away(job, now)
                self._next_loss = -math.inf
        self.trace.record_departure(job, request, now)
        for index, sample in samples.items():
            lease = sample.lease
            ended = step or _finished_step(job, request, index, now)
            if step is None:
                ended.asked_until = now + request.retain_ttl
            self._keep(ended, request, lease, now)
        if request.spec.is_last_step:
            job.is_over = True
            self._let_go(job)
            if self._policy.retires_jobs:
                node, _, _ = self._cache.find_prefix(request.namespace, request.token_ids.view())
                retire(self._cache, node, job.shared_tokens or 0)
        self._hold_family(job, now)

    def _record_turns(self, request: Request, samples: dict[int, SampleRecord]) -> None:
        """Put what a sequence has said on record, so that a later request that extends it finds its job and its lease;
        nothing where it has neither."""
        job_id = request.job.id if request.job is not None else None
        for sample in samples.values():
            if job_id is not None or sample.lease is not None:
                prompt = sample.ids.view(0, request.prompt_len)
                output = sample.result if request.is_search else sample.ids.view(request.prompt_len)
                self._turns.record_turn(request.spec.client, request.namespace, sample.name, job_id, prompt, output)

    def discard_request(self, request: Request, siblings: Sequence[Request]) -> None:
        """Forget a failed sequence. siblings: the sequences of its rid that are still live."""
        self._ending.pop(request, None)
        self._pinned_at_arrival.pop(request, None)
        job = request.job or self._table.job_of_rid(request.rid)
        if job is not None and request.rid in job.open_rids:
            self._table.set_open_sequences(job, request.rid, len(siblings))
            self._unsettled.append(job)

    def _keep(self, step: FinishedStep, request: Request, lease: Lease | None, now: float) -> None:
        step.lease, step.tokens = lease, lease.tokens if lease is not None else 0
        step.is_asked = request.asked_ttl > 0 and not request.spec.default_lease
        step.is_refused = lease is None and step.index < request.num_retained
        if step.is_refused and not request.is_search:
            step.node = self._cache.find_prefix(request.namespace, request.token_ids.view())[0]
        old = self._table.keep_step(step)
        if old is not None and old.lease is not None and old.asked_until <= now:
            self._leases.release(old.lease)
        if lease is not None:
            self._pin(step, lease, request.expected_until, now)

    def _pin(self, step: FinishedStep, lease: Lease, until: float, now: float) -> None:
        """until: when the policy expects its job back."""
        step.lease, step.tokens = lease, lease.tokens
        self._stats.pins += 1
        self._pins[lease] = step
        step.own_until, step.expected_until = lease.deadline, until
        self._expect(lease, until)
        self.trace.record_pin(step, lease.deadline - now, now)

    def _expect(self, lease: Lease, until: float) -> None:
        """Note until when the policy expects the job back; later its lease is worth less (`settle_pins`)."""
        assert isinstance(lease.owner, KeptTurn)
        lease.owner.expected_until = until
        if until > -math.inf:
            heappush(self._expected, (until, next(self._numbers), lease))

    def _count_return(self, request: Request) -> None:
        pinned = self._pinned_at_arrival.pop(request, 0)
        if pinned and request.queried:
            self._stats.returned_tokens += pinned
            self._stats.returned_hit_tokens += min(pinned, request.found.total)

    # -- tools --------------------------------------------------------------------------------------------------------

    def record_calls(self, rid: str, index: int, calls: tuple[ToolCall, ...], now: float) -> LeaseTerms | None:
        """Record the tools that a finished step called, as parsed from its text. Unknown steps are ignored: their job
        is over, or they belong to none. Returns the terms of a lease for a step that was refused one when it was not
        known to have called a tool (`record_late_lease`); usually None."""
        step = self.find_step(rid, index)
        if step is None or step.calls is not None:
            return None
        job = step.job
        step.calls = calls
        job.called_tools |= bool(calls)
        self._table.touch_job(job, now)
        self.trace.record_calls(step, now)
        if job.is_over:
            return None
        if self._is_probably_over(step):
            self._give_up(step)
            return None
        if step.lease is None:
            return self._late_terms(step, now) if step.is_refused and calls and not job.open_rids else None
        if step.lease.kv is None or step.lease.kv.node is None:
            return None
        promised = self._cache.residency.promised_tokens(step.lease.kv.node)
        step.has_copy = promised >= COPIED * step.tokens
        until = step.ended + self._policy.ttl(step, now)
        step.expected_until = until if calls else -math.inf
        step.own_until = max(until, step.asked_until, now)  # at ``now`` it expires with the next step
        self._expect(step.lease, step.expected_until)
        self._value_calls(step.lease, step, until)
        self._leases.extend_lease(step.lease, step.own_until)
        self._hold_family(job, now)
        return None

    def _late_terms(self, step: FinishedStep, now: float) -> LeaseTerms | None:
        """None if the policy does not expect its job back."""
        until = step.ended + self._policy.ttl(step, now)
        if until <= now:
            return None
        kept = KeptTurn(Worth.RETURNED, step.job, until, falls_at=until)  # almost every tool result is sent
        return LeaseTerms(max(until, step.asked_until), now, step.job.client, kept)

    def record_late_lease(self, rid: str, index: int, lease: Lease, now: float) -> None:
        """Record the lease that a step got once its calls were known."""
        step = self.find_step(rid, index)
        assert step is not None and isinstance(lease.owner, KeptTurn)
        self._pin(step, lease, lease.owner.expected_until, now)
        self._hold_family(step.job, now)

    def find_step(self, rid: str, index: int) -> FinishedStep | None:
        """A finished step of a job that is still kept."""
        job = self._table.job_of_rid(rid)
        return next((s for s in job.steps if (s.rid, s.index) == (rid, index)), None) if job is not None else None

    def _value_calls(self, lease: Lease, step: FinishedStep, until: float) -> None:
        """Value a turn by its calls, now that they are known: raise the worth of a first turn that is likely to be
        continued, and note when the worth falls. until: time until which the policy pins it."""
        kept, calls, client = lease.owner, step.calls, step.job.client
        assert isinstance(kept, KeptTurn) and calls is not None
        opened = self._returns.share_continued(client, TurnKind.OPENING)
        kind = step.job.turn_kind
        if kept.worth is Worth.FIRST_TURN:
            if calls or opened >= LIKELY:
                kept.worth = Worth.ASKED_FOR
        elif kind is TurnKind.NAMED:  # worth no less than without the name, and than the client's own turns show
            if not step.is_asked and opened < LIKELY and self._returns.share_shown(client, kind) < UNLIKELY:
                kept.worth = Worth.FIRST_TURN
        elif kind is not None and not step.is_asked and self._returns.share_continued(client, kind) < UNLIKELY:
            kept.worth = Worth.FIRST_TURN
        within_s = self._fill_time.seconds
        first = self.times.chance((), within_s)
        if first is None or kept.worth is Worth.FIRST_TURN or step.is_asked:
            return
        stay_s = self.times.stay_s(calls, within_s, opened * first, MAX_PIN_S)
        if stay_s is not None:
            kept.falls_at = max(step.ended + stay_s, until)
            if kept.falls_at < step.own_until:  # otherwise the lease ends first
                heappush(self._expected, (kept.falls_at, next(self._numbers), lease))

    def _is_probably_over(self, step: FinishedStep) -> bool:
        """Is this step's conversation over, by what was learned of its client's turns? Never a first turn, which may be
        the first of many that share a prompt, whether or not its job has a name; nor one that its client asked to keep,
        or of a job with other work."""
        job = step.job
        kind = job.turn_kind if step is job.last_step else None
        if kind is None or kind in FIRST_TURNS or step.is_asked or job.open_rids or job.children:
            return False
        if step.lease is not None and step.lease.claims:  # by a continuation that belongs to another job
            return False
        return self._returns.share_shown(job.client, kind) < OVER

    def _give_up(self, step: FinishedStep) -> None:
        """Let the KV of a conversation go that is probably over."""
        node, step.node = step.node, None
        if step.lease is not None:
            node = step.lease.kv.node if step.lease.kv is not None else None
            self._leases.release(step.lease)
        if self._policy.retires_jobs and node is not None:
            retire(self._cache, node, step.job.shared_tokens or 0)

    def _count_return_to(self, job: Job) -> None:
        """Learn that a conversation has been continued, if it was its user's turn."""
        kind, counted, job.counted_as = job.turn_kind, job.counted_as, None
        if counted is not None:
            self._returns.correct_turn(job.client, counted)
        elif kind is not None:
            self._returns.record_turn(job.client, kind, continued=True)

    def _count_unreturned(self, job: Job) -> None:
        """Learn that a conversation has not been continued, if it is its user's turn. It counts once."""
        kind = job.turn_kind
        if kind is not None and job.counted_as is None and job.ended is not None:
            self._returns.record_turn(job.client, kind, continued=False)
            job.counted_as = kind

    def _note_duration(self, job: Job, seconds: float) -> None:
        """Record that the tools of the job's last step took this many seconds, or longer."""
        if (last := job.last_step) is not None and last.calls is not None:
            self.times.record_duration(last.calls, max(0.0, seconds))
            self._next_loss = -math.inf

    def _hold_family(self, job: Job, now: float) -> None:
        """Hold the pins of a job and of its ancestors for their children, or no longer, after an event of the job."""
        if not self._policy.pins_steps or (job.parent is None and not job.children and job.held_until <= now):
            return
        self._hold_pins(job, now)
        for ancestor in ancestors(job):
            self._hold_pins(ancestor, now)

    def _hold_pins(self, job: Job, now: float) -> None:
        """A step of which a tier has a copy is not held: computing it again costs little."""
        if not job.children and job.held_until <= now:
            return
        hold = hold_for_children(job, now, MAX_PIN_S, self._moment_s)
        job.held_until = hold.until
        for step in job.pinned_steps():
            lease = step.lease
            assert lease is not None and isinstance(lease.owner, KeptTurn)
            if step.has_copy:
                continue
            deadline, expected = max(step.own_until, hold.until), max(step.expected_until, hold.expected)
            if (deadline, expected) != (lease.deadline, lease.owner.expected_until):
                self._expect(lease, expected)
                self._leases.extend_lease(lease, deadline)

    def _count_away(self, job: Job, seconds: float) -> None:
        """Count a return after this many seconds."""
        if (last := job.last_step) is not None and last.calls is not None:
            stats = self._stats
            if last.calls:
                stats.tool_returns += 1
                stats.tool_away_s += seconds
            else:
                stats.user_returns += 1
                stats.user_away_s += seconds

    # -- once a turn --------------------------------------------------------------------------------------------------

    def settle_pins(self, now: float) -> None:
        """Count the pins that have ended since the last call. A job that has been away for longer than any pin holds
        counts as that long, even if it never returns: otherwise tools with no return would look fast."""
        if self._unsettled:
            unsettled, self._unsettled = self._unsettled, []
            for job in unsettled:
                self._hold_family(job, now)
        if now >= self._next_loss:
            self._count_lost_jobs(now)
        while self._expected and self._expected[0][0] < now:
            _, _, lease = heappop(self._expected)
            if lease.state is LeaseState.GRANTED:
                kept = lease.owner
                assert isinstance(kept, KeptTurn)
                if max(kept.falls_at, kept.expected_until) < now:  # children of the job may have moved the latter
                    kept.worth = Worth.FIRST_TURN
                self._leases.extend_lease(lease, lease.deadline)  # its value has fallen
        if self._leases.num_ended != self._ended_leases:
            self._ended_leases = self._leases.num_ended
            for lease in [lease for lease in self._pins if not lease.is_live]:
                self._count_end(self._pins.pop(lease), _ENDS[lease.state], now)

    def _count_lost_jobs(self, now: float) -> None:
        """Count the jobs that have been away for too long, and note when the next one will have been."""
        for job in self._table.take_overdue_jobs(now, self._usual_s()):
            self._count_unreturned(job)
            for step in job.steps:
                step.node = None  # a node that has been evicted would stay in memory
        for job in self._table.give_up_jobs(now, MAX_PIN_S):
            self._count_unreturned(job)
            if job.turn_kind not in FIRST_TURNS:  # those say nothing about users of conversations that continue
                self._note_duration(job, MAX_PIN_S)
        self._next_loss = self._table.next_loss(self._usual_s(), MAX_PIN_S)

    def _usual_s(self) -> float:
        """Seconds after which a conversation is overdue."""
        return self.times.usual_s((), USUAL, MAX_PIN_S) or USUAL_S

    def _count_end(self, step: FinishedStep, kind: str, now: float) -> None:
        """Count a pin that has ended. kind: the counter of `JobStats`."""
        stats, held = self._stats, now - step.ended
        setattr(stats, kind, getattr(stats, kind) + 1)
        stats.slot_seconds += held * step.tokens
        if kind == "hits":
            stats.saved_tokens += step.tokens
        elif kind in ("expired", "broken") and step.has_copy:
            stats.demoted += 1
        self.trace.record_unpin(step, kind, held, now)

    def stats(self) -> JobStats:
        return replace(self._stats, jobs=len(self._table))

    # -- jobs end, and are looked at ----------------------------------------------------------------------------------

    def end_job(self, namespace: str, id: str) -> tuple[list[str], int] | None:
        """Give up everything kept for a job, and forget it. Returns the rids of its open requests, which the caller
        ends, and the tokens that were pinned; None if the job is not known."""
        job = self._table.get_job(namespace, id)
        if job is None:
            return None
        tokens = sum(step.tokens for step in job.pinned_steps())
        self._unsettled += [job.parent] if job.parent is not None else []
        job.is_over = True
        self._let_go(job)
        self._table.remove_job(job)
        return list(job.open_rids), tokens

    def unended_jobs(self) -> list[Job]:
        """The jobs that are not over or still have open requests, most recently active first."""
        return self._table.unended_jobs()

    def describe_jobs(
        self, namespace: str | None, id: str | None, now: float, prefix: str = ""
    ) -> list[dict[str, Any]]:
        """Describe the jobs with ids that begin with ``prefix``, in one namespace or, for None, in all; with an ``id``,
        only that job of the namespace, if it is known. See `describe_job`."""
        if id is None:
            jobs = self._table.select_jobs(namespace, prefix)
        else:
            job = self._table.get_job(namespace, id) if namespace is not None else None
            jobs = [job] if job is not None else []
        return [describe_job(job, now, self._predicted(job)) for job in jobs]

    def _predicted(self, job: Job) -> float | None:
        last = job.last_step
        return None if last is None or last.calls is None else self.times.predicted_s(last.calls)

    def _let_go(self, job: Job) -> None:
        """Give up the leases of a job."""
        for step in job.pinned_steps():
            assert step.lease is not None and step.lease.kv is not None
            node = step.lease.kv.node
            self._leases.release(step.lease)
            if self._policy.retires_jobs and node is not None:
                retire(self._cache, node, job.shared_tokens or 0)


def _finished_step(job: Job, request: Request, index: int, now: float, tokens: int = 0) -> FinishedStep:
    return FinishedStep(job, request.rid, index, now, tokens, namespace=request.namespace, adapter=request.adapter)


class JobTrace:
    """Records nothing until it is switched on. Times are of the scheduler's clock, in seconds; lengths in tokens."""

    def __init__(self) -> None:
        self.enabled = False
        self._events: list[dict[str, Any]] = []
        self._dropped = 0

    def take_events(self) -> list[dict[str, Any]]:
        """The events since the last call."""
        events, self._events = self._events, []
        if self._dropped:
            events.append({"event": "dropped", "events": self._dropped})
            self._dropped = 0
        return events

    def record_arrival(self, job: Job, request: Request, now: float) -> None:
        """Record a new request of a job. (Its prompt's length is not known if it continues a running parent.)"""
        if self.enabled:
            prompt = {"prompt_tokens": request.prompt_len, "is_last_step": request.spec.is_last_step}
            self._add_event("arrival", job, now, rid=request.rid, turn=job.turns + 1, **prompt)

    def record_return(self, job: Job, now: float) -> None:
        """Record that the job's next request has arrived, and how long its tool took."""
        step = job.last_step
        if self.enabled and job.ended is not None and step is not None:
            names = [call.tool for call in step.calls] if step.calls is not None else None
            self._add_event("returned", job, now, tools=names, seconds=now - job.ended)

    def record_departure(self, job: Job, request: Request, now: float) -> None:
        """Record the end of a sequence."""
        if self.enabled:
            assert request.finish is not None
            self._add_event(
                "departure",
                job,
                now,
                rid=request.rid,
                index=request.index,
                reason=request.finish.type,
                prompt_tokens=request.prompt_len,
                hit_tokens=request.found.total,
                output_tokens=request.num_output_tokens,
                is_last_step=request.spec.is_last_step,
            )

    def record_calls(self, step: FinishedStep, now: float) -> None:
        """Record the tools that a step called."""
        if self.enabled:
            calls = [{"tool": call.tool, "command": call.command} for call in step.calls or ()]
            self._add_event("called", step.job, now, rid=step.rid, index=step.index, calls=calls)

    def record_pin(self, step: FinishedStep, ttl: float, now: float) -> None:
        if self.enabled:
            self._add_event("pinned", step.job, now, rid=step.rid, index=step.index, tokens=step.tokens, ttl=ttl)

    def record_unpin(self, step: FinishedStep, reason: str, held: float, now: float) -> None:
        """reason: hits (the next step took it over), expired, broken, released. held: seconds."""
        if self.enabled:
            more = {"tokens": step.tokens, "reason": reason, "held": held}
            self._add_event("unpinned", step.job, now, rid=step.rid, index=step.index, **more)

    def _add_event(self, event: str, job: Job, now: float, **more: Any) -> None:
        if len(self._events) >= MAX_EVENTS:
            self._dropped += 1
            return
        self._events.append({"event": event, "time": now, "job_id": job.id, **more})
