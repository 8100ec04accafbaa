"""Health is refused as soon as a process has been silent for ten seconds."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, cast

import pytest
from msgspec.structs import replace

from baton.entrypoints.http.health_routes import HealthRoutes, Readiness, probe_of
from baton.entrypoints.http_statuses import status_of
from baton.entrypoints.server_args import compose
from baton.scheduler.outcome import RequestRefused
from baton.scheduler.token_buffer import pack_ids
from tests.doubles.scheduler_harness import Harness, Outcome


@dataclass
class Manager:
    seconds_since_heartbeat: float
    is_ready: bool = True
    start_phase: str = ""


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


@pytest.mark.parametrize(
    ("phase", "message"),
    [("recording steps", "the server is starting: recording steps"), ("", "the server is shutting down")],
)
def test_a_server_that_is_not_ready_says_what_it_does(phase: str, message: str) -> None:
    manager = Manager(0.0, is_ready=False, start_phase=phase)
    routes = HealthRoutes(cast(Any, manager), compose({"model_path": "m"}), Readiness())
    for probe in (routes.health, routes.ready):
        with pytest.raises(RequestRefused) as caught:
            asyncio.run(probe())
        assert (status_of(caught.value), caught.value.code, caught.value.message) == (503, "not_ready", message)


def test_probe_leaves_nothing_beside_prompts_that_begin_alike() -> None:
    """A state where they part would be kept, and stored on every tier."""
    harness = Harness(states=8, host_tokens=512, host_states=8, block_tokens=16)
    harness.add("a client's", [0] * 40, 1)
    harness.run()
    assert harness.tiers is not None and harness.cache.states is not None
    before = len(harness.cache.states), harness.tiers.host.counts.stored, len(harness.tiers.blocks.snapshots)
    prompt = probe_of("probe", generates=True)
    (request,) = harness.scheduler.add_request(replace(prompt.spec, input_ids=pack_ids(prompt.input_ids or [])), 0.0)
    harness.outcomes[request.key] = Outcome(request=request)
    harness.run()
    harness.cache.evict_states(1, kept_too=False)  # its own, in the probes' namespace
    after = len(harness.cache.states), harness.tiers.host.counts.stored, len(harness.tiers.blocks.snapshots)
    assert after == before and request.finish is not None
