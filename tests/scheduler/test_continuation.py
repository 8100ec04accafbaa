"""Every row of the continuation table, on the KV-echo model: whatever path the KV took, the output is the model's."""

from __future__ import annotations

import random

import pytest
from kv_echo import VOCAB, expected_output
from scheduler_harness import Harness

from baton.radix.lease import LeaseState
from baton.scheduler.refusal import RequestRefused
from baton.scheduler.request import Inheritance

PAGES = pytest.mark.parametrize("page_size", [1, 16, 64])
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def inheritance(harness: Harness, rid: str, index: int = 0) -> Inheritance:
    request = harness.outcomes[rid, index].request
    assert request is not None and request.inheritance is not None
    return request.inheritance


def parent_ids(harness: Harness, rid: str, prompt: list[int], index: int = 0) -> list[int]:
    return prompt + harness.outcomes[rid, index].tokens


def evict_everything(harness: Harness) -> None:
    harness.cache.evict(10**9)
    assert harness.cache.evictable_tokens == 0


@DEPTHS
@PAGES
@pytest.mark.parametrize("prompt_len", [1, 15, 16, 17, 64, 90])
@pytest.mark.parametrize("suffix_len", [0, 1, 3, 40])
def test_handoff_after_everything_evictable_is_gone(page_size: int, depth: int, prompt_len: int, suffix_len: int):
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
    assert len(harness.scheduler.leases) == 0


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
    assert len(harness.scheduler.leases) == 0


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
    (lease,) = harness.scheduler.leases.live()
    assert lease.state is LeaseState.GRANTED
    harness.now += 100
    harness.step()
    assert len(harness.scheduler.leases) == 0


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
    assert (inheritance(harness, "a").path, inheritance(harness, "b").path) == ("handoff", "match")


def test_continuation_index_picks_the_sample_and_all_stay_leased() -> None:
    harness = Harness(num_tokens=1024, leased_ratio=1.0)
    prompt = prompt_of(30)
    harness.add("parent", prompt, 5, n=3, retain_ttl=50.0)
    harness.run()
    assert len(harness.scheduler.leases) == 3
    # The prompt that all three share counts once.
    assert harness.scheduler.leases.leased_tokens < 3 * 34
    harness.continue_from("parent", "child", [7], 4, index=2)
    harness.run()
    assert inheritance(harness, "child").path == "handoff"
    assert len(harness.scheduler.leases) == 2
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


def test_no_stop_trim_inherits_the_stop_too() -> None:
    prompt = prompt_of(33)
    says = expected_output(prompt, 20)
    harness = Harness()
    harness.add("parent", prompt, 20, stop_token_ids=(says[6],), no_stop_trim=True, retain_ttl=9.0)
    harness.run()
    kept = says[: says.index(says[6]) + 1]
    harness.continue_from("parent", "child", [1], 5)
    harness.run()
    assert harness.outcomes["child", 0].tokens == expected_output([*prompt, *kept, 1], 5)


def test_expired_lease_falls_back_to_what_the_tree_still_has() -> None:
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
def test_child_that_arrives_in_the_step_of_expiry(late: float) -> None:
    harness = Harness()
    prompt = prompt_of(40)
    harness.add("parent", prompt, 6, retain_ttl=5.0)
    harness.run()
    (lease,) = harness.scheduler.leases.live()
    harness.now = lease.deadline + late
    harness.continue_from("parent", "child", [2], 4)
    harness.run()
    assert inheritance(harness, "child").path == ("match" if late > 0 else "handoff")
    full = parent_ids(harness, "parent", prompt)
    assert harness.outcomes["child", 0].tokens == expected_output([*full, 2], 4)


