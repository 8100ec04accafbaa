"""Decode steps of several tokens a row, so that a simulation needs fewer of them.

A burst does at once what so many decode steps would have done one after the other: each row gets the slots of the
tokens it computes, and its result brings as many. All else is the scheduler's own: admission, retraction, what a
request leaves behind. Whoever drives the scheduler says how far a burst may go; one of a single token is a plain step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...scheduler.batch import ScheduleBatch
from ...scheduler.batch_builder import PlannedStep, TokenRows
from ...scheduler.decode import DecodeScheduler, next_ids
from ...scheduler.memory.beam_memory import BeamMemory
from ...scheduler.memory.kv_memory import KVMemory
from ...scheduler.prefill import DecodeReserve
from ...scheduler.request import Request

PlanBurst = Callable[[Sequence[Request]], list[int]]
"""How many tokens each of these requests gets in the coming step: at least 1."""


class BurstDecode(DecodeScheduler):
    """`settle` must be called when a step has ended, before its result is processed. No beam searches, and one step in
    flight at a time."""

    def __init__(self, memory: KVMemory, beams: BeamMemory, reserve: DecodeReserve, plan: PlanBurst) -> None:
        super().__init__(memory, beams)
        self._reserve = reserve
        self._plan = plan
        self._ahead: list[Request] = []
        """Requests of the step in flight that got more than one token."""
        self._longest = 1

    def next_batch(self, step_id: int, previous: ScheduleBatch | None, now: float) -> PlannedStep | None:
        assert previous is None, "a burst must have ended before the next step is formed"
        return super().next_batch(step_id, previous, now)

    def offer(self, wanting: list[Request], previous: ScheduleBatch | None, now: float) -> TokenRows | None:
        """A step that also computes prompts gives one token to each of these."""
        allocated = super()._allocate(wanting, [], previous, now)
        return allocated[0] if allocated is not None else None

    def _allocate(
        self,
        requests: list[Request],
        searches: list[Request],
        previous: ScheduleBatch | None,
        now: float,
        drafts: list[np.ndarray] | None = None,
    ) -> tuple[TokenRows, np.ndarray] | None:
        assert not searches and drafts is None, "beam searches and drafts are not simulated"
        counts = self._plan(requests)
        longest = max(counts)
        if longest == 1 or sum(counts) > self._memory.available_tokens:
            self._longest = 1
            return super()._allocate(requests, searches, previous, now)
        return self._allocate_burst(requests, np.array(counts, dtype=np.int32), now)

    def _allocate_burst(
        self, requests: list[Request], counts: np.ndarray, now: float
    ) -> tuple[TokenRows, np.ndarray] | None:
        memory = self._memory
        old = np.fromiter((r.scheduled_len for r in requests), dtype=np.int32, count=len(requests))
        rows = np.fromiter((r.held_kv.row for r in requests), dtype=np.int32, count=len(requests))
        new = old + counts
        last_slots = memory.req_to_token.rows[rows, np.maximum(old - 1, 0)]
        memory.reclaim(memory.allocator.tokens_needed(old, new), now)
        slots = memory.allocator.alloc_extend(old, new, last_slots)
        if slots is None:
            return None
        start = 0
        for request, length, count in zip(requests, old.tolist(), counts.tolist()):
            memory.req_to_token.write(request.held_kv.row, length, slots[start : start + count])
            request.held_kv.length = length + count
            request.num_output_placeholders += count - 1
            start += count
        self._ahead, self._longest = requests, int(counts.max())
        return TokenRows(requests, next_ids(requests, None), slots, new), slots[:0]

    def settle(self) -> None:
        """The step in flight has ended: its result counts as one, however many tokens it brings."""
        for request in self._ahead:
            request.num_output_placeholders = 1
        for _ in range(self._longest - 1):
            self._reserve.decoded()
        self._ahead, self._longest = [], 1
