"""Who waits for whom, in a whole scheduler: nobody for ever, and nobody longer than the rules say."""

from __future__ import annotations

import pytest

from baton.entrypoints.http_statuses import status_of
from baton.scheduler.outcome import RequestRefused
from baton.scheduler.request import Request, RequestStatus
from tests.doubles.kv_echo import expected_output, prompt_of
from tests.doubles.scheduler_harness import Harness


def request_of(harness: Harness, rid: str) -> Request:
    request = harness.outcomes[rid, 0].request
    assert request is not None
    return request


class TestIdleLeases:
    def scene(self, **more) -> Harness:
        """Idle leases hold 200 of 256 tokens, one request runs, and the next needs 60."""
        harness = Harness(num_tokens=256, leased_ratio=1.0, **more)
        for number in range(2):
            harness.add(f"idle{number}", prompt_of(99, number), 1, retain_ttl=1e6)
            harness.run()
        harness.add("running", prompt_of(5, 7), 45)
        harness.step()
        harness.add("next", prompt_of(60, 8), 2)
        return harness

    def test_long_idle_lease_breaks_for_waiting_request(self) -> None:
        harness = self.scene(lease_protection=20.0)
        while request_of(harness, "next").kv is None:
            harness.step()
        assert request_of(harness, "running").status is RequestStatus.RUNNING
        assert harness.scheduler.stats().leases_broken == 1, "no more than it takes"
        harness.run()
        assert harness.outcomes["next", 0].tokens == expected_output(prompt_of(60, 8), 2)

    def test_young_lease_does_not_break_for_newcomers(self) -> None:
        harness = self.scene(lease_protection=1000.0)
        while request_of(harness, "running").finish is None:
            assert request_of(harness, "next").kv is None and len(harness.scheduler._leases) == 2
            harness.step()
        harness.run()
        assert harness.scheduler.stats().leases_broken == 1, "now nothing runs, and any lease may break"

    def test_lease_protection_follows_measured_fill_time(self) -> None:
        """A step of 99 tokens takes a second: a pool of 256 fills in 2.6, once that has been measured."""
        harness = self.scene(chunk=256)
        for _ in range(4):
            harness.step()
        assert request_of(harness, "next").kv is None
        harness.scheduler._fill_time.record_step(9900, 0.0, 100.0)
        harness.step()
        assert request_of(harness, "next").kv is not None

    def test_claimed_lease_is_not_broken_for_newcomers(self) -> None:
        harness = self.scene(lease_protection=1.0, rows=2)
        harness.add("second", prompt_of(5, 9), 40)
        for number in range(2):
            harness.continue_from(f"idle{number}", f"child{number}", [1], 2)
        for _ in range(10):
            harness.step()
        assert harness.scheduler.stats().leases_broken == 0
        harness.run()
        assert all(request_of(harness, f"child{n}").inheritance.path == "handoff" for n in range(2))  # type: ignore[union-attr]


class TestDecodeShare:
    @pytest.mark.parametrize("interval", [1, 3, 8])
    @pytest.mark.parametrize("depth", [1, 2])
    def test_endless_prompts_do_not_starve_decodes(self, interval: int, depth: int) -> None:
        harness = Harness(num_tokens=4096, rows=64, chunk=64, depth=depth, decode_interval=interval, check=False)
        harness.add("running", prompt_of(20), 60)
        harness.step()
        gap = longest = number = 0
        while (outcome := harness.outcomes["running", 0]).finish is None:
            harness.add(f"p{number}", prompt_of(40, number), 1)
            number, before = number + 1, len(outcome.tokens)
            harness.step()
            gap = 0 if len(outcome.tokens) > before else gap + 1
            longest = max(longest, gap)
        assert longest <= interval + depth - 1 and number > 60
        assert harness.scheduler.stats().longest_gap == longest + 1
        assert outcome.tokens == expected_output(prompt_of(20), 60)

    def test_long_prompt_alternates_with_decodes(self) -> None:
        harness = Harness(num_tokens=1024, chunk=8, decode_interval=100)
        harness.add("running", prompt_of(5), 40)
        harness.step()
        harness.add("long", prompt_of(200, 1), 2)
        for _ in range(20):
            harness.step()
        assert len(harness.outcomes["running", 0].tokens) == 11

    def test_retraction_does_not_count_as_gap(self) -> None:
        harness = Harness(num_tokens=110, rows=4)
        for number in range(2):
            harness.add(f"r{number}", prompt_of(10, number), 60)
        harness.run()
        assert harness.scheduler.stats().retractions > 0
        assert harness.scheduler.stats().longest_gap <= 2, "a retracted request does not run"

    def test_gap_of_beam_search_is_counted(self) -> None:
        harness = Harness(decode_interval=4)
        harness.add("search", prompt_of(5), 20, beam_width=2)
        harness.step()
        for number in range(10):
            harness.add(f"p{number}", prompt_of(64, number + 1), 1)
        harness.run()
        assert harness.scheduler.stats().longest_gap == 5