def test_claimed_lease_gets_its_remaining_time_back_when_the_child_is_aborted() -> None:
    harness = Harness()
    harness.add("parent", prompt_of(40), 6, retain_ttl=50.0)
    harness.run()
    (lease,) = harness.scheduler.leases.live()
    remaining = lease.deadline - harness.now
    harness.continue_from("parent", "child", [2], 4)
    assert lease.state is LeaseState.CLAIMED
    harness.now += 1000
    harness.scheduler.leases.expire(harness.now)
    assert lease.is_live, "a claim stops the clock"
    harness.abort("child")
    assert lease.state is LeaseState.GRANTED and lease.deadline == harness.now + remaining


def test_unknown_parent_and_foreign_namespace_get_the_same_404() -> None:
    harness = Harness()
    harness.add("parent", prompt_of(20), 3, namespace="mine")
    for _ in range(2):  # while it runs, and after its end
        messages = []
        for parent, namespace in (("parent", "theirs"), ("nobody", "mine")):
            with pytest.raises(RequestRefused) as refusal:
                harness.continue_from(parent, "child", [1], 2, namespace=namespace)
            assert refusal.value.status == 404
            messages.append(str(refusal.value).replace(parent, "X"))
        assert messages[0] == messages[1]
        harness.run()
    harness.continue_from("parent", "child", [1], 2, namespace="mine")
    harness.run()


def test_aborted_parent_is_409_also_for_children_that_wait() -> None:
    harness = Harness()
    harness.add("parent", prompt_of(20), 30)
    harness.step()
    harness.continue_from("parent", "waiting", [1], 2)
    harness.continue_from("waiting", "grandchild", [1], 2)
    harness.abort("parent")
    for rid in ("waiting", "grandchild"):
        outcome = harness.outcomes[rid, 0]
        assert outcome.refusal is not None and outcome.refusal.status == 409
    with pytest.raises(RequestRefused) as refusal:
        harness.continue_from("parent", "late", [1], 2)
    assert refusal.value.status == 409
    assert harness.scheduler.is_idle


def test_forgotten_parent_is_410_or_the_childs_own_prompt() -> None:
    harness = Harness(max_finished_requests=2)
    for i in range(4):
        harness.add(f"r{i}", prompt_of(20, i), 3)
        harness.run()
    with pytest.raises(RequestRefused) as refusal:
        harness.continue_from("r0", "child", [1], 2)
    assert refusal.value.status == 410
    own = prompt_of(25, 9)
    harness.continue_from("r0", "child", [1], 4, fallback=own)
    harness.run()
    assert inheritance(harness, "child").path == "fallback"
    assert harness.outcomes["child", 0].tokens == expected_output(own, 4)


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


def test_suffix_over_the_context_is_refused_at_once_or_when_the_parent_ends() -> None:
    harness = Harness(context=64)
    harness.add("parent", prompt_of(30), 10)
    harness.step()
    harness.continue_from("parent", "waiting", prompt_of(30), 2)
    harness.run()
    outcome = harness.outcomes["waiting", 0]
    assert outcome.refusal is not None and outcome.refusal.status == 400
    with pytest.raises(RequestRefused, match="context"):
        harness.continue_from("parent", "late", prompt_of(30), 2)


def test_running_duplicate_rid_is_409_and_a_recorded_one_is_replaced() -> None:
    harness = Harness()
    harness.add("a", prompt_of(20), 3, retain_ttl=50.0)
    harness.run()
    harness.add("a", prompt_of(20, 1), 3)
    assert len(harness.scheduler.leases) == 0
    with pytest.raises(RequestRefused) as refusal:
        harness.continue_from("a", "a", [1], 2)
    assert refusal.value.status == 409
    harness.run()
    harness.continue_from("a", "b", [1], 2)
    harness.run()
    full = parent_ids(harness, "a", prompt_of(20, 1))
    assert harness.outcomes["b", 0].tokens == expected_output([*full, 1], 2)


