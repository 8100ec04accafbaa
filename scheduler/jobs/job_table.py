"""Table of known jobs, by namespace and id. Bounded: it first forgets the least recently active job of the client with
the most idle jobs."""

from __future__ import annotations

import math
from collections import OrderedDict

from ..client_shares import ClientShares
from .family import leave_family
from .job import FinishedStep, Job

MAX_IDLE_S = 3600.0
"""A job that was silent for longer than this begins anew when it returns: it has lost its place in the order."""


class JobTable:
    """Owns the jobs. It returns the jobs that it forgets; the caller gives up their leases."""

    def __init__(self, max_jobs: int) -> None:
        self._max_jobs = max_jobs
        self._jobs: OrderedDict[tuple[str, str], Job] = OrderedDict()
        """Least recently active first."""
        self._idle: ClientShares[tuple[str, str]] = ClientShares()
        """Jobs with no open request. Only these may be forgotten; a table in which all jobs are at work is not
        searched."""
        self._by_rid: dict[str, Job] = {}
        """The job of every request that has not ended and of every kept step, by rid."""
        self._away: OrderedDict[Job, float] = OrderedDict()
        """Jobs that wait for their tools, with the time at which each left; longest away first."""
        self._fresh: OrderedDict[Job, float] = OrderedDict()
        """The same, without the jobs that `take_overdue_jobs` has returned."""

    def __len__(self) -> int:
        return len(self._jobs)

    def unended_jobs(self) -> list[Job]:
        """The jobs that are not over or still have open requests, most recently active first."""
        return [job for job in reversed(self._jobs.values()) if job.open_rids or not job.is_over]

    def select_jobs(self, namespace: str | None, prefix: str) -> list[Job]:
        """The jobs with ids that begin with ``prefix``, in one namespace or, for None, in all; most recently active
        last."""
        jobs = (job for job in self._jobs.values() if namespace is None or job.namespace == namespace)
        return [job for job in jobs if job.id.startswith(prefix)]

    def find_active(self, namespace: str, id: str, now: float) -> Job | None:
        """The job if it can be continued: it is not over, and was not silent for too long."""
        job = self._jobs.get((namespace, id))
        if job is None or job.is_over:  # though some of its requests may still run
            return None
        return job if job.open_rids or now - job.heard <= MAX_IDLE_S else None

    def get_job(self, namespace: str, id: str) -> Job | None:
        """A job, over or not."""
        return self._jobs.get((namespace, id))

    def job_of_rid(self, rid: str) -> Job | None:
        return self._by_rid.get(rid)

    def open_job(self, namespace: str, id: str, now: float, serial: int, client: str = "") -> tuple[Job, list[Job]]:
        """Return the job, or a new one if `find_active` finds none; and the jobs forgotten to make room, or replaced by
        it."""
        job, gone = self.find_active(namespace, id, now), []
        if job is None:
            if (old := self._jobs.get((namespace, id))) is not None:
                self._remove(old)
                gone.append(old)
            job = Job(namespace, id, now, serial, now, client)
            new = namespace, id
            self._idle.put_key(client, new)
            self._jobs[new] = job
            while len(self._jobs) > self._max_jobs:
                idle = next((key for key in self._idle.in_order_of_forgetting() if key != new), None)
                if idle is None:
                    break  # the rest have open requests, which the queue bounds
                each = self._jobs[idle]
                self._remove(each)
                gone.append(each)
        self.touch_job(job, now)
        return job, gone

    def touch_job(self, job: Job, now: float) -> None:
        job.heard = now
        key = job.namespace, job.id
        if key in self._jobs:
            self._jobs.move_to_end(key)
        if key in self._idle:
            self._idle.renew_key(key)

    def forget_steps_of(self, rid: str) -> None:
        """Forget the kept steps with this rid, because a new request has taken it."""
        if (owner := self._by_rid.get(rid)) is not None:
            for step in [step for step in owner.steps if step.rid == rid]:
                self.discard_step(owner, step)

    def open_request(self, job: Job, rid: str, sequences: int) -> None:
        """Record a new request of the job."""
        self.forget_steps_of(rid)
        self._idle.remove_key((job.namespace, job.id))
        job.open_rids[rid] = sequences
        self._by_rid[rid] = job

    def close_sequence(self, job: Job, rid: str) -> None:
        """Record that one sequence of a request has ended."""
        job.open_rids[rid] -= 1
        if not job.open_rids[rid]:
            del job.open_rids[rid]
            if not any(step.rid == rid for step in job.steps):
                self._by_rid.pop(rid, None)
            if not job.open_rids and self.get_job(job.namespace, job.id) is job:
                self._idle.put_key(job.client, (job.namespace, job.id))

    def set_open_sequences(self, job: Job, rid: str, sequences: int) -> None:
        """Set how many sequences of a request are open, in place of the count so far."""
        if sequences:
            job.open_rids[rid] = sequences
            return
        job.open_rids.pop(rid, None)
        if not any(step.rid == rid for step in job.steps):
            self._by_rid.pop(rid, None)
        if not job.open_rids and self.get_job(job.namespace, job.id) is job:
            self._idle.put_key(job.client, (job.namespace, job.id))

    def mark_away(self, job: Job, now: float) -> None:
        """Record that all requests of a job have ended, and another should follow. No effect if it is over or
        forgotten."""
        if not job.is_over and self.get_job(job.namespace, job.id) is job:
            for jobs in (self._away, self._fresh):
                jobs[job] = now
                jobs.move_to_end(job)

    def mark_returned(self, job: Job) -> bool:
        """Record that the next request of a job has arrived. False if the job was given up, or was not away."""
        self._fresh.pop(job, None)
        return self._away.pop(job, None) is not None

    def give_up_jobs(self, now: float, seconds: float) -> list[Job]:
        """Stop waiting for the jobs that have been away for at least ``seconds``, and return them. They stay in the
        table."""
        return _pop_away(self._away, now, seconds)

    def take_overdue_jobs(self, now: float, seconds: float) -> list[Job]:
        """The jobs that have been away for at least ``seconds``, each once. They are still waited for."""
        return _pop_away(self._fresh, now, seconds)

    def next_loss(self, overdue_s: float, lost_s: float) -> float:
        """A time, up to a millisecond early, before which neither `take_overdue_jobs` with ``overdue_s`` nor
        `give_up_jobs` with ``lost_s`` has a job to return; inf if no job is away."""
        overdue = next(iter(self._fresh.values()), math.inf) + overdue_s
        return min(overdue, next(iter(self._away.values()), math.inf) + lost_s) - 1e-3

    def keep_step(self, step: FinishedStep) -> FinishedStep | None:
        """Remember a step. Returns the step that is forgotten to make room, if any. No effect if its job is not known
        any more."""
        job = step.job
        if self.get_job(job.namespace, job.id) is not job:
            return None
        old = job.steps.popleft() if len(job.steps) == job.steps.maxlen else None
        job.steps.append(step)
        self._by_rid[step.rid] = job
        if old is not None:
            self._drop_name(job, old.rid)
        return old

    def discard_step(self, job: Job, step: FinishedStep) -> None:
        """Forget a kept step of a job."""
        job.steps.remove(step)
        self._drop_name(job, step.rid)

    def remove_job(self, job: Job) -> None:
        """Forget a job; its open requests continue without it."""
        if self._jobs.get((job.namespace, job.id)) is job:
            self._remove(job)

    def _remove(self, job: Job) -> None:
        self._idle.remove_key((job.namespace, job.id))
        del self._jobs[job.namespace, job.id]
        self._away.pop(job, None)
        self._fresh.pop(job, None)
        leave_family(job)
        for rid in [*job.open_rids, *(step.rid for step in job.steps)]:
            self._by_rid.pop(rid, None)

    def _drop_name(self, job: Job, rid: str) -> None:
        if rid not in job.open_rids and not any(step.rid == rid for step in job.steps):
            self._by_rid.pop(rid, None)


def _pop_away(jobs: OrderedDict[Job, float], now: float, seconds: float) -> list[Job]:
    """Remove the jobs that left at least ``seconds`` ago, and return them. jobs: with their times, longest away
    first."""
    found = []
    while jobs:
        job, left = next(iter(jobs.items()))
        if now - left < seconds:
            break
        del jobs[job]
        found.append(job)
    return found
