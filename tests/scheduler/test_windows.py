"""Layers with a sliding window in a pool of their own: what requests hold there, what they find, and who gives way."""

from __future__ import annotations

from typing import Any

import pytest

from baton.memory_pool.window_pages import WindowPages, least_tokens
from baton.scheduler.outcome import RequestRefused
from baton.scheduler.stats import WindowPoolStats
from tests.doubles.kv_echo import expected_output, prompt_of
from tests.doubles.scheduler_harness import Harness

PAGES = pytest.mark.parametrize("page", [1, 16, 64])


def scene(page: int = 1, window: int = 20, **options: Any) -> Harness:
    return Harness(page_size=page, window=window, **{"num_tokens": 4096, "rows": 8, "context": 2048, **options})


def pool_of(harness: Harness) -> WindowPages:
    assert harness.windows is not None
    return harness.windows


def ask(harness: Harness, rid: str, prompt: list[int], new: int = 4, **more: Any) -> int:
    """Ask and wait. Returns the tokens that were found."""
    harness.add(rid, prompt, new, **more)
    harness.run()
    request = harness.outcomes[rid, 0].request
    assert request is not None
    assert harness.outcomes[rid, 0].tokens == expected_output(prompt, new, reach=pool_of(harness).window)
    return request.found.total


@PAGES
@pytest.mark.parametrize("window", [1, 20, 100])
@pytest.mark.parametrize("chunk", [7, 50, 500])
@pytest.mark.parametrize("length", [3, 19, 20, 21, 300])
def test_a_request_holds_its_window_alone(page: int, window: int, chunk: int, length: int) -> None:
    """Prompts shorter and longer than the window, chunks shorter and longer, pages longer than the window."""
    harness = scene(page, window, chunk=chunk)
    assert pool_of(harness).total_tokens == least_tokens(window, page, chunk)
    harness.add("a", prompt_of(length), 150, ignore_eos=True)
    (request,) = harness.scheduler.live_requests
    while not harness.scheduler.is_idle:
        harness.step()
        if request.kv is not None:
            held = request.kv.length - request.kv.window_start
            unknown = request.kv.length - request.committed_len
            assert held <= pool_of(harness).kept_tokens + unknown
    assert harness.outcomes["a", 0].tokens == expected_output(prompt_of(length), 150, reach=window)


@PAGES
def test_a_prefix_is_found_as_far_as_its_window_is_whole(page: int) -> None:
    """Where two prompts part, the window has gone; the second leaves it there for the third."""
    harness, system, finds = scene(page, chunk=64, window_tokens=384), prompt_of(640), []
    for user in range(4):
        finds.append(ask(harness, f"u{user}", [*system, *prompt_of(500, user + 1)]))
        if user == 0:
            harness.cache.evict_windows(384)
    assert finds == [0, 0, 640, 640]


@PAGES
@pytest.mark.parametrize("chunk", [100, 512, 2000])
@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_prompts_that_come_together_compute_their_beginning_once(page: int, chunk: int, policy: str) -> None:
    """The first leaves its window where they part, in the middle of a chunk. The second may begin at the end of an
    earlier chunk."""
    harness, system = scene(page, chunk=chunk, policy=policy, window_tokens=4096), prompt_of(640)
    prompts = {f"u{user}": [*system, *prompt_of(150, user + 1)] for user in range(4)}
    for rid, prompt in prompts.items():
        harness.add(rid, prompt, 4)
    harness.run()
    found = []
    for rid, prompt in prompts.items():
        outcome = harness.outcomes[rid, 0]
        assert outcome.request is not None and outcome.tokens == expected_output(prompt, 4, reach=20)
        found.append(outcome.request.found.total)
    assert found[0] == 0 and 560 < found[1] <= 640 and found[2:] == [640, 640]


@PAGES
@pytest.mark.parametrize("chunk", [7, 64, 500])
def test_samples_of_one_prompt_compute_it_once(page: int, chunk: int) -> None:
    finds = []
    for window in (0, 20):  # as without windows
        harness = scene(page, window, chunk=chunk, policy="lpm", window_tokens=2048)
        harness.add("a", prompt_of(200), 6, n=4)
        harness.run()
        every = [harness.outcomes["a", sample].request for sample in range(4)]
        finds.append([asked.found.total for asked in every if asked is not None])
    assert finds[0] == finds[1] and min(finds[1][1:]) >= 199 // page * page - chunk


@PAGES
def test_the_report_names_what_lacks_its_window(page: int) -> None:
    harness = scene(page, chunk=64)
    ask(harness, "a", prompt_of(640))
    ask(harness, "b", [*prompt_of(320), 1, 2])
    request = harness.outcomes["b", 0].request
    assert request is not None and request.cache_report is not None
    missed = [(span.reason, span.tokens) for span in request.cache_report.missed]
    assert missed == [("no_window", 320), ("unseen", 1), ("required", 1)]


