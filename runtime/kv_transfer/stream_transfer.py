"""Copies between the KV pool of a GPU and pinned host memory, by streams of their own, one for each direction.

    compute   ── steps so far ──┬─────────────── step: layer 0 ──── layer 1 ── … ──▶
                                │ waits             ▲ waits           ▲
    up                          ├─▶ load: layer 0 ──┴─── layer 1 ─────┴ …
    down                        └─▶ store ─▶ event ─▶ poll

Everything is queued at the time of the order, and streams wait for each other on the device. A copy begins after the
steps that were launched before it: they may have read what a load overwrites, and written what a store reads. The end
of a copy wakes nothing; an idle event loop with copies under way polls from time to time.

Loads of one order are queued layer by layer. `layers_at_once` says how many layers are one piece: a copy without a
kernel of its own (`copy_pages_torch`) makes two transfers per page where it takes a single layer, and one per run of
neighbouring pages where it takes all.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...memory_pool.stores.host_pool import HostPool
from ...memory_pool.stores.host_state_pool import HostStatePool
from ...radix.tiers.host_tier import TierCopy
from .transfer import Ended, check_loads, describe

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Queued:
    """Copies that end together."""

    copies: list[TierCopy]
    began: Any
    """The event before them."""
    arrived: list[Any]
    """Loads: the event after the recurrent states, and after each layer. Ends with the event after all, also of a
    store."""

    @property
    def is_over(self) -> bool:
        return self.arrived[-1].query()

    def ended(self) -> list[Ended]:
        """Each with its share of the time, by tokens."""
        seconds = self.began.elapsed_time(self.arrived[-1]) / 1000
        tokens = max(1, sum(len(copy.host_slots) for copy in self.copies))
        return [Ended(copy.fence, True, seconds * len(copy.host_slots) / tokens) for copy in self.copies]


class StreamTransfers:
    """See `Transfers`, and the module's docstring. Called with the stream current that computes."""

    def __init__(
        self,
        pool: HostPool,
        device: torch.device,
        *,
        states: HostStatePool | None = None,
        layers_at_once: int = 1,
        cuda: Any = torch.cuda,
    ) -> None:
        """cuda: creates streams and events; tests pass a double."""
        self._pool = pool
        self._states = states
        self._cuda = cuda
        self._up, self._down = cuda.Stream(device), cuda.Stream(device)
        starts = range(0, pool.num_layers, layers_at_once)
        self._pieces = [range(start, min(start + layers_at_once, pool.num_layers)) for start in starts]
        self._loads: deque[_Queued] = deque()
        self._stores: deque[_Queued] = deque()
        self._failed: dict[int, str] = {}
        """Loads that failed and have not been polled: fence -> why."""
        self._ended: list[Ended] = []
        self._under_way = 0
        self._closed = False

    @property
    def loading(self) -> bool:
        return bool(self._failed) or bool(self._loads and not self._loads[-1].is_over)

    @property
    def under_way(self) -> int:
        return self._under_way

    @torch.inference_mode()  # the pools may have been made in it; torch then writes to them in no other
    def order_copies(self, copies: Sequence[TierCopy]) -> None:
        self._under_way += len(copies)
        if self._closed:
            for copy in copies:
                self._fail(copy, "the server is closing")
            return
        if loads := [copy for copy in copies if not copy.to_host]:
            self._queue_loads(loads)
        for copy in copies:
            if copy.to_host:
                self._queue_store(copy)

    def wait_layer(self, layer: int) -> None:
        check_loads(self._failed)
        if self._loads:  # those before them are on the same stream
            self._cuda.current_stream().wait_event(self._loads[-1].arrived[layer + 1])

    def wait_states(self) -> None:
        self.wait_layer(-1)

    def poll(self) -> list[Ended]:
        for queue in (self._loads, self._stores):
            while queue and queue[0].is_over:
                self._ended += queue.popleft().ended()
        ended, self._ended = self._ended, []
        for copy in ended:
            self._failed.pop(copy.fence, None)
        self._under_way -= len(ended)
        return ended

    def close(self, timeout: float) -> bool:
        """Wait for the queued copies, whatever the timeout: none can be cancelled."""
        self._closed = True
        for stream in (self._up, self._down):
            stream.synchronize()
        return True

    def _queue_loads(self, loads: list[TierCopy]) -> None:
        self._up.wait_stream(self._cuda.current_stream())
        sound, arrived = list(loads), []
        with self._cuda.stream(self._up):
            began = self._mark()
            for piece in (None, *self._pieces):
                for copy in list(sound):
                    try:
                        self._load(copy, piece)
                    except Exception as error:
                        sound.remove(copy)
                        self._give_up(copy, error, self._up)
                if piece is not None:
                    arrived += [self._mark()] * len(piece)
                else:
                    arrived.append(self._mark() if any(copy.device_state for copy in loads) else began)
        if sound:
            self._loads.append(_Queued(sound, began, arrived))

    def _load(self, copy: TierCopy, layers: range | None) -> None:
        """Load some layers; None: the state."""
        if layers is not None:
            self._pool.load(copy.host_slots, copy.device_slots, slice(layers.start, layers.stop))
        elif copy.device_state:
            assert self._states is not None
            self._states.load(copy.host_state, copy.device_state)

    def _queue_store(self, copy: TierCopy) -> None:
        self._down.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(self._down):
            began = self._mark()
            try:
                self._pool.store(copy.device_slots, copy.host_slots)
                if copy.device_state:
                    assert self._states is not None
                    self._states.store(copy.device_state, copy.host_state)
            except Exception as error:
                self._give_up(copy, error, self._down)
            else:
                self._stores.append(_Queued([copy], began, [self._mark()]))

    def _mark(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def _give_up(self, copy: TierCopy, error: Exception, stream: Any) -> None:
        """A copy could not be queued, or not all of it. Its slots must not be in use when that is reported, and it is
        reported soon, as each step until then fails: so this waits for the stream, the one thing here that does."""
        logger.error("a %s failed", describe(copy), exc_info=error)
        stream.synchronize()
        self._fail(copy, f"{type(error).__name__}: {error}")

    def _fail(self, copy: TierCopy, reason: str) -> None:
        self._ended.append(Ended(copy.fence, False, 0.0))
        if not copy.to_host:
            self._failed[copy.fence] = f"a {describe(copy)} failed: {reason}"
