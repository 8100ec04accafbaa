"""The jobs that are known, by namespace and id. Bounded: of the client that has most of them, the one that was here
longest ago is forgotten first."""

from __future__ import annotations

from collections import OrderedDict

from ..client_shares import ClientShares
from .job import FinishedStep, Job

MAX_IDLE_S = 3600.0
"""A job of which nothing was heard for so long begins anew when it comes back: it has lost its place in the order."""


class JobTable:
    """Owns the jobs. Whoever forgets one gives up its leases."""

    def __init__(self, max_jobs: int) -> None:
        self._max_jobs = max_jobs
        self._jobs: OrderedDict[tuple[str, str], Job] = OrderedDict()
        """The one that was here last comes last."""
        self._idle: ClientShares[tuple[str, str]] = ClientShares()
        """Those with no open request: a table of jobs that are all at work is not searched."""
        self._by_rid: dict[str, Job] = {}
        """Of every request that has not ended and of every step that is kept."""
        self._away: OrderedDict[Job, float] = OrderedDict()
        """Those whose tools run, with the time at which they left; the one that has been away for longest first."""

    def __len__(self) -> int:
        return len(self._jobs)

    def unended(self) -> list[Job]:
        """The jobs that are not over, or that still have open requests; the one that was here last comes first."""
        return [job for job in reversed(self._jobs.values()) if job.open_rids or not job.is_over]

    def select(self, namespace: str | None, prefix: str) -> list[Job]:
        """The jobs of a namespace, or of all where it is None, whose ids begin with ``prefix``; the one that was here
        last comes last."""
        jobs = (job for job in self._jobs.values() if namespace is None or job.namespace == namespace)
        return [job for job in jobs if job.id.startswith(prefix)]

    def find_active(self, namespace: str, id: str, now: float) -> Job | None:
        """A job that can be gone on with: it is not over, and was not silent for too long."""
        job = self._jobs.get((namespace, id))
        if job is None or job.is_over:  # though some of its requests may still run
            return None
        return job if job.open_rids or now - job.heard <= MAX_IDLE_S else None

    def get_job(self, namespace: str, id: str) -> Job | None:
        """A job, over or not."""
        return self._jobs.get((namespace, id))

    def of_rid(self, rid: str) -> Job | None:
        return self._by_rid.get(rid)

    def open_job(self, namespace: str, id: str, now: float, serial: int, client: str = "") -> tuple[Job, list[Job]]:
        """The job, a new one if `find_active` finds none; and the jobs forgotten for it, or replaced by it."""
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
                    break  # of jobs at work the queue bounds how many there are
                each = self._jobs[idle]
                self._remove(each)
                gone.append(each)
        self.heard(job, now)
        return job, gone

    def heard(self, job: Job, now: float) -> None:
        job.heard = now
        key = job.namespace, job.id
        if key in self._jobs:
            self._jobs.move_to_end(key)
        if key in self._idle:
            self._idle.renew_key(key)

    def name_taken(self, rid: str) -> None:
        """A new request has this rid: a step that had it has no name any more."""
        if (owner := self._by_rid.get(rid)) is not None:
            for step in [step for step in owner.steps if step.rid == rid]:
                self.discard_step(owner, step)

    def began(self, job: Job, rid: str, sequences: int) -> None:
        """A request of the job has been taken in."""
        self.name_taken(rid)
        self._idle.remove_key((job.namespace, job.id))
        job.open_rids[rid] = sequences
        self._by_rid[rid] = job

    def left(self, job: Job, rid: str) -> None:
        """A sequence of a request has ended."""
        job.open_rids[rid] -= 1
        if not job.open_rids[rid]:
            del job.open_rids[rid]
            if not any(step.rid == rid for step in job.steps):
                self._by_rid.pop(rid, None)
            if not job.open_rids and self.get_job(job.namespace, job.id) is job:
                self._idle.put_key(job.client, (job.namespace, job.id))

    def set_open(self, job: Job, rid: str, sequences: int) -> None:
        """Say how many sequences of a request are open, whatever was counted."""
        if sequences:
            job.open_rids[rid] = sequences
            return
        job.open_rids.pop(rid, None)
        if not any(step.rid == rid for step in job.steps):
            self._by_rid.pop(rid, None)
        if not job.open_rids and self.get_job(job.namespace, job.id) is job:
            self._idle.put_key(job.client, (job.namespace, job.id))

    def goes_away(self, job: Job, now: float) -> None:
        """Its last request has ended; another should follow, if it is not over or forgotten."""
        if not job.is_over and self.get_job(job.namespace, job.id) is job:
            self._away[job] = now
            self._away.move_to_end(job)

    def is_back(self, job: Job) -> bool:
        """Its next request is there. False if it had been given up, or was not away."""
        return self._away.pop(job, None) is not None

    def give_up(self, now: float, seconds: float) -> list[Job]:
        """Those that have been away for so long. Each is named once; what is known of it stays known."""
        lost = []
        while self._away:
            job, left = next(iter(self._away.items()))
            if now - left < seconds:
                break
            del self._away[job]
            lost.append(job)
        return lost

    def keep_step(self, step: FinishedStep) -> FinishedStep | None:
        """Remember a step; returns the one that is forgotten for it. Of a job that is not known any more, nothing."""
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
        """Forget one of its steps."""
        job.steps.remove(step)
        self._drop_name(job, step.rid)

    def remove_job(self, job: Job) -> None:
        """Forget a job; its open requests go on without it."""
        if self._jobs.get((job.namespace, job.id)) is job:
            self._remove(job)

    def _remove(self, job: Job) -> None:
        self._idle.remove_key((job.namespace, job.id))
        del self._jobs[job.namespace, job.id]
        self._away.pop(job, None)
        for rid in [*job.open_rids, *(step.rid for step in job.steps)]:
            self._by_rid.pop(rid, None)

    def _drop_name(self, job: Job, rid: str) -> None:
        if rid not in job.open_rids and not any(step.rid == rid for step in job.steps):
            self._by_rid.pop(rid, None)
