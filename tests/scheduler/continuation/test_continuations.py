"""Every path of the continuation table, on the KV-echo model: whatever path the KV took, the output is the model's."""

from __future__ import annotations

import pytest

from baton.radix.lease import LeaseState
from baton.scheduler.outcome import RequestRefused
from tests.doubles.continuation_scene import DEPTHS, evict_everything, inheritance, parent_ids, without_a_lease
from tests.doubles.kv_echo import expected_output, prompt_of
from tests.doubles.scheduler_harness import PAGES, Harness


@DEPTHS
@PAGES
@pytest.mark.parametrize("prompt_len", [1, 15, 16, 17, 64, 90])
@pytest.mark.parametrize("suffix_len", [0, 1, 3, 40])
def test_handoff_survives_eviction_of_everything_else(page_size: int, depth: int, prompt_len: int, suffix_len: int):
    harness = Harness(page_size=page_size, depth=depth, chunk=32)
    prompt, suffix = prompt_of(prompt_len), prompt_of(suffix_len, 1)
    harness.add("parent", prompt, 7, retain_ttl=100.0)
    harness.run()
    evict_everything(harness)
    before = harness.model.computed_tokens
    full = parent_ids(harness, "parent", prompt) + suffix
    harness.continue_from("parent", "child", suffix, 9)
    harness.run()
    assert harness.outcomes["child", 0].tokens == expected_output(full, 9)
    # The suffix, the last token the parent sampled, and the child's own tokens but the last: nothing else.
    assert harness.model.computed_tokens - before == suffix_len + 1 + 8
    got = inheritance(harness, "child")
    assert (got.path, got.inherited_tokens, got.recomputed_tokens) == ("handoff", prompt_len + 7, 1)
    assert len(harness.scheduler._leases) == 0


@DEPTHS
@PAGES
def test_chain_of_50_stages(page_size: int, depth: int) -> None:
    harness = Harness(num_tokens=1024, context=700, page_size=page_size, depth=depth, leased_ratio=1.0)
    ids = prompt_of(20)
    harness.add("s0", ids, 5, retain_ttl=50.0)
    harness.run()
    ids = ids + harness.outcomes["s0", 0].tokens
    for stage in range(1, 50):
        evict_everything(harness)
        suffix = prompt_of(stage % 4, stage)
        harness.continue_from(f"s{stage - 1}", f"s{stage}", suffix, 5, retain_ttl=50.0)
        harness.run()
        ids = ids + suffix
        assert harness.outcomes[f"s{stage}", 0].tokens == expected_output(ids, 5)
        assert inheritance(harness, f"s{stage}").path == "handoff"
        assert inheritance(harness, f"s{stage}").recomputed_tokens == 1
        ids = ids + harness.outcomes[f"s{stage}", 0].tokens


@DEPTHS
@PAGES
def test_child_waits_for_its_running_parent_and_is_admitted_next(page_size: int, depth: int) -> None:
    harness = Harness(page_size=page_size, depth=depth)
    prompt, suffix = prompt_of(40), prompt_of(3, 1)
    harness.add("parent", prompt, 10)
    harness.step()
    harness.continue_from("parent", "child", suffix, 6)
    harness.run()
    full = parent_ids(harness, "parent", prompt) + suffix
    assert harness.outcomes["child", 0].tokens == expected_output(full, 6)
    assert inheritance(harness, "child").path == "handoff"
    assert harness.model.computed_tokens == 40 + 10 - 1 + 3 + 1 + 6 - 1
    assert len(harness.scheduler._leases) == 0


@DEPTHS
@PAGES
@pytest.mark.parametrize("steps", range(5))
def test_fork_now_of_a_waiting_prefilling_or_running_parent(page_size: int, depth: int, steps: int) -> None:
    harness = Harness(page_size=page_size, depth=depth, chunk=30)
    prompt, suffix = prompt_of(70), prompt_of(4, 1)
    harness.add("parent", prompt, 12)
    for _ in range(steps):
        harness.step()
    known = len(harness.outcomes["parent", 0].tokens)
    harness.continue_from("parent", "child", suffix, 6, at="now")
    harness.run()
    says = expected_output(prompt, 12)
    assert harness.outcomes["parent", 0].tokens == says
    assert harness.outcomes["child", 0].tokens == expected_output(prompt + says[:known] + suffix, 6)
    got = inheritance(harness, "child")
    assert (got.path, got.inherited_tokens) == ("fork", 70 + known)


@PAGES
def test_several_children_of_one_kept_parent(page_size: int) -> None:
    harness = Harness(page_size=page_size, num_tokens=1024)
    prompt = prompt_of(50)
    harness.add("parent", prompt, 9, retain_ttl=30.0)
    harness.run()
    evict_everything(harness)
    full = parent_ids(harness, "parent", prompt)
    for i in range(4):
        harness.continue_from("parent", f"c{i}", prompt_of(3, i + 1), 8, keep_parent=True)
    before = harness.model.computed_tokens
    harness.run()
    for i in range(4):
        assert harness.outcomes[f"c{i}", 0].tokens == expected_output(full + prompt_of(3, i + 1), 8)
        assert inheritance(harness, f"c{i}").path == "handoff"
    assert harness.model.computed_tokens - before == 4 * (3 + 1 + 7)
    (lease,) = harness.scheduler.live_leases()
    assert lease.state is LeaseState.GRANTED
    harness.now += 100
    harness.step()
    assert len(harness.scheduler._leases) == 0


