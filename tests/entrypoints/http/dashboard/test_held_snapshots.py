"""Snapshots that are read page by page: few, and not for ever."""

from __future__ import annotations

import dataclasses

from baton.entrypoints.http.dashboard.tree_routes import MAX_HELD, UNREAD_S, HeldSnapshots
from baton.runtime.live_reports.snapshot import Snapshot
from tests.doubles.tree_snapshots import snapshot_of


def named(id: str) -> Snapshot:
    return dataclasses.replace(snapshot_of([-1]), id=id)


def test_least_recently_read_snapshot_is_dropped_first() -> None:
    held = HeldSnapshots()
    for number in range(MAX_HELD):
        held.hold_snapshot(named(f"s{number}"), float(number))
    assert held.find_snapshot("s0", 5.0) is not None
    held.hold_snapshot(named("new"), 6.0)
    assert held.find_snapshot("s0", 7.0) is not None and held.find_snapshot("s1", 7.0) is None and len(held) == MAX_HELD


def test_unread_snapshots_expire() -> None:
    held = HeldSnapshots()
    held.hold_snapshot(named("a"), 0.0)
    assert held.find_snapshot("a", UNREAD_S) is not None, "which counts as read"
    assert held.find_snapshot("a", 2 * UNREAD_S) is not None
    assert held.find_snapshot("b", 3 * UNREAD_S + 1) is None and len(held) == 0
