"""The life of leases, on the KV-echo model: granted, claimed, expired, released, broken, refused, never left behind."""

from __future__ import annotations

import pytest

from baton.radix.lease import LeaseState
from tests.doubles.continuation_scene import DEPTHS, inheritance, parent_ids, without_a_lease
from tests.doubles.kv_echo import expected_output, prompt_of
from tests.doubles.scheduler_harness import PAGES, Harness


def test_child_of_expired_lease_uses_cached_prefix() -> None:
    harness = Harness()
    prompt = prompt_of(40)
    harness.add("parent", prompt, 6, retain_ttl=5.0)
    harness.run()
    harness.now += 6
    harness.step()
    assert harness.scheduler.stats().leases_expired == 1
    full = parent_ids(harness, "parent", prompt)
    harness.continue_from("parent", "child", [2], 4)
    harness.run()
    assert harness.outcomes["child", 0].tokens == expected_output([*full, 2], 4)
    assert inheritance(harness, "child").path == "match"
    assert inheritance(harness, "child").recomputed_tokens == 1  # nobody evicted it


@pytest.mark.parametrize("late", [-0.5, 0.0, 0.5])
def test_child_arriving_around_lease_expiry(late: float) -> None:
    harness = Harness()
    prompt = prompt_of(40)
    harness.add("parent", prompt, 6, retain_ttl=5.0)
    harness.run()
    (lease,) = harness.scheduler.live_leases()
    harness.now = lease.deadline + late
    harness.continue_from("parent", "child", [2], 4)
    harness.run()
    assert inheritance(harness, "child").path == ("match" if late > 0 else "handoff")
    full = parent_ids(harness, "parent", prompt)
    assert harness.outcomes["child", 0].tokens == expected_output([*full, 2], 4)


def test_aborted_child_gives_lease_its_remaining_time_back() -> None:
    harness = Harness()
    harness.add("parent", prompt_of(40), 6, retain_ttl=50.0)
    harness.run()
    (lease,) = harness.scheduler.live_leases()
    remaining = lease.deadline - harness.now
    harness.continue_from("parent", "child", [2], 4)
    assert lease.state is LeaseState.CLAIMED
    harness.now += 1000
    harness.scheduler.expire_leases(harness.now)
    assert lease.is_live, "a claim stops the clock"
    harness.abort("child")
    assert lease.state is LeaseState.GRANTED and lease.deadline == harness.now + remaining


def test_leased_record_is_not_forgotten() -> None:
    harness = Harness(max_finished_requests=1)
    harness.add("leased", prompt_of(20), 3, retain_ttl=1000.0)
    harness.run()
    for i in range(3):
        harness.add(f"r{i}", prompt_of(20, i), 3)
        harness.run()
    harness.continue_from("leased", "child", [1], 2)
    harness.run()
    assert inheritance(harness, "child").path == "handoff"


def test_release_ends_the_lease_but_keeps_the_record() -> None:
    harness = Harness()
    harness.add("a", prompt_of(20), 3, retain_ttl=50.0)
    harness.run()
    assert harness.scheduler.release_leases("a")
    assert not harness.scheduler.release_leases("a")
    assert len(harness.scheduler._leases) == 0
    harness.continue_from("a", "b", [1], 2)
    harness.run()
    assert inheritance(harness, "b").path == "match"


def test_lease_over_budget_is_refused_and_reported() -> None:
    harness = Harness(num_tokens=128, leased_ratio=0.5)
    harness.add("a", prompt_of(90), 3, retain_ttl=50.0)
    harness.run()
    request = harness.outcomes["a", 0].request
    assert request is not None and request.retained is not None and request.retained.refused is not None
    assert len(harness.scheduler._leases) == 0
    harness.continue_from("a", "b", [1], 2)
    harness.run()
    assert inheritance(harness, "b").path == "match"


@PAGES
def test_lease_breaks_for_request_that_would_run_alone(page_size: int) -> None:
    harness = Harness(num_tokens=256, page_size=page_size, leased_ratio=1.0)
    harness.add("leased", prompt_of(100), 3, retain_ttl=1e6)
    harness.run()
    harness.add("large", prompt_of(200, 1), 20)
    harness.run()
    assert harness.outcomes["large", 0].tokens == expected_output(prompt_of(200, 1), 20)
    assert harness.scheduler.stats().leases_broken == 1
    harness.continue_from("leased", "child", [1], 4)
    harness.run()
    assert inheritance(harness, "child").path == without_a_lease(page_size)
    full = parent_ids(harness, "leased", prompt_of(100))
    assert harness.outcomes["child", 0].tokens == expected_output([*full, 1], 4)


