"""The snapshots of the tree that somebody reads page by page."""

from __future__ import annotations

from collections import OrderedDict

from ...runtime.watching.snapshot import Snapshot

MAX_HELD = 2

UNREAD_S = 120.0
"""One that nobody asked for in this time is given up."""


class HeldSnapshots:
    """By id, the one that was read last at the end. Time is an argument, in seconds."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, tuple[Snapshot, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, snapshot: Snapshot, now: float) -> None:
        """Keep it; the one that was read longest ago goes, if there are too many."""
        self._held[snapshot.id] = snapshot, now
        self._held.move_to_end(snapshot.id)
        self._drop_unread(now)
        while len(self._held) > MAX_HELD:
            self._held.popitem(last=False)

    def find(self, id: str, now: float) -> Snapshot | None:
        """None for one that is gone, or never was."""
        self._drop_unread(now)
        if id not in self._held:
            return None
        snapshot, _ = self._held[id]
        self.hold(snapshot, now)
        return snapshot

    def _drop_unread(self, now: float) -> None:
        for id in [id for id, (_, read) in self._held.items() if now - read > UNREAD_S]:
            del self._held[id]