def test_release_ends_the_lease_but_keeps_the_record() -> None:
    harness = Harness()
    harness.add("a", prompt_of(20), 3, retain_ttl=50.0)
    harness.run()
    assert harness.scheduler.release("a")
    assert not harness.scheduler.release("a")
    assert len(harness.scheduler.leases) == 0
    harness.continue_from("a", "b", [1], 2)
    harness.run()
    assert inheritance(harness, "b").path == "match"


def test_lease_over_the_budget_is_refused_and_says_so() -> None:
    harness = Harness(num_tokens=128, leased_ratio=0.5)
    harness.add("a", prompt_of(90), 3, retain_ttl=50.0)
    harness.run()
    request = harness.outcomes["a", 0].request
    assert request is not None and request.retained is not None and request.retained.refused is not None
    assert len(harness.scheduler.leases) == 0
    harness.continue_from("a", "b", [1], 2)
    harness.run()
    assert inheritance(harness, "b").path == "match"


@PAGES
def test_any_lease_breaks_for_a_request_that_would_run_alone(page_size: int) -> None:
    harness = Harness(num_tokens=256, page_size=page_size, leased_ratio=1.0)
    harness.add("leased", prompt_of(100), 3, retain_ttl=1e6)
    harness.run()
    harness.add("large", prompt_of(200, 1), 20)
    harness.run()
    assert harness.outcomes["large", 0].tokens == expected_output(prompt_of(200, 1), 20)
    assert harness.scheduler.stats().leases_broken == 1
    harness.continue_from("leased", "child", [1], 4)
    harness.run()
    assert inheritance(harness, "child").path == "match"
    full = parent_ids(harness, "leased", prompt_of(100))
    assert harness.outcomes["child", 0].tokens == expected_output([*full, 1], 4)


@PAGES
@DEPTHS
def test_a_claim_that_breaks_before_its_child_is_admitted_is_reported_as_a_match(page_size: int, depth: int) -> None:
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
    assert inheritance(harness, "child").path == "match"


@PAGES
def test_of_two_children_that_claim_one_lease_the_second_is_reported_as_a_match(page_size: int) -> None:
    harness = Harness(page_size=page_size)
    harness.add("parent", prompt_of(50), 9, retain_ttl=30.0)
    harness.run()
    harness.continue_from("parent", "a", [5], 4)
    harness.continue_from("parent", "b", [6], 4)
    harness.run()
    assert (inheritance(harness, "a").path, inheritance(harness, "b").path) == ("handoff", "match")


@DEPTHS
@PAGES
@pytest.mark.parametrize("steps", range(10))
@pytest.mark.parametrize("victim", ["parent", "child"])
def test_abort_of_parent_or_child_at_every_point(page_size: int, depth: int, steps: int, victim: str) -> None:
    harness = Harness(page_size=page_size, depth=depth, chunk=25)
    prompt = prompt_of(60)
    harness.add("parent", prompt, 4, retain_ttl=3.0)
    harness.continue_from("parent", "child", prompt_of(30, 1), 4)
    for _ in range(steps):
        harness.step()
    harness.abort(victim)
    harness.run()
    harness.now += 10
    harness.step()
    assert len(harness.scheduler.leases) == 0
    stats = harness.scheduler.stats()
    assert stats.free_tokens + stats.evictable_tokens == stats.total_tokens
    assert all(outcome.finish is not None for outcome in harness.outcomes.values())


@DEPTHS
@PAGES
def test_parents_and_children_are_retracted_and_say_the_same(page_size: int, depth: int) -> None:
    harness = Harness(num_tokens=512, page_size=page_size, depth=depth, context=300)
    prompts = [prompt_of(40, i) for i in range(8)]
    for i, prompt in enumerate(prompts):
        harness.add(f"p{i}", prompt, 60)
        harness.continue_from(f"p{i}", f"c{i}", prompt_of(3, i), 50)
    harness.run()
    assert harness.scheduler.stats().retractions > 0
    for i, prompt in enumerate(prompts):
        full = parent_ids(harness, f"p{i}", prompt) + prompt_of(3, i)
        assert harness.outcomes[f"c{i}", 0].tokens == expected_output(full, 50)


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


