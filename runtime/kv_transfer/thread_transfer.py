"""Copies between the KV pool of a CPU and the host's pool, by a thread of its own.

    order_copies ─▶ [groups of loads], [stores] ─▶ thread: a layer of the first group, else a piece of a store ─▶ poll

Loads go before stores: steps wait for loads, and nothing waits for stores. A store is made in pieces, so that a load
waits for one of them at most; it ends as a whole.

A step on a CPU is over when its launch returns, and orders come from the same thread. So whatever a copy reads was
written before it was ordered, and nothing that it writes is still being read. Copies never meet each other either:
their slots are locked, or wait for fences, until `poll` has reported them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ...memory_pool.stores.host_pool import HostPool
from ...memory_pool.stores.host_state_pool import HostStatePool
from ...radix.tiers.host_tier import TierCopy
from .transfer import Ended, check_loads, describe

logger = logging.getLogger(__name__)

PIECE_BYTES = 2**22
"""Bytes of a store copied at a time: about half a millisecond."""


@dataclass(slots=True, eq=False)
class _Copy:
    what: TierCopy
    seconds: float = 0.0
    stored: int = 0
    """Tokens of a store that have been copied."""
    state_layers: int = 0
    """Layers of the state of a store that have been copied, after all tokens."""


@dataclass(slots=True, eq=False)
class _Group:
    """Loads of one order."""

    loads: list[_Copy]
    """The loads that have not failed."""
    layers: int = 0
    """Layers that have been copied, for all loads; -1 while there are recurrent states to come first."""


class ThreadTransfers:
    """See `Transfers`, and the module's docstring.

    wake: called by the thread each time something has ended, and by no other, so that a sleeping event loop polls. A
    ZMQ socket in it must be this thread's own.
    """

    def __init__(
        self,
        pool: HostPool,
        wake: Callable[[], None],
        *,
        states: HostStatePool | None = None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._pool = pool
        self._states = states
        self._wake = wake
        self._piece_tokens = max(1, piece_bytes // max(1, pool.page_nbytes)) * pool.page_size
        self._under_way = 0
        self._changed = threading.Condition()
        """Held for a moment at a time, never during a copy. It guards all below."""
        self._groups: deque[_Group] = deque()
        self._stores: deque[_Copy] = deque()
        self._in_progress: _Group | _Copy | None = None
        """The copy in progress; the first of its queue."""
        self._failed: dict[int, str] = {}
        """Loads that failed and have not been polled: fence -> why."""
        self._ended: list[Ended] = []
        self._closing = False
        self._over = False
        self._thread = threading.Thread(target=self._run, name="baton-transfer", daemon=True)
        self._thread.start()

    # -- the scheduler's thread ----------------------------------------------------------------------------------------

    @property
    def loading(self) -> bool:
        return bool(self._groups or self._failed)

    @property
    def under_way(self) -> int:
        return self._under_way

    def order_copies(self, copies: Sequence[TierCopy]) -> None:
        if not copies:
            return
        loads = [_Copy(copy) for copy in copies if not copy.to_host]
        stores = [_Copy(copy) for copy in copies if copy.to_host]
        self._under_way += len(copies)
        with self._changed:
            if loads:
                self._groups.append(_Group(loads, -1 if any(load.what.device_state for load in loads) else 0))
            self._stores += stores
            if self._closing or self._over:
                self._give_up()
            self._changed.notify_all()

    def wait_layer(self, layer: int) -> None:
        if not (self._groups or self._failed):
            return
        with self._changed:  # the last group is the last to come
            while not self._failed and self._groups and self._groups[-1].layers <= layer:
                self._changed.wait()
            check_loads(self._failed)

    def wait_states(self) -> None:
        self.wait_layer(-1)

    def poll(self) -> list[Ended]:
        if not self._ended:
            return []
        with self._changed:
            ended, self._ended = self._ended, []
            for copy in ended:
                self._failed.pop(copy.fence, None)
        self._under_way -= len(ended)
        return ended

    def close(self, timeout: float) -> bool:
        with self._changed:
            self._closing = True
            self._give_up()
            self._changed.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # -- with the lock -------------------------------------------------------------------------------------------------

    def _give_up(self) -> None:
        """Fail all copies but the one in progress."""
        reason = "the server is closing" if self._closing else "the thread that copies has failed"
        for group in [group for group in self._groups if group is not self._in_progress]:
            self._groups.remove(group)
            for load in group.loads:
                self._fail(load, reason)
        for store in [store for store in self._stores if store is not self._in_progress]:
            self._stores.remove(store)
            self._fail(store, reason)

    def _fail(self, copy: _Copy, reason: str) -> None:
        self._ended.append(Ended(copy.what.fence, False, copy.seconds))
        if not copy.what.to_host:
            self._failed[copy.what.fence] = f"a {describe(copy.what)} failed: {reason}"

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (work := self._next_work()) is not None:
                ended = self._load_layer(work) if isinstance(work, _Group) else self._store_piece(work)
                if ended:
                    self._wake_loop()
        except BaseException:
            logger.exception("the thread for copies of KV has failed; nothing more is stored on the host or loaded")
        with self._changed:
            self._over, self._in_progress = True, None
            self._give_up()
            self._changed.notify_all()
        self._wake_loop()

    def _next_work(self) -> _Group | _Copy | None:
        """Wait for the next group or store; None once the thread must end."""
        with self._changed:
            self._in_progress = None
            while not (self._groups or self._stores or self._closing):
                self._changed.wait()
            if not self._closing:
                self._in_progress = self._groups[0] if self._groups else self._stores[0]
            return self._in_progress

    def _load_layer(self, group: _Group) -> bool:
        """Copy the states, or the next layer, of all loads of the group. True if any copy has ended."""
        failures: list[tuple[_Copy, str]] = []
        for load in group.loads:
            reason = self._perform(load, partial(self._load_part, load.what, group.layers))
            if reason is not None:
                failures.append((load, reason))
        with self._changed:
            for load, reason in failures:
                group.loads.remove(load)
                self._fail(load, reason)
            group.layers += 1
            over = group.layers >= self._pool.num_layers or not group.loads
            if over:
                self._groups.popleft()
                self._ended += [Ended(load.what.fence, True, load.seconds) for load in group.loads]
            self._changed.notify_all()
        return over or bool(failures)

    def _load_part(self, load: TierCopy, layer: int) -> None:
        if layer >= 0:
            self._pool.load(load.host_slots, load.device_slots, slice(layer, layer + 1))
        elif load.device_state:
            assert self._states is not None
            self._states.load(load.host_state, load.device_state)

    def _store_piece(self, store: _Copy) -> bool:
        """Copy the next tokens of a store, or the next layer of its state. True if it has ended."""
        reason = self._perform(store, partial(self._store_part, store))
        num_layers = self._states.num_layers if self._states is not None and store.what.device_state else 0
        if reason is None and (store.stored < len(store.what.host_slots) or store.state_layers < num_layers):
            return False
        with self._changed:
            self._stores.popleft()
            if reason is not None:
                self._fail(store, reason)
            else:
                self._ended.append(Ended(store.what.fence, True, store.seconds))
        return True

    def _store_part(self, store: _Copy) -> None:
        what, piece = store.what, slice(store.stored, store.stored + self._piece_tokens)
        if store.stored < len(what.host_slots):
            store.stored = piece.stop
            self._pool.store(what.device_slots[piece], what.host_slots[piece])
            return
        assert self._states is not None
        self._states.store(what.device_state, what.host_state, store.state_layers)
        store.state_layers += 1

    def _perform(self, copy: _Copy, part: Callable[[], None]) -> str | None:
        """Make a part of a copy. Returns why that failed, if it did."""
        began = time.perf_counter()
        try:
            part()
        except Exception as error:
            logger.error("a %s failed", describe(copy.what), exc_info=error)
            return f"{type(error).__name__}: {error}"
        finally:
            copy.seconds += time.perf_counter() - began
        return None

    def _wake_loop(self) -> None:
        try:
            self._wake()
        except Exception as error:
            logger.error("cannot wake the event loop; it finds ended copies at its next poll", exc_info=error)
