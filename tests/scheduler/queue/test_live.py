"""The live requests of each rid."""

from __future__ import annotations

from baton.scheduler.queue.live import LiveRequests
from tests.doubles.policy_scene import waiting_request


def test_siblings_go_one_by_one_and_the_rid_with_the_last() -> None:
    live, pair, alone = LiveRequests(), [waiting_request(0), waiting_request(0)], [waiting_request(1)]
    first, second = pair
    live.add_siblings("r0", pair)
    live.add_siblings("r1", alone)
    assert len(live) == 2 and live.rids == ["r0", "r1"] and list(live) == [first, second, *alone]
    live.remove_request(first)
    assert "r0" in live and live.siblings_of("r0") == [second]
    live.remove_request(second)
    assert "r0" not in live and live.siblings_of("r0") == [] and live.rids == ["r1"]


def test_those_before_a_time_are_told_and_no_others() -> None:
    live = LiveRequests()
    for number in range(4):
        live.add_siblings(f"r{number}", [waiting_request(number)])  # arrives after so many seconds
    assert [len(live.rids_before(arrival)) for arrival in (0.0, 0.5, 1.0, 3.5)] == [0, 1, 1, 4]
    assert live.rids_before(2.0) == ["r0", "r1"]