@PAGES
def test_windows_are_counted_where_they_are(page: int) -> None:
    harness = scene(page, window_tokens=1024, chunk=64)
    assert harness.scheduler.stats().window_pool == WindowPoolStats(1024, 1024)
    ask(harness, "a", prompt_of(200))
    found = harness.scheduler.stats().window_pool
    assert found.free_tokens + found.evictable_tokens == 1024 and 19 <= found.evictable_tokens <= 200
    harness.cache.evict_windows(page)
    assert harness.scheduler.stats().window_pool.evicted_tokens >= page
    harness.add("b", prompt_of(200, 1), 9)
    harness.step()
    stats = harness.scheduler.stats().window_pool
    assert stats.free_tokens + stats.evictable_tokens < 1024


@PAGES
@pytest.mark.parametrize("ttl", [None, 1e6])
def test_a_full_window_pool_beside_an_empty_kv_pool_gives_way(page: int, ttl: float | None) -> None:
    """What the tree keeps is evicted, and leases break, though there are KV slots in plenty."""
    harness = scene(page, num_tokens=64 * 1024, chunk=64, leases=12, rows=2)
    for number in range(10):
        ask(harness, f"r{number}", prompt_of(200, number), retain_ttl=ttl)
    stats = harness.scheduler.stats()
    assert stats.free_tokens > 48 * 1024 and stats.evicted_tokens == 0
    assert stats.window_pool.evicted_tokens > 0
    assert ttl is None or stats.leases_broken > 0


@PAGES
def test_running_requests_retract_each_other_for_their_windows(page: int) -> None:
    harness = scene(page, num_tokens=64 * 1024, chunk=32, window=100)
    for number in range(8):
        harness.add(f"r{number}", prompt_of(5, number), 300, ignore_eos=True)
    harness.run()
    assert harness.scheduler.stats().retractions > 0
    for number in range(8):
        assert harness.outcomes[f"r{number}", 0].tokens == expected_output(prompt_of(5, number), 300, reach=100)


@PAGES
def test_a_full_kv_pool_beside_an_empty_window_pool_gives_way(page: int) -> None:
    harness = scene(page, num_tokens=1024, window_tokens=960, chunk=64, window=2)
    for number in range(6):
        harness.add(f"r{number}", prompt_of(20, number), 400, ignore_eos=True)
    harness.run()
    stats = harness.scheduler.stats()
    assert stats.retractions > 0
    for number in range(6):
        assert harness.outcomes[f"r{number}", 0].tokens == expected_output(prompt_of(20, number), 400, reach=2)


@PAGES
@pytest.mark.parametrize("keep_parent", [False, True])
@pytest.mark.parametrize("at", ["finish", "now"])
def test_a_continuation_computes_its_suffix_alone(page: int, keep_parent: bool, at: Any) -> None:
    harness = scene(page, chunk=64, window_tokens=1024)
    harness.add("parent", prompt_of(300), 40, retain_ttl=1e6, ignore_eos=True)
    for _ in range(9):
        harness.step()
    harness.continue_from("parent", "child", [1, 2], 30, at=at, keep_parent=keep_parent, ignore_eos=True)
    harness.run()
    child = harness.outcomes["child", 0].request
    assert child is not None and child.inheritance is not None
    assert child.inheritance.path == ("handoff" if at == "finish" else "fork")
    assert child.inheritance.recomputed_tokens <= 1
    prompt = child.token_ids.view(0, child.prompt_len).tolist()
    assert prompt[:300] == prompt_of(300) and prompt[-2:] == [1, 2]
    assert harness.outcomes["child", 0].tokens == expected_output(prompt, 30, reach=20)
    assert harness.outcomes["parent", 0].tokens == expected_output(prompt_of(300), 40, reach=20)


@PAGES
def test_a_search_that_fits_once_it_is_alone_waits_for_the_window_pool(page: int) -> None:
    harness = scene(page, chunk=64, num_tokens=8192, window_tokens=1024)
    harness.add("other", prompt_of(300, 1), 60, ignore_eos=True)
    harness.add("search", prompt_of(300), 40, beam_width=4, n=2, ignore_eos=True)
    harness.run()
    assert len(harness.outcomes["search", 0].results) == 2
    with pytest.raises(RequestRefused, match=r"can never fit the pool of 1024 tokens for sliding windows; use fewer"):
        harness.add("too wide", prompt_of(300), 300, beam_width=8, ignore_eos=True)
    assert harness.outcomes["other", 0].tokens == expected_output(prompt_of(300, 1), 60, reach=20)
