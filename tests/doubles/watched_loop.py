"""An event loop with a reader of its reports."""

from __future__ import annotations

from typing import Any

from baton.runtime.messages import TreeRows, WatchReport, WatchRequests
from baton.scheduler.live_view.reports import Life
from tests.doubles.event_loop_rig import Rig


class WatchedLoop(Rig):
    """A turn takes a second. Time is that of the turns, which count from 1."""

    def __init__(self, *, overlap: bool = False, watched: bool = True, **options: Any) -> None:
        super().__init__(overlap=overlap, **options)
        self.seconds_per_turn = 1.0
        if watched:
            self.watch()

    def watch(self, seconds: float = 1e9) -> None:
        """In the next turn."""
        self.say(WatchRequests(seconds=seconds))

    def say(self, *messages: Any) -> None:
        """Let these arrive in the next turn."""
        self.inbox.append([*messages])
        self.loop.turn()

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.loop.turn()

    def until_idle(self) -> None:
        """And until all has been told."""
        for _ in range(2000):
            self.loop.turn()
            if self.scheduler.is_idle:
                break
        assert self.scheduler.is_idle
        self.turns(60)

    @property
    def reports(self) -> list[WatchReport]:
        return [message for message in self.sent if isinstance(message, WatchReport)]

    @property
    def rows(self) -> list[TreeRows]:
        return [message for message in self.sent if isinstance(message, TreeRows)]

    @property
    def lives(self) -> dict[tuple[str, int], Life]:
        """As they were told last."""
        return {(life.rid, life.index): life for report in self.reports for life in report.lives}

    def phases(self, rid: str, index: int = 0) -> list[tuple[str, float, float | None, int]]:
        return [*self.lives[rid, index].phases]
