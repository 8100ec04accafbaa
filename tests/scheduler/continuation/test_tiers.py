"""Continuations of a parent whose KV has left the device, on the KV-echo model."""

from __future__ import annotations

from typing import Any

import pytest

from baton.radix.tiers.host_tier import HostPolicy
from baton.scheduler.outcome import FoundTokens, Retained
from tests.doubles.continuation_scene import DEPTHS, evict_everything, inheritance, parent_ids
from tests.doubles.kv_echo import expected_output, prompt_of
from tests.doubles.scheduler_harness import PAGES, Harness

POLICIES = pytest.mark.parametrize(
    "policy", [HostPolicy(), HostPolicy(min_hits=1), HostPolicy(write_back=True)], ids=["through", "selective", "back"]
)


def found(harness: Harness, rid: str) -> FoundTokens:
    request = harness.outcomes[rid, 0].request
    assert request is not None
    return request.found


def retained(harness: Harness, rid: str, index: int = 0) -> Retained:
    request = harness.outcomes[rid, index].request
    assert request is not None and request.retained is not None
    return request.retained


def flooded(page_size: int = 1, depth: int = 1, **options: Any) -> tuple[Harness, list[int]]:
    """A parent whose lease was broken by a request that needs the whole pool; its ids."""
    harness = Harness(num_tokens=256, page_size=page_size, depth=depth, leased_ratio=1.0, host_tokens=1024, **options)
    prompt = prompt_of(100)
    harness.add("parent", prompt, 6, retain_ttl=1e6)
    harness.run()
    harness.add("large", prompt_of(200, 1), 20)
    harness.run()
    assert harness.scheduler.stats().leases_broken == 1
    return harness, parent_ids(harness, "parent", prompt)


@PAGES
@DEPTHS
@POLICIES
def test_kv_of_broken_lease_is_loaded_from_host(page_size: int, depth: int, policy: HostPolicy) -> None:
    harness, full = flooded(page_size, depth, host_policy=policy)
    evict_everything(harness)
    harness.continue_from("parent", "child", [2, 3], 5)
    harness.run()
    assert harness.outcomes["child", 0].tokens == expected_output([*full, 2, 3], 5)
    stored = 105 // page_size * page_size  # the last token has no KV, nor a part of a page a copy
    assert found(harness, "child") == FoundTokens(host=stored)
    got = inheritance(harness, "child")
    assert (got.path, got.inherited_tokens, got.recomputed_tokens) == ("tier", 106, 106 - stored)


def test_device_part_of_parent_counts_as_device_hit() -> None:
    harness, full = flooded(16)
    evict_everything(harness)
    harness.add("begins", [*full[:48], 1], 1)
    harness.run()
    harness.cache.evict(10**9)
    harness.add("begins again", [*full[:48], 1], 1)
    for _ in range(2):
        harness.step()
    harness.continue_from("parent", "child", [2], 5)
    harness.run()
    assert found(harness, "child") == FoundTokens(device=48, host=48)
    assert inheritance(harness, "child").path == "tier"
    assert harness.outcomes["child", 0].tokens == expected_output([*full, 2], 5)


def test_suffix_loaded_from_host_is_a_match() -> None:
    """Nothing that was inherited did: a match."""
    harness = Harness(host_tokens=1024)
    prompt, suffix = prompt_of(60), prompt_of(40, 7)
    harness.add("parent", prompt, 5)
    harness.run()
    full = parent_ids(harness, "parent", prompt)
    harness.add("other", [*full, *suffix], 1)
    harness.run()
    assert harness.cache.evict(30) == 30
    harness.continue_from("parent", "child", suffix, 5)
    harness.run()
    assert found(harness, "child") == FoundTokens(device=75, host=29) and inheritance(harness, "child").path == "match"
    assert harness.outcomes["child", 0].tokens == expected_output([*full, *suffix], 5)