@PAGES
@DEPTHS
def test_lease_broken_before_child_admission_is_no_handoff(page_size: int, depth: int) -> None:
    harness = Harness(num_tokens=512, page_size=page_size, depth=depth, leased_ratio=1.0, context=512)
    prompt = prompt_of(190)
    harness.add("parent", prompt, 3, retain_ttl=1e6)
    harness.run()
    harness.add("large", prompt_of(20, 1), 440)  # enters alone, and grows into the lease
    harness.step()
    harness.continue_from("parent", "child", [1], 50)  # claims the lease, but finds no room beside it
    harness.run()
    assert harness.scheduler.stats().leases_broken == 1
    full = [*parent_ids(harness, "parent", prompt), 1]
    assert harness.outcomes["child", 0].tokens == expected_output(full, 50)
    assert inheritance(harness, "child").path == without_a_lease(page_size)


@PAGES
def test_second_child_claiming_one_lease_is_no_handoff(page_size: int) -> None:
    harness = Harness(page_size=page_size)
    harness.add("parent", prompt_of(50), 9, retain_ttl=30.0)
    harness.run()
    harness.continue_from("parent", "a", [5], 4)
    harness.continue_from("parent", "b", [6], 4)
    harness.run()
    assert (inheritance(harness, "a").path, inheritance(harness, "b").path) == ("handoff", without_a_lease(page_size))


@pytest.mark.parametrize(("page_size", "disabled"), [(1, True), (16, False), (64, False)])
def test_keep_parent_child_without_room_beside_parent_still_runs(page_size: int, disabled: bool):
    harness = Harness(num_tokens=256, page_size=page_size, leased_ratio=1.0, disable_radix_cache=disabled)
    prompt = prompt_of(180)
    harness.add("parent", prompt, 10, retain_ttl=1e6)
    harness.run()
    harness.continue_from("parent", "child", [1], 60, keep_parent=True)
    harness.add("after", prompt_of(20, 1), 3)
    harness.run()
    full = [*parent_ids(harness, "parent", prompt), 1]
    assert harness.outcomes["child", 0].tokens == expected_output(full, 60)
    assert harness.outcomes["after", 0].finish is not None


def test_children_with_lease_do_not_starve_head_of_queue() -> None:
    harness = Harness(rows=1, check=False)
    harness.add("c0", prompt_of(20), 2, retain_ttl=1e6)
    harness.run()
    harness.continue_from("c0", "c1", [1], 2, retain_ttl=1e6)
    harness.add("plain", prompt_of(20, 1), 2)
    for stage in range(2, 200):
        harness.continue_from(f"c{stage - 1}", f"c{stage}", [1], 2, retain_ttl=1e6)  # parked, then first in line
        harness.step()
        harness.step()
        if harness.outcomes["plain", 0].finish is not None:
            break
    assert harness.outcomes["plain", 0].finish is not None
    harness.run()


def test_leases_without_reachable_rid_are_released() -> None:
    harness = Harness(num_tokens=1024, leased_ratio=1.0)
    prompt = prompt_of(30)
    harness.add("a", prompt, 20, n=2, retain_ttl=1e6)
    harness.step()
    first, second = (harness.outcomes["a", index].request for index in (0, 1))
    assert first is not None and second is not None
    while first.finish is None and second.finish is None:
        harness.step()
    if first.finish is None or second.finish is None:
        assert len(harness.scheduler._leases) == 1
        harness.abort("a")
        assert len(harness.scheduler._leases) == 0, "its rid is a tombstone: nobody can continue it"
    harness.add("b", prompt_of(20, 1), 3, retain_ttl=1e6)
    harness.run()
    harness.continue_from("b", "b", [1], 3)  # takes its parent's name, and with it the only way to the lease
    harness.abort("b")
    harness.now += 1
    harness.step()
    assert all(lease.kv is not None and lease.deadline > 1e4 for lease in harness.scheduler.live_leases())
    assert not [lease for lease in harness.scheduler.live_leases() if lease.tokens == 22]


def test_parent_without_retain_ttl_reports_no_lease() -> None:
    harness = Harness()
    harness.add("parent", prompt_of(20), 5)
    harness.step()
    harness.continue_from("parent", "child", [1], 2)
    harness.run()
    request = harness.outcomes["parent", 0].request
    assert request is not None and request.retained is None


def test_forked_copy_is_leased_to_client_of_child() -> None:
    harness = Harness()
    harness.add("parent", prompt_of(20), 9, client="parent's")
    harness.step()
    harness.continue_from("parent", "child", [1], 2, at="now", client="child's")
    (lease,) = harness.scheduler.live_leases()
    assert lease.client == "child's"
    harness.run()