@PAGES
def test_second_child_without_keep_parent_takes_the_match_path(page_size: int) -> None:
    harness = Harness(page_size=page_size)
    prompt = prompt_of(50)
    harness.add("parent", prompt, 9, retain_ttl=30.0)
    harness.run()
    full = parent_ids(harness, "parent", prompt)
    for rid in ("a", "b"):
        harness.continue_from("parent", rid, [5], 4)
        harness.run()
        assert harness.outcomes[rid, 0].tokens == expected_output([*full, 5], 4)
    assert (inheritance(harness, "a").path, inheritance(harness, "b").path) == ("handoff", without_a_lease(page_size))


def test_continuation_index_selects_sample_and_others_stay_leased() -> None:
    harness = Harness(num_tokens=1024, leased_ratio=1.0)
    prompt = prompt_of(30)
    harness.add("parent", prompt, 5, n=3, retain_ttl=50.0)
    harness.run()
    assert len(harness.scheduler._leases) == 3
    # The prompt that all three share counts once.
    assert harness.scheduler._leases.leased_tokens < 3 * 34
    harness.continue_from("parent", "child", [7], 4, index=2)
    harness.run()
    assert inheritance(harness, "child").path == "handoff"
    assert len(harness.scheduler._leases) == 2
    with pytest.raises(RequestRefused, match="continuation_index is 3"):
        harness.continue_from("parent", "other", [7], 4, index=3)


@DEPTHS
@PAGES
@pytest.mark.parametrize("suffix_len", [0, 2])
def test_matched_stop_token_is_not_inherited(page_size: int, depth: int, suffix_len: int) -> None:
    prompt, suffix = prompt_of(33), prompt_of(suffix_len, 3)
    says = expected_output(prompt, 20)
    harness = Harness(page_size=page_size, depth=depth)
    harness.add("parent", prompt, 20, stop_token_ids=(says[6],), retain_ttl=9.0)
    harness.run()
    kept = says[: says.index(says[6])]
    harness.continue_from("parent", "child", suffix, 5)
    harness.run()
    assert harness.outcomes["child", 0].tokens == expected_output(prompt + kept + suffix, 5)
    got = inheritance(harness, "child")
    assert (got.path, got.trimmed_tokens, got.inherited_tokens) == ("handoff", 1, 33 + len(kept))


def test_no_stop_trim_inherits_the_stop_token() -> None:
    prompt = prompt_of(33)
    says = expected_output(prompt, 20)
    harness = Harness()
    harness.add("parent", prompt, 20, stop_token_ids=(says[6],), no_stop_trim=True, retain_ttl=9.0)
    harness.run()
    kept = says[: says.index(says[6]) + 1]
    harness.continue_from("parent", "child", [1], 5)
    harness.run()
    assert harness.outcomes["child", 0].tokens == expected_output([*prompt, *kept, 1], 5)


@PAGES
@pytest.mark.parametrize("whole", [64, 128])
def test_cut_at_page_boundary_recomputes_one_token(page_size: int, whole: int) -> None:
    """The matched stop is trimmed, what is left is whole pages, the suffix is empty: only the last id is computed."""
    candidates = (prompt_of(whole - 5, seed) for seed in range(100))
    prompt = next(p for p in candidates if (said := expected_output(p, 20)).index(said[5]) == 5)
    says = expected_output(prompt, 20)
    harness = Harness(page_size=page_size)
    harness.add("parent", prompt, 20, stop_token_ids=(says[5],), retain_ttl=1e6)
    harness.run()
    before = harness.model.computed_tokens
    harness.continue_from("parent", "child", [], 4)
    harness.run()
    assert harness.outcomes["child", 0].tokens == expected_output(prompt + says[:5], 4)
    assert (inheritance(harness, "child").path, inheritance(harness, "child").recomputed_tokens) == ("handoff", 1)
    assert harness.model.computed_tokens - before == 1 + 3


def test_handoff_without_radix_cache() -> None:
    harness = Harness(disable_radix_cache=True, page_size=16)
    prompt = prompt_of(50)
    harness.add("parent", prompt, 6, retain_ttl=50.0)
    harness.run()
    before = harness.model.computed_tokens
    harness.continue_from("parent", "child", [1, 2], 4)
    harness.run()
    assert inheritance(harness, "child").path == "handoff"
    assert harness.model.computed_tokens - before == 2 + 1 + 3
    full = parent_ids(harness, "parent", prompt)
    assert harness.outcomes["child", 0].tokens == expected_output([*full, 1, 2], 4)


def test_inherited_node_is_never_unlocked_during_handoff() -> None:
    harness = Harness(page_size=16)
    seen: list[int] = []
    harness.add("parent", prompt_of(64), 6, retain_ttl=50.0)
    harness.run()
    (lease,) = harness.scheduler.live_leases()
    assert lease.kv is not None and lease.kv.node is not None
    node, unlock = lease.kv.node, harness.cache.unlock

    def watched(handle) -> None:
        unlock(handle)
        seen.append(node.lock_ref)

    harness.cache.unlock = watched
    harness.continue_from("parent", "child", [1], 4)
    while harness.outcomes["child", 0].finish is None:
        assert node.lock_ref > 0
        harness.step()
    assert all(count > 0 for count in seen[:-1])
