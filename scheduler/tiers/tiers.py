"""The tiers below the device, as the scheduler sees them: what is copied when, and who waits for it.

    add ──▶ queue ──▶ waiting ─────────────────────────────▶ admitted; what is on the host is loaded with its first step
              │          ▲
              └▶ loading ┘   its prefix is being read from disk to the host; it holds nobody up

    next_batch ─▶ take ─▶ whoever makes copies, before the step is launched ─▶ copy_ended, blocks_ended

A step may read what a load brings: whoever makes the copies has it wait, layer by layer. So nothing here waits.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

from ...radix.disk_tier import BlockRead, BlockWrite, DiskTier, OnDisk
from ...radix.host_tier import TierCopy
from ..memory.kv_memory import KVMemory
from ..queue.live import LiveRequests
from ..queue.waiting import WaitingQueue
from ..request import Request, RequestEvent, RequestStatus

DISK_TIMEOUT_S = 5.0
"""The longest that a request waits for the disk, its turn included; then what has not come is computed."""

MAX_READS = 3
"""Reads that one request waits for: the second brings what the first did not, if the disk still has it."""


class Tiers:
    """Hands out the orders that the tiers want made, hears of their ends, and lets requests wait for the disk."""

    FAILED = "its KV could not be brought back from host memory; send it again"

    def __init__(
        self,
        memory: KVMemory,
        live: LiveRequests,
        waiting: WaitingQueue,
        abort: Callable[[list[Request], float, str], list[RequestEvent]],
        disk: DiskTier | None = None,
    ) -> None:
        """abort: ends requests at a time, with a message."""
        self._memory = memory
        self._live = live
        self._waiting = waiting
        self._abort = abort
        self._disk = disk
        self._readers: dict[int, list[Request]] = {}
        """Who waits for which read."""
        self._in_turn: deque[Request] = deque()
        """Those whose read has not begun, because others fill the host."""

    @property
    def num_queued(self) -> int:
        """Requests that wait for admission or for the disk."""
        return len(self._waiting) + len(self._in_turn) + sum(map(len, self._readers.values()))

    @property
    def under_way(self) -> int:
        """Copies between device and host that have not ended."""
        return self._memory.copies_under_way

    # -- orders -------------------------------------------------------------------------------------------------------

    def take(self) -> list[TierCopy | BlockRead | BlockWrite]:
        """The orders that are due; to be given before the step that was formed just now is launched."""
        copies: list[TierCopy | BlockRead | BlockWrite] = list(self._memory.take_tier_copies())
        return copies if self._disk is None else copies + self._disk.take_orders()

    def copy_ended(self, fence: int, ok: bool, now: float) -> list[RequestEvent]:
        """A copy has been made, or has failed; once for each. Steps that wait for a failed load fail; the requests that
        would go on with what it did not bring end here."""
        assert self._memory.tier is not None, "only a tier orders copies"
        spoilt = self._memory.tier.ended(fence, ok)
        if spoilt is None:
            return []
        return self._abort(self._memory.users_of(spoilt, self._live), now, self.FAILED)

    def blocks_ended(self, fence: int, blocks: int, now: float) -> None:
        """A read or write of blocks is over; see `DiskTier.ended`. Those who waited for it go on."""
        assert self._disk is not None, "only a disk tier orders blocks"
        adopted = self._disk.ended(fence, blocks)
        readers = self._readers.pop(fence, [])
        for request in readers:
            request.from_disk += adopted
        self.queue(readers, now)
        self._begin_in_turn(now)

    # -- requests -----------------------------------------------------------------------------------------------------

    def queue(self, requests: list[Request], now: float) -> None:
        """Let requests wait for admission, those first for the disk that have more there than here."""
        self._waiting.add([request for request in requests if not self._reads(request, now)])

    def remove(self, request: Request) -> None:
        """Remove one that waits. What is being read for it comes all the same."""
        if request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
        elif request in self._in_turn:
            self._in_turn.remove(request)
        else:
            next(readers for readers in self._readers.values() if request in readers).remove(request)

    def end_overdue(self, now: float) -> None:
        """Let those go on who have waited for the disk for too long."""
        if not (self._readers or self._in_turn):
            return
        loading = itertools.chain(self._in_turn, *self._readers.values())
        overdue = [request for request in loading if now >= request.disk_deadline]
        for request in overdue:
            self.remove(request)
            request.status = RequestStatus.WAITING
        self._waiting.add(overdue)

    def _reads(self, request: Request, now: float) -> bool:
        """Does the request wait for the disk from now on?"""
        if request.reads == 0:
            request.disk_deadline = now + DISK_TIMEOUT_S
        found = None
        if not request.has_claim and request.reads < MAX_READS and now < request.disk_deadline:
            found = self._find(request)
        request.status = RequestStatus.WAITING
        if found is None:
            return False
        if not self._begin(request, found, now):
            if not self._readers:
                return False  # nobody makes room
            self._in_turn.append(request)
        request.status = RequestStatus.LOADING
        return True

    def _find(self, request: Request) -> OnDisk | None:
        if self._disk is None:
            return None
        return self._disk.find(request.namespace, request.token_ids.view(0, request.prefix_limit))

    def _begin(self, request: Request, found: OnDisk, now: float) -> bool:
        """Begin to read for a request, or join whoever reads it. False if it must wait for its turn."""
        assert self._disk is not None
        fence = found.under_way or self._disk.begin_read(found, request.disk_deadline - now)
        if fence is None:
            return False
        request.reads += 1
        self._readers.setdefault(fence, []).append(request)
        return True

    def _begin_in_turn(self, now: float) -> None:
        """Let those begin whose turn it is, as far as there is room."""
        while self._in_turn:
            request = self._in_turn[0]
            found = self._find(request)
            begun = found is not None and self._begin(request, found, now)
            if not begun and found is not None and self._readers:
                return
            self._in_turn.popleft()
            if not begun:
                request.status = RequestStatus.WAITING
                self._waiting.add([request])
