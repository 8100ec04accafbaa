"""The HTTP process's side of watching: asks the worker for reports and walks, and puts together what comes."""

from __future__ import annotations

import asyncio
import time

from ...scheduler.outcome import RequestRefused
from ..channels import Sender
from ..control_client import Availability
from ..messages import TreeRows, WalkTree, WatchReport, WatchRequests
from .overview import Overview
from .snapshot import Snapshot, SnapshotBuilder

WATCH_S = 4.0
"""For so long the worker reports, if nobody asks again. `RENEW_S` leaves room for a loop that is late."""

RENEW_S = 1.0

WALK_S = 180.0
"""The longest that a walk is waited for: a quarter of a million nodes take a minute or two."""


class WatchClient:
    """Lives on the TokenizerManager's loop, which hands it what comes."""

    def __init__(self, sender: Sender, availability: Availability) -> None:
        self._sender = sender
        self._availability = availability
        self.overview = Overview()
        self._reported = asyncio.Event()
        self._builder = SnapshotBuilder()
        self._walk: asyncio.Future[Snapshot] | None = None
        self._heard_at = time.monotonic()

    @property
    def t(self) -> float:
        """Seconds since the worker started, on its clock as far as it is known."""
        return self.overview.t + time.monotonic() - self._heard_at

    def watch(self) -> None:
        """Have the worker report for `WATCH_S` from now on. Raises RequestRefused."""
        self._availability.check()
        self._sender.send(WatchRequests(seconds=WATCH_S))

    async def reported(self) -> None:
        """Wait until a report has come whole, since the last call. One task may."""
        await self._reported.wait()
        self._reported.clear()

    async def wait_closed(self) -> None:
        """Wait until the server ends."""
        await self._availability.wait_closed()

    async def walk(self, *, with_heads: bool) -> Snapshot:
        """What the tree holds, of the walk that is under way or of a new one. Raises RequestRefused."""
        self._availability.check()
        if self._walk is None:
            self._walk = asyncio.get_running_loop().create_future()
        self._sender.send(WalkTree(with_heads=with_heads))  # the worker takes no notice while it walks
        try:
            return await asyncio.wait_for(asyncio.shield(self._walk), WALK_S)
        except TimeoutError:
            raise RequestRefused(
                f"the worker did not see all of its cache within {WALK_S:g} s", status=504, code="timeout"
            ) from None

    # -- what the manager calls ------------------------------------------------------------------------------------

    def began(self) -> None:
        """The worker has just started."""
        self._heard_at = time.monotonic()

    def take(self, message: WatchReport | TreeRows) -> None:
        if isinstance(message, WatchReport):
            self.overview.merge(message)
            self._heard_at = time.monotonic()
            if message.is_last:
                self._reported.set()
        elif (snapshot := self._builder.add(message)) is not None:
            walk, self._walk = self._walk, None
            if walk is not None and not walk.done():
                walk.set_result(snapshot)

    def fail_all(self, error: RequestRefused) -> None:
        """Raise ``error`` in everybody who waits for a walk."""
        walk, self._walk = self._walk, None
        if walk is not None and not walk.done():
            walk.set_exception(error)
            walk.exception()  # if nobody waits any more, nobody need hear of it
