"""Snapshots of the tree that clients read page by page."""

from __future__ import annotations

from collections import OrderedDict

from ...runtime.live_reports.snapshot import Snapshot

MAX_HELD = 2

UNREAD_S = 120.0
"""Seconds after which an unread snapshot is dropped."""


class HeldSnapshots:
    """Snapshots by id, least recently read first. Time is an argument, in seconds."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, tuple[Snapshot, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def hold_snapshot(self, snapshot: Snapshot, now: float) -> None:
        """Keep a snapshot; beyond `MAX_HELD` the least recently read one is dropped."""
        self._held[snapshot.id] = snapshot, now
        self._held.move_to_end(snapshot.id)
        self._drop_unread(now)
        while len(self._held) > MAX_HELD:
            self._held.popitem(last=False)

    def find_snapshot(self, id: str, now: float) -> Snapshot | None:
        """The snapshot, or None if it is unknown or was dropped."""
        self._drop_unread(now)
        if id not in self._held:
            return None
        snapshot, _ = self._held[id]
        self.hold_snapshot(snapshot, now)
        return snapshot

    def _drop_unread(self, now: float) -> None:
        for id in [id for id, (_, read) in self._held.items() if now - read > UNREAD_S]:
            del self._held[id]
