"""What a sequence takes from the pool, to the token: who is admitted, what gives way, what is left when it fails."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from baton.radix.lease import LeaseState, LeaseTerms
from baton.scheduler.memory.kv_memory import KVMemory, take_back_unfilled
from baton.scheduler.request import Request
from baton.scheduler.request_spec import ContinuationSpec
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.kv_echo import expected_output, prompt_of
from tests.doubles.scheduler_harness import Harness
from tests.doubles.specs import make_spec

PAGES = pytest.mark.parametrize("page", [1, 16])
TERMS = LeaseTerms(deadline=1e9, now=0.0)


class Scene:
    """A pool, requests that wait in it, and the memory that opens them."""

    def __init__(self, page: int, num_tokens: int = 256, **options) -> None:
        self.harness = Harness(num_tokens=num_tokens, page_size=page, **options)
        self.memory: KVMemory = self.harness.scheduler._memory
        self.page = page

    def waiting(self, rid: str, prompt: list[int], **fields) -> Request:
        spec = make_spec(rid, prompt, SamplingParams(max_new_tokens=4, temperature=0.0), **fields)
        (request,) = self.harness.scheduler.add_request(spec, 0.0)
        return request

    def computed(self, rid: str, prompt: list[int]) -> Request:
        """A request whose whole prompt has slots and is committed."""
        request = self.waiting(rid, prompt)
        assert self.memory.open_request(request, 0, 0.0) and self.memory.extend(request, len(prompt), 0.0) is not None
        request.scheduled_len = request.committed_len = len(prompt)
        return request

    def child(self, length: int, suffix: int, **fields) -> Request:
        """A continuation that has claimed the lease of a parent with KV for ``length`` tokens."""
        self.harness.add("parent", prompt_of(length - 2, 1), 3, retain_ttl=100.0)  # the last token has none
        self.harness.run()
        continuation = ContinuationSpec("parent", **fields)
        return self.waiting("child", prompt_of(suffix, 2), continuation=continuation)

    def up(self, tokens: int) -> int:
        return -(-tokens // self.page) * self.page

    def state(self) -> tuple[int, ...]:
        cache = self.memory.cache
        rows = self.memory.req_to_token.num_free
        return self.memory.allocator.free_tokens, cache.evictable_tokens, cache.protected_tokens, rows

    def opens_up_to(self, request: Request, reserve: int) -> None:
        """Admitted with this reserve and not with one token more, which changes nothing."""
        before = self.state()
        assert not self.memory.open_request(request, reserve + 1, 0.0)
        assert request.kv is None and self.state() == before
        assert self.memory.open_request(request, reserve, 0.0)
        assert request.committed_len == request.scheduled_len == request.held_kv.length


@PAGES
class TestOpen:
    def test_admission_needs_room_for_prompt_and_reserve(self, page: int) -> None:
        scene = Scene(page)
        scene.opens_up_to(scene.waiting("r", prompt_of(37, 1)), 256 - scene.up(37))

    def test_admission_counts_cached_prefix_as_present(self, page: int) -> None:
        scene = Scene(page)
        scene.harness.add("first", prompt_of(64, 1), 1)
        scene.harness.run()
        request = scene.waiting("r", [*prompt_of(64, 1), *prompt_of(20, 2)])
        scene.opens_up_to(request, 256 - scene.up(84))
        assert request.held_kv.length == 64

    def test_admission_needs_a_free_row(self, page: int) -> None:
        scene = Scene(page)
        taken = [scene.memory.req_to_token.alloc() for _ in range(scene.memory.req_to_token.num_rows)]
        request, before = scene.waiting("r", prompt_of(10, 1)), scene.state()
        assert not scene.memory.open_request(request, 0, 0.0) and scene.state() == before
        scene.memory.req_to_token.free(taken[0] or 0)
        assert scene.memory.open_request(request, 0, 0.0)

    def test_admission_takes_over_whole_lease(self, page: int) -> None:
        scene = Scene(page)
        child = scene.child(40, 30)
        assert child.inheritance is not None
        lease = child.inheritance.lease
        assert lease is not None and lease.tokens == 40 and len(child.token_ids) == 71
        others = scene.memory.allocator.free_tokens + scene.memory.cache.evictable_tokens
        scene.opens_up_to(child, others - (scene.up(71) - scene.up(40)))
        assert lease.state is LeaseState.HANDED_OFF and child.held_kv.length == 40

    def test_lease_copy_costs_only_tokens_outside_the_tree(self, page: int) -> None:
        scene = Scene(page)
        child = scene.child(40, 30, keep_parent=True)
        assert child.inheritance is not None
        lease = child.inheritance.lease
        assert lease is not None and lease.tokens == 40
        others = scene.memory.allocator.free_tokens + scene.memory.cache.evictable_tokens
        scene.opens_up_to(child, others - (scene.up(71) - (40 - 40 % page)))
        assert lease.state is LeaseState.GRANTED and child.inheritance.copied is lease and child.held_kv.length == 40
        (copies,) = scene.memory.copies.take_copies() if page > 1 else [None]
        assert copies is None or (len(copies.source) == 8 and not np.isin(copies.source, copies.target).any())

    @pytest.mark.parametrize("in_flight", [False, True])
    @pytest.mark.parametrize("kept", [20, 40])
    def test_pages_given_up_by_child_wait_for_step_that_writes_them(
        self, page: int, kept: int, in_flight: bool
    ) -> None:
        """The child cuts what it inherits, or finds more of its prompt in the tree. Either way, it gives up the page
        that its parent had not filled, which a step in flight may still write."""
        scene = Scene(page, num_tokens=512)
        said = expected_output(prompt_of(38, 1), 3, frozenset())
        ahead = [*prompt_of(38, 1), *said, *prompt_of(40, 2)]
        scene.harness.add("ahead", ahead, 1)
        scene.harness.run()
        child = scene.child(40, 30)
        assert child.inheritance is not None and child.inheritance.lease is not None
        lease, child.inheritance.inherited_tokens = child.inheritance.lease, kept
        private = scene.up(40) - lease.kv.tree_len if lease.kv is not None else 0
        lease.written_by = scene.memory.allocator.fences.open_fence() if in_flight else None
        assert lease.tokens == 40 and scene.memory.open_request(child, 0, 0.0)
        assert lease.state is LeaseState.HANDED_OFF and child.held_kv.length == (20 if kept == 20 else 70 - 70 % page)
        assert private == (16 if page == 16 else 0)
        assert scene.memory.allocator.quarantined_tokens == (private if in_flight else 0)


@PAGES
class TestReclaim:
    def leased(self, scene: Scene, number: int) -> None:
        scene.harness.add(f"leased{number}", prompt_of(30, number), 3, retain_ttl=100.0)
        scene.harness.run()

    def test_reclaim_evicts_cache_before_breaking_needed_leases(self, page: int) -> None:
        scene = Scene(page)
        for number in (1, 2):
            self.leased(scene, number)
        scene.harness.add("cached", prompt_of(64, 3), 1)
        scene.harness.run()
        memory, leases = scene.memory, scene.memory.leases
        free, evictable = memory.allocator.free_tokens, memory.cache.evictable_tokens
        assert evictable == 64 and memory.available_tokens == free + 64
        memory.reclaim(free, 0.0)
        assert memory.cache.evictable_tokens == 64
        memory.reclaim(free + 64, 0.0)
        assert memory.allocator.free_tokens == free + 64 and len(leases) == 2
        memory.reclaim(free + 65, 0.0)
        assert len(leases) == 1
        memory.reclaim(257, 0.0)
        assert len(leases) == 0 and memory.allocator.free_tokens == 256

    def test_extend_allocates_slots_of_running_request(self, page: int) -> None:
        scene = Scene(page, num_tokens=64)
        request = scene.computed("r", prompt_of(21, 1))
        slots = scene.memory.extend(request, 33, 0.0)
        assert slots is not None and slots.dtype == np.int32 and request.held_kv.length == 33
        row = scene.memory.req_to_token.rows[request.held_kv.row]
        assert row[21:33].tolist() == slots.tolist() and len(set(row[:33].tolist())) == 33
        assert [slot % page for slot in row[:33].tolist()] == [position % page for position in range(33)]
        request.scheduled_len = request.committed_len = 33
        assert scene.memory.extend(request, 65, 0.0) is None and request.held_kv.length == 33
        request.scheduled_len = request.committed_len = 33
        assert scene.memory.extend(request, 64, 0.0) is not None and scene.memory.allocator.free_tokens == 0

    def test_fork_without_memory_changes_nothing(self, page: int) -> None:
        scene = Scene(page, num_tokens=64, leased_ratio=1.0)
        request = scene.computed("r", prompt_of(39, 1))
        filler = [np.array([length], dtype=np.int32) for length in (0, 64 - scene.up(39), 0)]
        assert scene.memory.allocator.alloc_extend(*filler) is not None
        assert scene.memory.allocator.free_tokens == 0
        scene.memory.publish(request)
        before = scene.state()
        row = scene.memory.req_to_token.alloc()
        assert row is not None
        assert (scene.memory.fork_into(request.held_kv, 39, row) is None) is (page > 1), "a whole prompt needs no copy"
        if page > 1:
            scene.memory.req_to_token.free(row)
            assert scene.memory.lease_copy(request, TERMS) is None
            assert scene.state() == before

    def test_lease_copy_without_free_row_changes_nothing(self, page: int) -> None:
        scene = Scene(page)
        request = scene.computed("r", prompt_of(39, 1))
        scene.memory.publish(request)
        while scene.memory.req_to_token.alloc() is not None:
            pass
        before = scene.state()
        assert scene.memory.lease_copy(request, TERMS) is None and scene.state() == before

    def test_fork_evicts_cached_tokens(self, page: int) -> None:
        scene = Scene(page, num_tokens=128)
        scene.harness.add("cached", prompt_of(64, 3), 1)
        scene.harness.run()
        request = scene.computed("r", prompt_of(60, 1))
        scene.memory.allocator.alloc_extend(*(np.array([n], dtype=np.int32) for n in (0, 128 - 64 - scene.up(60), 0)))
        assert scene.memory.allocator.free_tokens == 0 and scene.memory.cache.evictable_tokens == 64
        row = scene.memory.req_to_token.alloc()
        assert row is not None
        fork = scene.memory.fork_into(request.held_kv, 60, row)
        assert fork is not None and fork.length == 60 and scene.memory.cache.evictable_tokens == 64 - scene.up(60)


@PAGES
class TestLeases:
    def test_lease_copy_over_budget_is_freed(self, page: int) -> None:
        scene = Scene(page, leased_ratio=0.1)
        request = scene.computed("r", prompt_of(39, 1))
        assert scene.memory.lease_copy(request, TERMS) is None
        free, evictable, protected, rows = scene.state()
        assert (evictable, protected) == (0, 39 - 39 % page) and free == 256 - scene.up(39)
        assert rows == scene.memory.req_to_token.num_rows - 1 and request.held_kv.length == 39

    def test_lease_copy_leaves_request_its_own_kv(self, page: int) -> None:
        scene = Scene(page)
        request = scene.computed("r", prompt_of(39, 1))
        lease = scene.memory.lease_copy(request, TERMS)
        assert lease is not None and lease.tokens == 39 and lease.kv is not request.kv
        assert scene.memory.leases.leased_tokens == scene.up(39)

    @pytest.mark.parametrize("in_flight", [False, True])
    @pytest.mark.parametrize("ratio", [0.5, 0.01])
    def test_pages_written_by_step_in_flight_are_quarantined_on_retain(
        self, page: int, ratio: float, in_flight: bool
    ) -> None:
        scene = Scene(page, leased_ratio=ratio)
        request = scene.computed("r", prompt_of(39, 1))
        assert scene.memory.extend(request, 49, 0.0) is not None
        if in_flight:
            request.scheduled_len = 49
        fence = scene.memory.allocator.fences.open_fence()
        lease, _ = scene.memory.retain(request, 60, TERMS, fence)
        assert (lease is not None) is (ratio == 0.5)
        assert request.kv is None and request.committed_len == request.scheduled_len == 0
        assert lease is None or (lease.tokens == 39 and lease.written_by == (fence if in_flight else None))
        beyond = scene.up(49) - scene.up(39)
        tail = 0 if lease is not None else scene.up(39) - (39 - 39 % page)
        assert scene.memory.allocator.quarantined_tokens == (beyond + tail if in_flight else 0)

    def test_retained_cut_keeps_whole_tree_pages_only(self, page: int) -> None:
        scene = Scene(page)
        request = scene.computed("r", prompt_of(39, 1))
        scene.memory.publish(request)
        lease, _ = scene.memory.retain(request, 20, TERMS, fence=None)
        assert lease is not None and lease.tokens == 20 - 20 % page, "no part of a page of the tree is kept"


def test_requests_with_unfilled_slots_become_uncommitted() -> None:
    scene = Scene(1)
    waits = scene.waiting("waits", prompt_of(9, 9))
    spoilt, sound = (scene.computed(rid, prompt_of(20, number)) for number, rid in enumerate(("spoilt", "sound")))
    scene.memory.publish(sound)
    slots = scene.memory.req_to_token.rows[spoilt.held_kv.row, 18:20].copy()
    rows = scene.memory.req_to_token.rows
    assert take_back_unfilled(rows, slots, [waits, sound, spoilt]) == [spoilt]
    assert spoilt.committed_len == 0 and sound.committed_len == 20
    shared = scene.memory.req_to_token.rows[sound.held_kv.row, :20].copy()
    assert take_back_unfilled(rows, shared, [waits, sound, spoilt]) == [], "slots of the tree are nobody's own"


def fill(harness: Harness) -> None:
    """Cache prompts until the next one must evict."""
    number = 0
    while harness.allocator.free_tokens > 64:
        harness.add(f"fill{number}", [number % 97 + 1, number // 97 + 1, *range(1, 61)], max_new_tokens=1)
        harness.run()
        number += 1


def test_full_pool_evicts_in_batches() -> None:
    harness = Harness(num_tokens=2560)
    fill(harness)
    harness.add("r", [99, 99, *range(1, 61)], max_new_tokens=100)
    evictions = [harness.cache.evicted_total]
    while not harness.scheduler.is_idle:
        harness.step()
        evictions.append(harness.cache.evicted_total)
    pieces = [new - old for old, new in pairwise(evictions) if new > old]
    assert len(pieces) < 15 and min(pieces) >= 10  # 1/256 of the pool


def test_small_pool_evicts_only_as_needed() -> None:
    harness = Harness(num_tokens=255)
    fill(harness)
    free = harness.allocator.free_tokens
    harness.add("r", [99, 99, *range(1, 61)], max_new_tokens=20)
    harness.run()
    assert harness.cache.evicted_total == 62 + 19 - free > 0
