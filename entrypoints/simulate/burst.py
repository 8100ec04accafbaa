"""Decode steps of several tokens a row, so that a simulation needs fewer of them.

A burst does at once what several decode steps would do one after the other: each row gets the slots of the tokens it
computes, and its result brings as many. A recurrent state is that of the row's last token in it. All else is the
scheduler's own: admission, retraction, what a request leaves behind. `burst_ends` says how far a burst may go: as many
decode steps as pass before the scheduler would decide anything else. A burst of a single token is a plain step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ...scheduler.batch import ScheduleBatch
from ...scheduler.batch_builder import PlannedStep, TokenRows
from ...scheduler.decode import DecodeScheduler, ids_or_placeholders
from ...scheduler.memory.beam_memory import BeamMemory
from ...scheduler.memory.kv_memory import KVMemory
from ...scheduler.prefill import DecodeReserve
from ...scheduler.request import Request
from .cost_model import StepCost, StepSize

PlanBurst = Callable[[Sequence[Request]], list[int]]
"""Tokens for each of these requests in the coming step, at least 1 each."""


class BurstDecode(DecodeScheduler):
    """Call `settle_burst` when a step has ended, before its result is processed. There are no beam searches, and at
    most one step is in flight."""

    def __init__(self, memory: KVMemory, beams: BeamMemory, reserve: DecodeReserve, plan: PlanBurst) -> None:
        super().__init__(memory, beams)
        self._reserve = reserve
        self._plan = plan
        self._ahead: list[Request] = []
        """Requests in the step in flight, if it is a burst of more than one token."""
        self._longest = 1
        self._follows_burst = False
        """True if the last decode step was a burst of more than one token."""

    def next_batch(self, step_id: int, previous: ScheduleBatch | None, now: float) -> PlannedStep | None:
        assert previous is None, "a burst must have ended before the next step is formed"
        return super().next_batch(step_id, previous, now)

    def _allocate(
        self,
        requests: list[Request],
        searches: list[Request],
        previous: ScheduleBatch | None,
        now: float,
        drafts: list[np.ndarray] | None = None,
        *,
        is_mixed: bool = False,
    ) -> tuple[TokenRows, np.ndarray] | None:
        """A step that also computes prompts gives each request one token."""
        assert not searches and drafts is None, "beam searches and drafts are not simulated"
        if is_mixed:
            return super()._allocate(requests, searches, previous, now, is_mixed=True)
        counts = self._within_windows(self._plan(requests))
        if counts.max() == 1 or counts.sum() > self._memory.available_tokens:
            # What a burst read and wrote of states is not what the next step does: it is planned like a mixed one.
            is_mixed, self._follows_burst, self._longest = self._follows_burst, False, 1
            return super()._allocate(requests, searches, previous, now, is_mixed=is_mixed)
        self._follows_burst = True
        return self._allocate_burst(requests, counts, now)

    def _within_windows(self, counts: Sequence[int]) -> np.ndarray:
        """int32 [n]: fewer tokens where a burst would evict from the window pool. Single steps might not, since they
        give back what is behind their windows as they go."""
        wanted, windows = np.array(counts, dtype=np.int32), self._memory.cache.windows
        if windows is None:
            return wanted
        partly = len(wanted) * (windows.pages.page_size - 1)
        while (longest := wanted.max()) > 1 and wanted.sum() + partly > windows.pages.free_tokens:
            wanted = np.minimum(wanted, longest - 1)
        return wanted

    def _allocate_burst(
        self, requests: list[Request], counts: np.ndarray, now: float
    ) -> tuple[TokenRows, np.ndarray] | None:
        memory = self._memory
        if not memory.reserve_states(requests, now):
            return None
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
        return TokenRows(requests, ids_or_placeholders(requests, None), slots, new), slots[:0]

    def settle_burst(self) -> None:
        """Count the step in flight, which has ended, as one result, however many tokens it brings."""
        for request in self._ahead:
            request.num_output_placeholders = 1
        for _ in range(self._longest - 1):
            self._reserve.lower_ratio()
        self._ahead, self._longest = [], 1


class RowAhead(NamedTuple):
    """The coming steps of a row."""

    tokens: int
    """Tokens until its turn ends."""
    context: int
    """Tokens that its next token attends to, itself included."""
    away_s: float
    """Seconds from the end of its turn to its job's next one."""


def burst_ends(
    rows: Sequence[RowAhead], cost: StepCost, now: float, horizon: float, most: int, waiting: bool
) -> list[float]:
    """The end of each of the coming decode steps, up to the last one that the burst may include; ``most`` at most.

    horizon: time of the next known event. waiting: a request waits for room, so the first row that ends ends the burst;
    otherwise the other rows continue without it.
    """
    ending = sorted(row for row in rows if row.tokens <= most)
    count, context, first = len(rows), sum(row.context for row in rows), 0
    ends: list[float] = []
    clock = now
    window, contexts = cost.window, np.array([row.context for row in rows])
    tokens = np.array([row.tokens for row in rows])
    while count and len(ends) < most and clock < horizon:
        seen = int(np.minimum(contexts[tokens > len(ends)] + len(ends), window).sum()) if window else 0
        clock += cost.step_s(StepSize(0, count, context, context, window_context=seen, window_attended=seen))
        ends.append(clock)
        done = len(ends)
        while first < len(ending) and ending[first].tokens == done:
            context -= ending[first].context + done - 1
            count -= 1
            horizon = now if waiting else min(horizon, clock + ending[first].away_s)
            first += 1
        context += count
    return ends