class TestOvertaking:
    def flood(self, harness: Harness, steps: int) -> None:
        """One request after the other on a prompt that is cached already."""
        start = len(harness.outcomes)
        for number in range(start, start + steps):
            harness.add(f"hot{number}", [*prompt_of(60), number % 1000], 2)
            harness.step()
            if harness.outcomes["cold", 0].finish is not None:
                return

    def scene(self) -> Harness:
        """lpm, one row, and a prompt that everybody shares."""
        harness = Harness(num_tokens=2048, rows=4, policy="lpm", check=False)
        harness.add("first", prompt_of(60), 2)
        harness.run()
        for number in range(8):
            harness.add(f"early{number}", [*prompt_of(60), 1, number], 2)
        return harness

    def test_cold_request_is_not_starved(self) -> None:
        harness = self.scene()
        harness.add("cold", prompt_of(50, 3), 2)
        self.flood(harness, 2000)
        assert harness.outcomes["cold", 0].finish is not None

    def test_wide_search_is_not_starved(self) -> None:
        harness = self.scene()
        harness.add("cold", prompt_of(50, 3), 3, beam_width=4, n=1)
        self.flood(harness, 2000)
        assert harness.outcomes["cold", 0].finish is not None

    def test_lowest_priority_is_not_starved(self) -> None:
        harness = Harness(num_tokens=2048, rows=1, check=False)
        harness.add("first", prompt_of(9), 2, priority=5)
        harness.step()
        harness.add("cold", prompt_of(50, 3), 2)
        most, number = harness.scheduler._policy.max_overtakes, 0  # type: ignore[attr-defined]
        while harness.outcomes["cold", 0].finish is None and number < 3 * most:
            harness.add(f"urgent{number}", prompt_of(9, number), 2, priority=5)
            number += 1
            harness.step()
        assert most < number < 3 * most

    @pytest.mark.parametrize("is_overdue", [False, True])
    def test_overdue_request_does_not_wait_for_prefix_in_flight(self, is_overdue: bool) -> None:
        harness = Harness(depth=2, chunk=128)
        if is_overdue:
            harness.scheduler._policy.max_overtakes = 0  # type: ignore[attr-defined]
        harness.add("long", prompt_of(100), 2)
        harness.step()
        harness.add("same", prompt_of(90), 2)
        harness.step()
        assert (request_of(harness, "same").kv is not None) is is_overdue
        harness.run()


class TestRoom:
    def test_admissions_in_one_step_count_earlier_reserves(self) -> None:
        """Each will want 0.7 × 60 tokens more: for both, prompts included, that is 164."""
        harness = Harness(num_tokens=150)
        harness.add("a", prompt_of(40, 1), 60)
        harness.add("b", prompt_of(40, 2), 60)
        harness.step()
        assert request_of(harness, "a").kv is not None and request_of(harness, "b").kv is None
        harness.run()
        assert all(request_of(harness, rid).retractions == 0 for rid in "ab")

    def test_three_admissions_in_one_step_count_earlier_reserves(self) -> None:
        """0.7 × 60 tokens each: the third wants 20 + 3 × 42 beside the prompts of the others, which is 186."""
        harness = Harness(num_tokens=185)
        for seed, rid in enumerate("abc"):
            harness.add(rid, prompt_of(20, seed), 60)
        harness.step()
        assert [request_of(harness, rid).kv is not None for rid in "abc"] == [True, True, False]

    def test_search_reserves_pages_for_each_beam(self) -> None:
        harness = Harness(num_tokens=1024, page_size=16)
        harness.add("find", prompt_of(37), 20, beam_width=4)
        request, reserve = request_of(harness, "find"), harness.scheduler._reserve
        assert reserve.reserved_tokens(request) == 4 * 2 * 16, "5 of the prompt's tokens and 14 are two pages"
        while request.beams is None or request.beams.num_tokens < 13:
            harness.step()
        assert request.num_computed_beam_tokens == 12
        assert reserve.reserved_tokens(request) == 4 * 1 * 16, "5 + 13 + 4 are two pages, and one is full"

    def test_quarantined_pages_are_waited_for_before_breaking_lease(self) -> None:
        """Nothing runs but a step in flight; what it still writes comes back with it, and then there is room."""
        prompt = prompt_of(40)
        eos = (expected_output(prompt, 6)[3],)
        harness = Harness(num_tokens=128, page_size=16, depth=2, eos=eos, leased_ratio=1.0, lease_protection=1e9)
        harness.add("kept", prompt_of(20, 9), 1, retain_ttl=1e6, ignore_eos=True)
        harness.run()
        harness.add("ends", prompt, 60)
        while harness.outcomes["ends", 0].finish is None:
            harness.step()
        assert harness.allocator.quarantined_tokens == 16
        harness.add("large", prompt_of(90, 3), 2, ignore_eos=True)
        harness.run()
        assert harness.scheduler.stats().leases_broken == 0 and len(harness.scheduler._leases) == 1
        assert harness.outcomes["large", 0].tokens == expected_output(prompt_of(90, 3), 2)