def test_lock_of_the_inherited_node_never_passes_through_zero() -> None:
    harness = Harness(page_size=16)
    seen: list[int] = []
    harness.add("parent", prompt_of(64), 6, retain_ttl=50.0)
    harness.run()
    (lease,) = harness.scheduler.leases.live()
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


# -- stalls, chains, starvation, orphans ---------------------------------


@pytest.mark.parametrize(("page_size", "disabled"), [(1, True), (16, False), (64, False)])
def test_keep_parent_child_that_does_not_fit_beside_its_parent_takes_the_match_path(page_size: int, disabled: bool):
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


def test_a_long_chain_of_waiting_stages_ends_with_its_root() -> None:
    harness = Harness(check=False)
    harness.add("s0", prompt_of(20), 30)
    harness.step()
    for stage in range(1, 1500):
        harness.continue_from(f"s{stage - 1}", f"s{stage}", [1], 2)
    harness.abort("s0")
    assert harness.scheduler.is_idle
    last = harness.outcomes["s1499", 0]
    assert last.refusal is not None and last.refusal.status == 409
    assert len(last.refusal.message) < 200


def test_children_with_a_lease_do_not_pass_the_head_of_the_queue_for_ever() -> None:
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


def test_no_lease_is_left_that_nobody_can_name() -> None:
    harness = Harness(num_tokens=1024, leased_ratio=1.0)
    prompt = prompt_of(30)
    harness.add("a", prompt, 20, n=2, retain_ttl=1e6)
    harness.step()
    first, second = (harness.outcomes["a", index].request for index in (0, 1))
    assert first is not None and second is not None
    while first.finish is None and second.finish is None:
        harness.step()
    if first.finish is None or second.finish is None:
        assert len(harness.scheduler.leases) == 1
        harness.abort("a")
        assert len(harness.scheduler.leases) == 0, "its rid is a tombstone: nobody can continue it"
    harness.add("b", prompt_of(20, 1), 3, retain_ttl=1e6)
    harness.run()
    harness.continue_from("b", "b", [1], 3)  # takes its parent's name, and with it the only way to the lease
    harness.abort("b")
    harness.now += 1
    harness.step()
    assert all(lease.kv is not None and lease.deadline > 1e5 for lease in harness.scheduler.leases.live())
    assert not [lease for lease in harness.scheduler.leases.live() if lease.tokens == 22]


@PAGES
@pytest.mark.parametrize("whole", [64, 128])
def test_a_cut_at_whole_pages_computes_one_token_again_not_a_page(page_size: int, whole: int) -> None:
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


def test_a_parent_that_asked_for_nothing_is_not_told_of_a_lease() -> None:
    harness = Harness()
    harness.add("parent", prompt_of(20), 5)
    harness.step()
    harness.continue_from("parent", "child", [1], 2)
    harness.run()
    request = harness.outcomes["parent", 0].request
    assert request is not None and request.retained is None


def test_a_failed_step_leaves_the_others_sound() -> None:
    harness = Harness(page_size=16)
    prompt = prompt_of(40)
    harness.add("good", prompt, 12)
    harness.step()
    harness.continue_from("good", "fork", [1], 5, at="now")
    harness.add("bad", prompt_of(30, 1), 5)
    batch = harness.scheduler.next_batch(harness.now)
    assert batch is not None
    failed = {request.rid for request in batch.requests}
    harness._take(harness.scheduler.fail_step(harness.now, "out of memory"))
    harness.verify()
    harness.run()
    assert failed and all(harness.outcomes[rid, 0].finish is not None for rid in failed)
    for rid in {"good", "fork"} - failed:
        assert harness.outcomes[rid, 0].finish is not None
    if "good" not in failed:
        assert harness.outcomes["good", 0].tokens == expected_output(prompt, 12)
