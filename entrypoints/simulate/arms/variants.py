"""Policies that only a simulation can have, or needs: handoff told the future, and handoff without one of its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ....scheduler.jobs.job import FinishedStep
from ....scheduler.policies.base import BasePolicy
from ....scheduler.policies.handoff import Handoff
from ....scheduler.policies.policy import SchedulePolicy
from ....scheduler.policies.tools import PolicyTools
from ....scheduler.request import Request

Away = Mapping[str, float]
"""For how many seconds a job is away after a turn, by the turn's rid."""

SLACK_S = 5.0
"""An oracle's pin outlasts the return by this, as the step that runs then has to end first."""


class Oracle(Handoff):
    """Handoff that knows when each job is back: what is back within T_fill is pinned until then, all else is let go."""

    def __init__(self, tools: PolicyTools, away: Away) -> None:
        super().__init__(tools)
        self._away = away

    def ttl(self, step: FinishedStep, now: float) -> float:
        if step.has_copy:
            return 0.0
        away_s = self._away[step.rid]
        return away_s + SLACK_S if away_s <= self._tools.fill_time.seconds else 0.0


class NoPins(Handoff):
    """Handoff that keeps nothing while a tool runs."""

    def ttl(self, step: FinishedStep, now: float) -> float:
        return 0.0


class NoOrder(Handoff):
    """Handoff whose steps go first come, first served."""

    def rank(self, waiting: list[Request], now: float) -> list[Request]:
        return waiting

    def victim(self, running: Sequence[Request], prefilling: Request | None, now: float) -> Request:
        return BasePolicy.victim(self, running, prefilling, now)


class NoRetire(Handoff):
    """Handoff that does not care which jobs are over."""

    retires_jobs = False


VARIANTS: dict[str, Callable[[PolicyTools, Away], SchedulePolicy]] = {
    "oracle": Oracle,
    "handoff-no-pins": lambda tools, away: NoPins(tools),
    "handoff-no-order": lambda tools, away: NoOrder(tools),
    "handoff-no-retire": lambda tools, away: NoRetire(tools),
}
