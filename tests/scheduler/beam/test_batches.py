"""Beam searches beside others in the scheduler: shared batches, little room, aborts, failed steps change no result."""

from __future__ import annotations

import pytest

from baton.scheduler.batch import StepResult
from tests.doubles.beam_search_scene import DEPTHS, EOS, PROMPT, add, check, search
from tests.doubles.kv_echo import expected_output
from tests.doubles.scheduler_harness import PAGES, Harness


@PAGES
@DEPTHS
def test_searches_and_requests_share_batches(page_size, depth) -> None:
    harness = Harness(num_tokens=8192, page_size=page_size, rows=40, chunk=24, depth=depth, eos=EOS)
    wanted = {}
    for number in range(4):
        prompt = [number, *PROMPT[: 20 + number]]
        wanted[f"s{number}"] = prompt, search(2 + 3 * number, 4 + number, n=2)
        add(harness, f"s{number}", *wanted[f"s{number}"])
        harness.add(f"r{number}", prompt[::-1], 12)
        harness.step()
    harness.run()
    for rid, (prompt, params) in wanted.items():
        check(harness, rid, prompt, params)
    for number in range(4):
        prompt = [number, *PROMPT[: 20 + number]][::-1]
        assert harness.outcomes[f"r{number}", 0].tokens == expected_output(prompt, 12, frozenset(EOS))


def test_searches_of_one_prompt_share_its_prefix() -> None:
    harness = Harness(num_tokens=4096, page_size=16, rows=32)
    prompt = list(range(100))
    for rid in ("a", "b", "c"):
        add(harness, rid, prompt, search(8, 4))
    harness.run()
    assert harness.model.computed_tokens <= 100 + 2 * 4 + 3 * 8 * 3, "96 of the prompt's tokens are computed once"
    for rid in ("a", "b", "c"):
        check(harness, rid, prompt, search(8, 4))


@PAGES
@DEPTHS
def test_retracted_search_resumes_with_same_results(page_size, depth) -> None:
    """A pool that holds one of them at a time: the newest gives way, and goes on from the step it had reached."""
    pool = {1: 260, 16: 640, 64: 1280}[page_size]
    harness = Harness(num_tokens=pool, page_size=page_size, rows=40, chunk=64, depth=depth)
    harness.scheduler._reserve._ratio = 0.0  # admission is too careful for this test otherwise
    new = 40 if page_size == 64 else 16
    wanted = {f"s{n}": ([n, *PROMPT], search(8, new, n=8)) for n in range(3)}
    for rid, (prompt, params) in wanted.items():
        add(harness, rid, prompt, params)
    harness.add("plain", PROMPT, 40)
    harness.run()
    retracted = [outcome.request.retractions for outcome in harness.outcomes.values() if outcome.request is not None]
    assert sum(retracted) > 0, "the test needs pressure"
    for rid, (prompt, params) in wanted.items():
        check(harness, rid, prompt, params)
    assert harness.outcomes["plain", 0].tokens == expected_output(PROMPT, 40)


@PAGES
@DEPTHS
def test_abort_at_every_step_frees_everything(page_size, depth) -> None:
    for steps in range(12):
        harness = Harness(num_tokens=2048, page_size=page_size, rows=20, chunk=16, depth=depth)
        add(harness, "a", PROMPT, search(6, 9))
        add(harness, "b", PROMPT[5:], search(5, 7))
        for _ in range(steps):
            harness.step()
        harness.abort("a")
        harness.run()
        check(harness, "b", PROMPT[5:], search(5, 7))
        harness.scheduler.flush_cache()
        assert harness.allocator.free_tokens == 2048 and harness.pool.num_free == harness.pool.num_rows