def test_fallback_prompt_on_host_is_still_a_fallback() -> None:
    harness, full = flooded(max_finished_requests=1)
    evict_everything(harness)
    harness.continue_from("parent", "child", [2], 5, fallback=[*full, 2])
    harness.run()
    assert inheritance(harness, "child").path == "fallback" and found(harness, "child") == FoundTokens(host=105)


def test_load_for_failed_admission_counts_as_host_hit() -> None:
    """The load is ordered, then the allocation for the rest fails: at the second try all is on the device."""
    harness, _ = flooded()
    evict_everything(harness)
    harness.continue_from("parent", "child", [2], 5)
    calls = harness.allocator.calls
    harness.allocator.should_fail = lambda call: call == calls + 1
    harness.run()
    assert harness.allocator.calls > calls + 1
    assert found(harness, "child") == FoundTokens(host=105) and inheritance(harness, "child").path == "tier"


class TestRetained:
    @PAGES
    @POLICIES
    def test_kv_of_refused_lease_is_kept_on_host(self, page_size: int, policy: HostPolicy) -> None:
        harness = Harness(num_tokens=256, page_size=page_size, leased_ratio=0.1, host_tokens=1024, host_policy=policy)
        prompt = prompt_of(90)
        harness.add("parent", prompt, 3, retain_ttl=50.0)
        harness.run()
        kept = retained(harness, "parent")
        whole = 92 // page_size * page_size
        assert kept.refused is not None and (kept.tier, kept.tokens) == ("host", whole)
        harness.add("large", prompt_of(200, 1), 20)
        harness.run()
        evict_everything(harness)
        harness.continue_from("parent", "child", [1], 2)
        harness.run()
        assert found(harness, "child").total == whole and inheritance(harness, "child").path == "tier"
        full = parent_ids(harness, "parent", prompt)
        assert harness.outcomes["child", 0].tokens == expected_output([*full, 1], 2)

    def test_granted_lease_reports_no_tier(self) -> None:
        harness = Harness(host_tokens=1024)
        harness.add("parent", prompt_of(40), 3, retain_ttl=50.0)
        harness.run()
        kept = retained(harness, "parent")
        assert (kept.tokens, kept.tier, kept.refused) == (42, None, None)

    @pytest.mark.parametrize("options", [{}, {"host_tokens": 16}, {"host_tokens": 1024, "disable_radix_cache": True}])
    def test_refused_lease_the_host_cannot_keep_reports_no_tier(self, options: dict[str, Any]) -> None:
        harness = Harness(num_tokens=256, leased_ratio=0.1, **options)
        harness.add("parent", prompt_of(90), 3, retain_ttl=50.0)
        harness.run()
        kept = retained(harness, "parent")
        assert kept.refused is not None and (kept.tier, kept.tokens) == (None, 0)

    def test_refused_lease_reports_only_tokens_the_host_can_keep(self) -> None:
        harness = Harness(num_tokens=256, leased_ratio=0.1, host_tokens=64)
        harness.add("parent", prompt_of(90), 3, retain_ttl=50.0)
        harness.run()
        kept = retained(harness, "parent")
        assert kept.tier == "host" and 0 < kept.tokens <= 64
        evict_everything(harness)
        harness.continue_from("parent", "child", [1], 2)
        harness.run()
        assert found(harness, "child") == FoundTokens(host=kept.tokens)

    def test_refused_search_lease_keeps_prompt_on_host(self) -> None:
        harness = Harness(num_tokens=512, page_size=16, leases=1, host_tokens=1024)
        harness.add("search", prompt_of(70), 6, retain_ttl=50.0, n=2, beam_width=2)
        harness.run()
        request = harness.outcomes["search", 0].request
        assert request is not None and request.beams is not None
        leased, refused = request.beams.retained
        assert leased is not None and leased.refused is None and leased.tier is None
        assert refused is not None and refused.refused is not None and (refused.tier, refused.tokens) == ("host", 64)
