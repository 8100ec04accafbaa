"""Health is refused as soon as a process has been silent for ten seconds."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, cast

import pytest

from baton.entrypoints.http.health_routes import HealthRoutes, Readiness
from baton.entrypoints.http_statuses import status_of
from baton.entrypoints.server_args import compose
from baton.scheduler.outcome import RequestRefused


@dataclass
class Manager:
    seconds_since_heartbeat: float
    is_ready: bool = True


@pytest.mark.parametrize(
    ("silent", "watchdog", "is_well"), [(0.0, 300, True), (9.9, 300, True), (10.1, 300, False), (3.5, 3, False)]
)
def test_health_fails_when_a_process_is_silent(silent: float, watchdog: int, is_well: bool) -> None:
    args = compose({"model_path": "m", "watchdog_timeout": watchdog})
    routes = HealthRoutes(cast(Any, Manager(silent)), args, Readiness(warmed_up=True))
    for probe in (routes.health, routes.ready):
        if is_well:
            assert asyncio.run(probe()).status_code == 200
        else:
            with pytest.raises(RequestRefused, match="silent") as caught:
                asyncio.run(probe())
            assert (status_of(caught.value), caught.value.code) == (503, "unhealthy")
