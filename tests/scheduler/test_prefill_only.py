"""Requests that want no output: their prompt is computed and kept, and nothing is sampled."""

from __future__ import annotations

import pytest

from baton.scheduler.outcome import FinishReason
from baton.scheduler.request import Request, RequestStatus
from tests.doubles.kv_echo import expected_output, prompt_of
from tests.doubles.scheduler_harness import PAGES, Harness

DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["plain", "overlapped"])
LENGTH = FinishReason(type="length")


def request_of(harness: Harness, rid: str, index: int = 0) -> Request:
    request = harness.outcomes[rid, index].request
    assert request is not None
    return request


@PAGES
@DEPTHS
@pytest.mark.parametrize("chunk", [7, 64, 500])
def test_prefill_only_prompt_is_computed_once_and_cached(page_size: int, depth: int, chunk: int) -> None:
    harness = Harness(page_size=page_size, depth=depth, chunk=chunk)
    prompt = prompt_of(130)
    harness.add("warm", prompt, 0)
    harness.run()
    outcome = harness.outcomes["warm", 0]
    assert (outcome.tokens, outcome.finish) == ([], LENGTH)
    assert harness.model.computed_tokens == 130
    whole = 130 // page_size * page_size
    assert harness.cache.evictable_tokens == whole
    harness.add("next", [*prompt, 9], 5)
    harness.run()
    assert request_of(harness, "next").found.device == whole
    assert harness.outcomes["next", 0].tokens == expected_output([*prompt, 9], 5)


@DEPTHS
def test_prefill_only_rows_do_not_sample(depth: int) -> None:
    harness = Harness(depth=depth, chunk=32)
    harness.add("warm", prompt_of(40), 0)
    batches = [harness.scheduler.next_batch(0.0), harness.scheduler.next_batch(0.0)]
    assert [batch is not None and batch.samples.tolist() for batch in batches] == [[False], [False]]
    assert request_of(harness, "warm").status is RequestStatus.RUNNING
    assert harness.scheduler.next_batch(0.0) is None, "nothing to decode"


@PAGES
@DEPTHS
def test_prefill_only_runs_beside_other_requests(page_size: int, depth: int) -> None:
    harness = Harness(page_size=page_size, depth=depth, chunk=50, enable_mixed_chunk=True)
    for i in range(6):
        harness.add(f"r{i}", prompt_of(20 + 9 * i, i), 12 if i % 2 else 0)
    harness.run()
    for i in range(6):
        expected = expected_output(prompt_of(20 + 9 * i, i), 12) if i % 2 else []
        assert harness.outcomes[f"r{i}", 0].tokens == expected


def test_prefill_only_samples_end_without_output() -> None:
    harness = Harness(page_size=16)
    harness.add("warm", prompt_of(40), 0, n=3)
    harness.run()
    assert [harness.outcomes["warm", i].finish for i in range(3)] == [LENGTH] * 3


@PAGES
@DEPTHS
@pytest.mark.parametrize("suffix", [[], [5, 6]], ids=["empty", "two"])
def test_prefill_only_lease_holds_whole_prompt(page_size: int, depth: int, suffix: list[int]) -> None:
    """Its last, partial page too; an empty suffix computes the last token again, which is there already."""
    harness = Harness(page_size=page_size, depth=depth)
    prompt = prompt_of(70)
    harness.add("warm", prompt, 0, retain_ttl=60.0)
    harness.run()
    retained = request_of(harness, "warm").retained
    assert retained is not None and retained.tokens == 70
    computed = harness.model.computed_tokens
    harness.continue_from("warm", "child", suffix, 6)
    harness.run()
    inheritance = request_of(harness, "child").inheritance
    assert inheritance is not None and (inheritance.path, inheritance.inherited_tokens) == ("handoff", 70)
    assert harness.outcomes["child", 0].tokens == expected_output([*prompt, *suffix], 6)
    assert harness.model.computed_tokens - computed == max(1, len(suffix)) + 5


@DEPTHS
def test_parked_child_continues_prefill_only_parent(depth: int) -> None:
    harness = Harness(depth=depth, chunk=20)
    prompt = prompt_of(70)
    harness.add("warm", prompt, 0)
    harness.step()
    harness.continue_from("warm", "child", [7], 0)
    harness.continue_from("child", "grandchild", [8], 4)
    harness.run()
    assert harness.outcomes["child", 0].finish == LENGTH
    assert harness.outcomes["grandchild", 0].tokens == expected_output([*prompt, 7, 8], 4)
    assert harness.model.computed_tokens == 70 + 1 + 1 + 3


def test_prefill_only_abort_with_last_chunk_in_flight() -> None:
    harness = Harness(depth=2)
    harness.add("warm", prompt_of(40), 0)
    harness.step()
    harness.step()
    harness.add("gone", prompt_of(50, 3), 0)
    harness.scheduler.next_batch(0.0)
    (event,) = harness.scheduler.abort_request("gone", 0.0)
    assert event.finish is not None and event.finish.type == "abort"
    assert harness.scheduler.live_requests == []


def test_prefill_only_prompt_may_fill_the_pool() -> None:
    harness = Harness(num_tokens=128, context=128, page_size=16)
    harness.add("warm", prompt_of(128), 0)
    harness.run()
    assert harness.outcomes["warm", 0].finish == LENGTH and harness.cache.evictable_tokens == 128
