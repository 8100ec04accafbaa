"""Snapshots of what a scheduler does now, for a watcher: bounded lists of plain data."""

from __future__ import annotations

from heapq import nsmallest
from math import inf

from ...radix.lease import Lease
from ..jobs.job import Job
from ..jobs.kept_turn import job_id_of
from ..request import Request, RequestStatus
from ..scheduler import Scheduler
from ..stats import TierStats
from .reports import JobNow, LeaseNow, LoadNow, RunningNow, WaitingNow

MOST = 100
"""Entries per list."""

_WAITS = {RequestStatus.PARKED: "parent", RequestStatus.LOADING: "loading", RequestStatus.WAITING: "queued"}


def load_now(scheduler: Scheduler) -> LoadNow:
    stats = scheduler.stats()
    host = next((tier for tier in stats.tiers if tier.tier == "host"), TierStats("host"))
    states, windows = stats.states, stats.window_pool
    return LoadNow(
        running=stats.num_running_reqs,
        waiting=stats.num_queue_reqs + scheduler.num_parked,
        total=stats.total_tokens,
        free=stats.free_tokens,
        evictable=stats.evictable_tokens,
        protected=stats.protected_tokens,
        private=stats.private_tokens,
        leased=stats.leased_tokens,
        quarantined=stats.quarantined_tokens,
        host_used=host.used_tokens or 0,
        host_total=host.total_tokens or 0,
        queries=stats.prefix_cache_queries,
        hits=stats.prefix_cache_hits,
        evicted=stats.evicted_tokens,
        prompt_tokens=stats.computed_prompt_tokens,
        output_tokens=stats.output_tokens,
        states_total=states.total,
        states_free=states.free,
        states_held=states.held,
        states_cached=states.in_tree,
        states_kept=states.kept,
        states_evicted=states.evicted,
        host_states_total=host.total_states or 0,
        host_states_used=host.used_states or 0,
        host_states_evicted=host.evicted_states,
        window_total=windows.total_tokens,
        window_free=windows.free_tokens,
        window_evictable=windows.evictable_tokens,
        window_evicted=windows.evicted_tokens,
    )


def requests_now(scheduler: Scheduler, now: float) -> tuple[list[RunningNow], list[WaitingNow]]:
    """The earliest running and waiting requests, at most MOST of each."""
    running: list[RunningNow] = []
    waiting: list[WaitingNow] = []
    for request in scheduler.live_requests:
        if request.is_preparation:
            continue
        if request.status in _WAITS:
            if len(waiting) < MOST:
                waiting.append(_waiting(request, now))
        elif len(running) < MOST:
            running.append(_running(request))
        if len(running) == len(waiting) == MOST:
            break
    return running, waiting


def _running(request: Request) -> RunningNow:
    output = num_output(request)
    if request.committed_len < request.prompt_len:
        phase = "prefill"
    else:
        phase = "decode" if request.beams is None else "beam"
    computed = request.committed_len if request.beam_kv is None else request.beam_kv.length
    total = request.prompt_len + output
    return RunningNow(request.rid, phase, computed, total, output, request.job_id)


def _waiting(request: Request, now: float) -> WaitingNow:
    total, waited = request.prompt_len + num_output(request), max(0.0, now - request.arrival)
    return WaitingNow(request.rid, _WAITS[request.status], total, waited, request.job_id)  # type: ignore[arg-type]


def num_output(request: Request) -> int:
    """Generated tokens; of a search, those in each of its beams."""
    return request.num_output_tokens if request.beams is None else request.beams.num_tokens


def leases_now(scheduler: Scheduler, now: float) -> list[LeaseNow]:
    """The MOST leases with the earliest deadlines; claimed leases have none and come last."""
    leases = scheduler.live_leases()
    if not leases:
        return []
    first = nsmallest(MOST, leases, key=lambda lease: inf if lease.claims else lease.deadline)
    names = scheduler.named_leases()
    return [_lease(lease, names.get(lease, (None, 0))[0], now) for lease in first]


def _lease(lease: Lease, rid: str | None, now: float) -> LeaseNow:
    return LeaseNow(
        serial=lease.serial,
        rid=rid,
        job_id=job_id_of(lease),
        tokens=lease.tokens,
        idle=max(0.0, now - lease.idle_since),
        expires_in=None if lease.claims else max(0.0, lease.deadline - now),
        claimed=lease.claims > 0,
    )


def jobs_now(scheduler: Scheduler, now: float) -> tuple[list[JobNow], int]:
    """The most recently active unended jobs, at most MOST, and how many there are in all."""
    jobs = scheduler.unended_jobs()
    return [_job(job, now) for job in jobs[:MOST]], len(jobs)


def _job(job: Job, now: float) -> JobNow:
    pins = [step.lease for step in job.pinned_steps() if step.lease is not None]
    deadlines = [lease.deadline for lease in pins if not lease.claims]
    return JobNow(
        job_id=job.id,
        state="over" if job.is_over else "running" if job.open_rids else "away",
        steps=job.turns,
        pinned=sum(lease.tokens for lease in pins),
        expires_in=max(0.0, min(deadlines) - now) if deadlines else None,
    )
