"""A worker's side of watching, for tests of the HTTP process's: it answers what it is sent as the test says."""

from __future__ import annotations

from typing import Any

import numpy as np

from baton.runtime.control_client import Availability
from baton.runtime.live_reports.report_client import LiveReportClient
from baton.runtime.messages import TreeRows, WalkTree, WatchReport, WatchRequests
from baton.runtime.prompt import ModelLimits
from baton.scheduler.live_view.reports import Life, LoadNow
from tests.doubles.tree_snapshots import snapshot_of


class WatchedWorker:
    """``sent``: to the worker."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.availability = Availability()
        self.availability.mark_ready(ModelLimits(context_length=100, vocab_size=100))
        self.client = LiveReportClient(self, self.availability)  # type: ignore[arg-type]

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def asked(self, kind: type) -> int:
        return sum(isinstance(message, kind) for message in self.sent)

    @property
    def walks_asked(self) -> int:
        return self.asked(WalkTree)

    @property
    def watches_asked(self) -> int:
        return self.asked(WatchRequests)

    def report(self, t: float, *lives: Life, queries: int = 0) -> None:
        """A whole report."""
        load = LoadNow(*[queries] * len(LoadNow.__struct_fields__))
        self.client.take_message(WatchReport(t=t, load=load, running=[], waiting=[], leases=[], jobs=[]))
        self.client.take_message(WatchReport(t=t, lives=[*lives]))
        self.client.take_message(WatchReport(t=t, is_last=True))

    def walked(self, nodes: int) -> None:
        """A walk ends that has seen so many nodes."""
        snapshot = snapshot_of([-1] * nodes)
        heads = snapshot.heads.astype(np.int32).tobytes()
        self.client.take_message(
            TreeRows(is_first=True, rows=snapshot.rows.tobytes(), heads=heads, names=("",), end=snapshot.end)
        )


def life(rid: str, output: int = 0, end: str | None = None) -> Life:
    return Life(rid, 0, 0.0, 5, 0, output, [("queued", 0.0, None, 5)], end=end)  # type: ignore[arg-type]