class TestVictims:
    def test_oldest_request_is_not_retracted_during_prefill(self) -> None:
        harness = Harness(num_tokens=196, chunk=16)
        harness.scheduler._reserve._ratio = 0.0
        harness.add("oldest", prompt_of(180), 4)
        harness.add("urgent", prompt_of(10, 1), 60, priority=1)
        while not any(request.retractions for request in harness.scheduler.live_requests):
            harness.step()
        assert request_of(harness, "oldest").retractions == 0
        assert request_of(harness, "urgent").retractions == 1
        harness.run()


class TestLimits:
    def test_a_full_queue_refuses_with_429(self) -> None:
        harness = Harness(rows=1, max_queued_requests=3)
        harness.add("running", prompt_of(9), 30)
        harness.step()
        harness.add("one", prompt_of(9, 1), 2)
        with pytest.raises(RequestRefused, match="1 requests wait already, and the queue holds 3") as refused:
            harness.add("three", prompt_of(9, 2), 2, n=3)
        assert status_of(refused.value) == 429 and refused.value.code == "queue_full"
        harness.add("two", prompt_of(9, 2), 2, n=2)
        with pytest.raises(RequestRefused):
            harness.add("four", prompt_of(9, 3), 2)
        harness.abort("one")
        harness.add("four", prompt_of(9, 3), 2)
        harness.run()

    def test_continuations_may_exceed_queue_limit_by_max_leases(self) -> None:
        harness = Harness(rows=1, leases=2, max_queued_requests=2)
        harness.add("running", prompt_of(9), 10)
        harness.step()
        for number in range(4):
            harness.continue_from("running", f"child{number}", [1], 2)
        with pytest.raises(RequestRefused, match="4 requests wait already"):
            harness.continue_from("running", "child4", [1], 2)
        with pytest.raises(RequestRefused, match="4 requests wait already"):
            harness.add("plain", prompt_of(9, 1), 2)
        harness.abort("child0")
        harness.continue_from("running", "child4", [1], 2)
        harness.run()
        assert harness.scheduler.num_parked == 0

    def test_requests_time_out_in_any_state(self) -> None:
        harness = Harness(rows=1, request_timeout=10.0)
        harness.add("running", prompt_of(9), 100)
        harness.add("waiting", prompt_of(9, 1), 2)
        harness.continue_from("running", "parked", [1], 2)
        for _ in range(5):
            harness.step()
        harness.add("later", prompt_of(9, 2), 2)
        for _ in range(4):
            harness.step()
            assert not harness.scheduler.time_out(harness.now)
        harness.now = 10.5
        events = harness.scheduler.time_out(harness.now)
        assert [event.request.rid for event in events] == ["running", "parked", "waiting"]
        statuses = [event.refusal and (status_of(event.refusal), event.refusal.code) for event in events]
        assert statuses == [(408, "request_timeout"), (409, "parent_failed"), (408, "request_timeout")]
        harness._take(events)
        with pytest.raises(RequestRefused, match="request-timeout") as refused:
            harness.continue_from("running", "child", [1], 2)
        assert status_of(refused.value) == 409
        harness.run()
        assert harness.outcomes["later", 0].tokens == expected_output(prompt_of(9, 2), 2)

    def test_retain_ttl_is_capped(self) -> None:
        harness = Harness(max_retain_ttl=30.0)
        harness.add("a", prompt_of(9), 2, retain_ttl=1e6)
        harness.run()
        (lease,) = harness.scheduler.live_leases()
        assert lease.deadline == lease.idle_since + 30.0

    def test_one_client_holds_all_leases_only_while_no_other_needs_them(self) -> None:
        harness = Harness(num_tokens=2048, leases=4)

        def holders() -> list[str]:
            return [lease.client for lease in harness.scheduler.live_leases()]

        for number in range(6):
            harness.add(f"a{number}", prompt_of(20, number), 2, retain_ttl=1e6, client="a")
            harness.run()
        assert holders() == ["a", "a", "a", "a"]
        for number in range(6):
            harness.add(f"b{number}", prompt_of(20, 50 + number), 2, retain_ttl=1e6, client="b")
            harness.run()
        assert holders() == ["a", "a", "b", "b"]
        harness.add("a7", prompt_of(20, 7), 2, retain_ttl=1e6, client="a")
        harness.run()
        assert sorted(holders()) == ["a", "a", "b", "b"]
