"""What nobody will ask for again, by what the requests say: it goes first, and nothing else goes with it."""

from __future__ import annotations

import numpy as np
import pytest

from baton.radix.tiers.host_tier import HostCounts, HostPolicy
from tests.doubles.kv_echo import expected_output, prompt_of
from tests.doubles.scheduler_harness import PAGES, Harness
from tests.doubles.tier_rig import FakeBlocks

DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["plain", "overlapped"])
PROMPT, OUTPUT = 130, 62
OLD, MINE, NEXT = prompt_of(PROMPT, 1), prompt_of(PROMPT, 2), prompt_of(PROMPT, 3)


def cached(harness: Harness, prompt: list[int], tokens: int = OUTPUT) -> int:
    """Cached tokens of the prompt and its output."""
    return harness.cache.match_len("", np.array([*prompt, *expected_output(prompt, tokens)], dtype=np.int32))


def pressed(harness: Harness, tokens: int) -> None:
    """Somebody else takes so much memory that about ``tokens`` must go."""
    harness.cache.evict(tokens)
    harness.verify()


@PAGES
@DEPTHS
@pytest.mark.parametrize("kept", [0, 70, PROMPT, 10**6])
def test_no_reuse_kv_is_evicted_before_older_kv(page_size: int, depth: int, kept: int) -> None:
    harness = Harness(num_tokens=1024, page_size=page_size, depth=depth)
    harness.add("old", OLD, OUTPUT)
    harness.run()
    harness.add("mine", MINE, OUTPUT, no_reuse_from=kept)
    harness.run()
    before, old = cached(harness, MINE), cached(harness, OLD)
    left = min(before, -(-kept // page_size) * page_size)
    if left == before:
        pressed(harness, page_size)
        assert cached(harness, MINE) == before and cached(harness, OLD) < old, "nothing is known to be of no use"
        return
    pressed(harness, before - left)
    assert (cached(harness, MINE), cached(harness, OLD)) == (left, old)


def test_shared_prefix_of_no_reuse_requests_is_kept() -> None:
    """Ten questions about one text; the text is as good as used a moment ago."""
    harness = Harness(num_tokens=1024)
    harness.add("old", OLD, 8)
    harness.run()
    for number in range(3):
        harness.add(f"q{number}", [*MINE, number + 1], 8, no_reuse_from=0)
        harness.run()
    pressed(harness, 20)
    assert cached(harness, OLD, 8) == PROMPT + 7
    assert harness.cache.match_len("", np.array(MINE, dtype=np.int32)) == PROMPT


@pytest.mark.parametrize(("n", "beam_width"), [(3, None), (1, 3)], ids=["samples", "search"])
def test_no_reuse_applies_to_samples_and_searches(n: int, beam_width: int | None) -> None:
    """Samples share their prompt until the last has ended; a search counts by its prompt."""
    harness = Harness(num_tokens=1024)
    harness.add("old", OLD, 8)
    harness.run()
    harness.add("mine", MINE, 8, no_reuse_from=0, n=n, beam_width=beam_width)
    harness.run()
    pressed(harness, PROMPT)
    assert cached(harness, OLD, 8) == PROMPT + 7 and cached(harness, MINE, 8) < PROMPT


def test_no_reuse_of_unstarted_request_has_no_effect() -> None:
    harness = Harness(num_tokens=1024, rows=1)
    for rid, prompt in (("old", OLD), ("mine", MINE)):
        harness.add(rid, prompt, 8)
        harness.run()
    harness.add("busy", NEXT, 8)
    harness.step()
    harness.add("waits", [*MINE, *expected_output(MINE, 8)], 8, no_reuse_from=0)
    harness.step()
    harness.abort("waits")
    harness.run()
    pressed(harness, PROMPT)
    assert cached(harness, OLD, 8) < PROMPT and cached(harness, MINE, 8) == PROMPT + 7


@DEPTHS
def test_aborted_no_reuse_request_is_evicted_first(depth: int) -> None:
    harness = Harness(num_tokens=1024, depth=depth)
    harness.add("old", OLD, 8)
    harness.run()
    harness.add("mine", MINE, 60, no_reuse_from=0)
    for _ in range(6):
        harness.step()
    harness.abort("mine")
    harness.run()
    there = cached(harness, MINE)
    assert there
    pressed(harness, there)
    assert (cached(harness, MINE), cached(harness, OLD, 8)) == (0, PROMPT + 7)


def test_lease_keeps_no_reuse_kv_until_it_expires() -> None:
    harness = Harness(num_tokens=1024)
    harness.add("old", OLD, 8)
    harness.run()
    harness.add("mine", MINE, 8, no_reuse_from=0, retain_ttl=50.0)
    harness.run()
    pressed(harness, 10)
    assert cached(harness, MINE, 8) == PROMPT + 7 and cached(harness, OLD, 8) < PROMPT
    harness.add("again", OLD, 8)
    harness.run()
    harness.now += 100.0
    harness.step()
    pressed(harness, PROMPT)
    assert cached(harness, MINE, 8) < 10 and cached(harness, OLD, 8) == PROMPT + 7


def test_child_overrides_no_reuse_of_parent() -> None:
    harness = Harness(num_tokens=1024)
    harness.add("mine", MINE, 8, no_reuse_from=0, retain_ttl=50.0)
    harness.run()
    harness.continue_from("mine", "child", [5, 6, 7], 8)
    harness.run()
    harness.add("next", NEXT, 8)
    harness.run()
    pressed(harness, 10)
    whole = [*MINE, *expected_output(MINE, 8), 5, 6, 7]
    assert cached(harness, NEXT, 8) == PROMPT + 7, "the child's end goes, as the oldest, and it was young"
    assert cached(harness, whole, 8) < len(whole) + 7


@pytest.mark.parametrize("write_back", [False, True])
@pytest.mark.parametrize("states", [0, 8])
def test_no_reuse_kv_is_stored_on_no_other_tier(states: int, write_back: bool) -> None:
    harness = Harness(
        num_tokens=256,
        host_tokens=1024,
        host_policy=HostPolicy(write_back=write_back),
        states=states,
        host_states=2 * states,
        block_tokens=16,
    )
    for number in range(3):
        harness.add(f"mine {number}", prompt_of(60, number), 1, no_reuse_from=0)
        harness.run()
    pressed(harness, 256)
    harness.run()
    counts, disk = host_counts(harness)
    assert not (counts.stored or counts.stored_states or disk.blocks or disk.snapshots)


def test_no_reuse_kv_that_is_matched_all_the_same_is_stored() -> None:
    harness = Harness(num_tokens=256, host_tokens=1024, states=8, host_states=8)
    prompt = prompt_of(60, 1)
    harness.add("mine", prompt, 1, no_reuse_from=0)
    harness.run()
    harness.add("again", [*prompt, 1, 2], 1)
    harness.run()
    counts, _ = host_counts(harness)
    assert counts.stored == 62 and counts.stored_states > 0


def host_counts(harness: Harness) -> tuple[HostCounts, FakeBlocks]:
    assert harness.tiers is not None
    return harness.tiers.host.counts, harness.tiers.blocks


def test_no_reuse_is_ignored_without_cache() -> None:
    harness = Harness(disable_radix_cache=True)
    harness.add("mine", MINE, 8, no_reuse_from=0)
    harness.run()
    assert harness.outcomes["mine", 0].tokens == expected_output(MINE, 8)