def test_aborted_search_pages_are_quarantined_until_step_ends() -> None:
    harness = Harness(num_tokens=512, page_size=16, rows=8, depth=2)
    add(harness, "a", PROMPT, search(4, 9))
    request = harness.outcomes["a", 0].request
    assert request is not None
    while request.beam_kv is None or not request.num_output_placeholders:
        harness.step()
    held, free = len(harness.scheduler._beams.pages(request)) * 16, harness.allocator.free_tokens
    harness.abort("a")
    assert held and harness.allocator.quarantined_tokens >= held and harness.allocator.free_tokens == free
    harness.run()
    harness.scheduler.flush_cache()
    assert harness.allocator.quarantined_tokens == 0 and harness.allocator.free_tokens == 512


def test_allocation_failures_change_no_search_result() -> None:
    for failing in range(30):
        harness = Harness(num_tokens=2048, page_size=16, rows=20, chunk=16)
        harness.allocator.should_fail = lambda call, failing=failing: call in (failing, failing + 1, failing + 5)
        add(harness, "a", PROMPT, search(6, 9, n=6))
        harness.add("r", PROMPT, 9)
        harness.run()
        check(harness, "a", PROMPT, search(6, 9, n=6))
        assert harness.outcomes["r", 0].tokens == expected_output(PROMPT, 9)


def test_failed_step_aborts_search_but_not_later_ones() -> None:
    harness = Harness(num_tokens=2048, page_size=16, rows=20)
    add(harness, "a", PROMPT, search(6, 9))
    for _ in range(3):
        harness.step()
    assert harness.scheduler.next_batch(10.0) is not None
    harness._take(harness.scheduler.fail_step(10.0, "no"))
    harness.verify()
    finish = harness.outcomes["a", 0].finish
    assert finish is not None and finish.type == "abort"
    add(harness, "b", PROMPT, search(6, 9))
    harness.run()
    check(harness, "b", PROMPT, search(6, 9))


@pytest.mark.parametrize("first", range(1, 5))
def test_failed_step_keeps_copies_of_waiting_search(first: int) -> None:
    """The search has forked, but finds no slots while a step is in flight; then a prefill of another request fails."""
    prompt, params = list(range(first, first + 37)), search(4, 4, n=4)
    harness = Harness(num_tokens=4096, page_size=16, rows=8, depth=2)
    scheduler = harness.scheduler
    add(harness, "a", prompt, params)
    harness.add("r", [5, 5, 5], 30)
    request = scheduler.live_requests[0]
    while request.beam_kv is None or request.num_output_placeholders or not harness._results:
        harness.step()
    calls = harness.allocator.calls
    harness.allocator.should_fail = lambda call: call == calls + 1  # the first is the fork's
    assert scheduler.next_batch(harness.now) is None and harness.allocator.calls == calls + 2
    harness.add("p", [9] * 40, 3)
    result = harness._results.popleft()
    assert isinstance(result, StepResult)
    harness._commit(result)
    batch = scheduler.next_batch(harness.now)
    (added,) = (request for request in scheduler.live_requests if request.rid == "p")
    assert batch is not None and batch.serials.tolist() == [added.serial]
    harness._take(scheduler.fail_step(harness.now, "no"))
    harness.run()
    finish = harness.outcomes["p", 0].finish
    assert finish is not None and finish.type == "abort"
    check(harness, "a", prompt, params)
    assert harness.outcomes["r", 0].tokens == expected_output([5, 5, 5], 30)


@PAGES
def test_nearly_finished_search_reserves_little_memory(page_size) -> None:
    pool, new, length = {1: (300, 60, 60), 16: (352, 60, 60), 64: (1088, 120, 200)}[page_size]
    harness = Harness(num_tokens=pool, page_size=page_size, rows=8)
    params = search(4, new, early_stopping="never")
    add(harness, "a", PROMPT, params)
    for _ in range(new - 10):
        harness.step()
    harness.add("r", list(range(500, 500 + length)), 5)
    request = harness.outcomes["r", 0].request
    assert request is not None
    for _ in range(2):
        harness.step()
    assert request.kv is not None and harness.outcomes["a", 0].finish is None
    harness.run()
    check(harness, "a", PROMPT, params)
    assert all(o.request is not None and o.request.retractions == 0 for o in harness.outcomes.values())
