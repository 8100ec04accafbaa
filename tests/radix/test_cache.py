from __future__ import annotations

import numpy as np
import pytest

from baton.radix.cache import MatchResult, StaleHandleError
from baton.radix.kv_sequence import KVSequence
from tests.doubles.cache_rig import CacheRig

PAGES = [1, 4, 16]


def tokens(count: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def whole(length: int, page: int) -> int:
    return length - length % page


@pytest.mark.parametrize("page", PAGES)
class TestLife:
    def test_second_request_reuses_cached_prefix(self, page: int) -> None:
        rig = CacheRig(page_size=page)
        rig.insert(tokens(50))
        rig.verify()
        second = rig.start(np.concatenate([tokens(50), tokens(20, 500)]))
        assert second.kv.tree_len == second.kv.length == whole(50, page)
        rig.verify()  # its row names slots that hold just these tokens
        assert rig.compute(second)
        rig.verify()
        rig.finish(second)
        account = rig.verify()
        assert account.request_private == account.protected == 0
        assert account.evictable == whole(70, page)

    def test_finished_sequence_leaves_only_whole_pages(self, page: int) -> None:
        rig = CacheRig(page_size=page)
        running = rig.start(tokens(37))
        assert rig.extend(running, 45)  # slots beyond what was computed
        assert rig.compute(running, 37)
        assert rig.verify().request_private == -(-45 // page) * page
        rig.finish(running)
        account = rig.verify()
        assert account.evictable == whole(37, page)
        assert account.free == account.total - whole(37, page)
        assert rig.pool.num_free == rig.pool.num_rows
        assert running.kv == KVSequence("", row=-1, node=None, tree_len=0, length=0)

    def test_publish_shares_computed_pages_of_running_sequence(self, page: int) -> None:
        rig = CacheRig(page_size=page)
        first = rig.start(tokens(100))
        for length in (0, 3, 16, 33, 33, 90):
            assert rig.compute(first, length)
            rig.publish(first)
            assert first.kv.tree_len == whole(length, page)
            account = rig.verify()
            assert account.protected == whole(length, page)
            assert account.evictable == 0
        second = rig.start(tokens(100))
        assert second.kv.tree_len == whole(90, page)
        rig.finish(first)
        assert rig.verify().protected == whole(90, page)
        rig.release(second)
        assert rig.verify().evictable == whole(90, page)

    def test_publishing_duplicates_keeps_one_copy(self, page: int) -> None:
        rig = CacheRig(page_size=page)
        ids = tokens(41)
        first, second = rig.start(ids), rig.start(ids)
        assert rig.compute(first)
        assert rig.compute(second)
        rig.publish(first)
        rig.verify()
        mine = rig.pool.rows[second.kv.row, :41].copy()
        rig.publish(second)
        rig.verify()
        shared = whole(41, page)
        rows = rig.pool.rows
        assert (rows[second.kv.row, :shared] == rows[first.kv.row, :shared]).all()
        assert (rows[second.kv.row, shared:41] == mine[shared:]).all()  # the partial page stays its own
        assert rig.verify().protected == shared
        rig.finish(first)
        rig.finish(second)
        assert rig.verify().evictable == shared

    def test_rewritten_row_is_sent_to_the_mirror(self, page: int) -> None:
        rig = CacheRig(page_size=page)
        mirror = rig.pool.rows.copy()
        ids = tokens(48)
        first, second = rig.start(ids), rig.start(ids)
        for running in (first, second):
            assert rig.compute(running)
            rig.publish(running)
            updates = rig.pool.take_updates()
            mirror.reshape(-1)[updates.flat_index(rig.pool.max_context)] = updates.values
        assert (mirror == rig.pool.rows).all()

    def test_duplicates_of_a_finished_sequence_are_freed(self, page: int) -> None:
        rig = CacheRig(page_size=page)
        longer = np.concatenate([tokens(40), tokens(30, 900)])
        first, second, third = rig.start(tokens(60)), rig.start(longer), rig.start(tokens(60))
        for running in (first, second, third):
            assert rig.compute(running)
        for running in (first, second, third):
            rig.finish(running)
            rig.verify()
        shared = whole(40, page)
        assert rig.verify().evictable == whole(60, page) + whole(70, page) - shared

    def test_split_below_running_sequence_leaves_it_intact(self, page: int) -> None:
        rig = CacheRig(page_size=page)
        rig.insert(tokens(64))
        holder = rig.start(np.append(tokens(64), np.int32(7)))
        handle = holder.kv.node
        other = np.concatenate([tokens(20), tokens(30, 900)])
        rig.insert(other)  # splits the locked node
        account = rig.verify()
        assert holder.kv.node is handle
        assert account.protected == 64
        assert rig.cache.evict(1000) == whole(50, page) - whole(20, page)
        rig.verify()
        assert rig.compute(holder)
        rig.finish(holder)
        assert rig.verify().protected == 0

    def test_release_caches_no_new_tokens(self, page: int) -> None:
        rig = CacheRig(page_size=page)
        rig.insert(tokens(20))
        running = rig.start(tokens(50))
        assert rig.compute(running)
        rig.release(running)
        account = rig.verify()
        assert account.evictable == whole(20, page)
        assert account.free == account.total - whole(20, page)
        assert rig.pool.num_free == rig.pool.num_rows

    def test_sequence_without_committed_tokens_leaves_nothing(self, page: int) -> None:
        rig = CacheRig(page_size=page)
        running = rig.start(tokens(30))
        assert rig.extend(running, 30)
        rig.finish(running)
        assert rig.verify().free == rig.allocator.total_tokens
        assert rig.cache.total_nodes == 0

    def test_disabled_cache_matches_nothing_and_frees_all(self, page: int) -> None:
        rig = CacheRig(page_size=page, disabled=True)
        for _ in range(2):
            running = rig.start(tokens(40))
            assert running.kv.tree_len == 0
            assert rig.extend(running, 45)
            assert rig.compute(running, 40)
            rig.publish(running)
            assert running.kv.tree_len == 0
            rig.verify()
            fence = rig.allocator.fences.open_fence()
            rig.finish(running, fence)
            account = rig.verify()
            assert account.quarantined == -(-45 // page) * page - whole(40, page)
            rig.close(fence)
            assert rig.verify().free == rig.allocator.total_tokens
        assert rig.cache.match_prefix("", tokens(40)) == MatchResult(0, 0, rig.cache.tree.root)
        assert rig.cache.match_len("", tokens(40)) == 0


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize(("committed", "length"), [(32, 32), (33, 33), (32, 33), (33, 34), (33, 60), (16, 60), (0, 9)])
class TestQuarantine:
    def test_finish_quarantines_pages_beyond_committed_tokens(self, page: int, committed: int, length: int) -> None:
        rig = CacheRig(page_size=page)
        running = rig.start(tokens(64))
        assert rig.extend(running, length)
        assert rig.compute(running, committed)
        fence, other = rig.allocator.fences.open_fence(), rig.allocator.fences.open_fence()
        rig.finish(running, fence)
        account = rig.verify()
        assert account.evictable == whole(committed, page)
        expected = -(-length // page) * page - whole(committed, page) if length > committed else 0
        assert account.quarantined == expected
        assert rig.close(other) == 0
        assert rig.close(fence) == expected
        assert rig.verify().free == rig.allocator.total_tokens - whole(committed, page)

    def test_release_quarantines_all_private_pages(self, page: int, committed: int, length: int) -> None:
        rig = CacheRig(page_size=page)
        rig.insert(tokens(9))
        running = rig.start(tokens(64))
        if length > running.kv.length:
            assert rig.extend(running, length)
        running.committed = max(running.committed, committed)
        private = -(-running.kv.length // page) * page - running.kv.tree_len
        fence = rig.allocator.fences.open_fence()
        rig.release(running, fence)
        account = rig.verify()
        assert account.quarantined == private
        assert account.evictable == whole(9, page)
        rig.close(fence)
        assert rig.verify().quarantined == 0


class TestLocks:
    def test_nested_locks_count_tokens_once(self) -> None:
        rig = CacheRig()
        rig.insert(tokens(10))
        rig.insert(tokens(20))
        upper = rig.cache.match_prefix("", tokens(10)).handle
        lower = rig.cache.match_prefix("", tokens(20)).handle
        for handle, protected in ((lower, 20), (upper, 20), (lower, 20)):
            rig.cache.lock(handle)
            assert rig.cache.protected_tokens == protected
        assert (upper.lock_ref, lower.lock_ref) == (2, 2)  # the upper: one direct lock, one locked child
        for handle, protected in ((lower, 20), (lower, 10), (upper, 0)):
            rig.cache.unlock(handle)
            assert rig.cache.protected_tokens == protected
            assert rig.cache.evictable_tokens == 20 - protected
        rig.verify()

    def test_parent_stays_protected_until_both_children_unlock(self) -> None:
        rig = CacheRig()
        left = np.concatenate([tokens(5), tokens(5, 100)])
        right = np.concatenate([tokens(5), tokens(5, 200)])
        rig.insert(left)
        rig.insert(right)
        handles = [rig.cache.match_prefix("", ids).handle for ids in (left, right)]
        for handle in handles:
            rig.cache.lock(handle)
        assert rig.cache.protected_tokens == 15
        rig.cache.unlock(handles[0])
        assert rig.cache.evict(100) == 5
        assert rig.cache.protected_tokens == 10
        rig.cache.unlock(handles[1])
        assert rig.cache.evict(100) == 10

    def test_lock_on_root_prevents_reset(self) -> None:
        rig = CacheRig()
        match = rig.cache.match_prefix("", tokens(5))
        assert match.device_len == 0
        rig.cache.lock(match.handle)
        assert not rig.cache.reset()
        rig.cache.unlock(match.handle)
        assert rig.cache.reset()

    def test_surplus_unlock_is_an_error(self) -> None:
        rig = CacheRig()
        rig.insert(tokens(5))
        for handle in (rig.cache.match_prefix("", tokens(5)).handle, rig.cache.match_prefix("", tokens(0)).handle):
            with pytest.raises(StaleHandleError, match="given back twice"):
                rig.cache.unlock(handle)
        rig.verify()

    def test_evicted_handle_cannot_be_locked_or_opened(self) -> None:
        rig = CacheRig()
        rig.insert(tokens(5))
        match = rig.cache.match_prefix("", tokens(5))
        rig.cache.evict(5)
        with pytest.raises(StaleHandleError, match="evicted"):
            rig.cache.lock(match.handle)
        with pytest.raises(StaleHandleError, match="evicted"):
            rig.cache.open_sequence("", match, 0)
        rig.verify()

    def test_handle_from_before_reset_is_stale(self) -> None:
        rig = CacheRig()
        rig.insert(tokens(5))
        matches = [rig.cache.match_prefix("", tokens(5)), rig.cache.match_prefix("", tokens(0))]
        assert rig.cache.reset()
        for match in matches:
            with pytest.raises(StaleHandleError):
                rig.cache.lock(match.handle)


class TestMatch:
    def test_match_prefix_accepts_int32_arrays(self) -> None:
        rig = CacheRig()
        rig.insert(tokens(30))
        assert rig.cache.match_prefix("", tokens(30)).device_len == 30
        assert rig.cache.match_len("", tokens(20)) == 20

    def test_non_int32_token_ids_are_refused(self) -> None:
        with pytest.raises(TypeError, match="must be int32, not int64"):
            CacheRig().cache.match_prefix("", np.arange(3))

    def test_empty_prompt_matches_nothing_and_adds_no_node(self) -> None:
        rig = CacheRig()
        assert rig.cache.match_prefix("", tokens(0)).device_len == 0
        assert rig.cache.match_len("", tokens(0)) == 0
        assert rig.cache.total_nodes == 0

    def test_match_len_splits_no_node(self) -> None:
        rig = CacheRig(page_size=4)
        rig.insert(tokens(32))
        assert rig.cache.match_len("", tokens(15)) == 12
        assert rig.cache.total_nodes == 1

    def test_find_prefix_returns_node_where_prefix_ends(self) -> None:
        rig = CacheRig(page_size=4)
        rig.insert(np.append(tokens(8), tokens(8, 100)))
        rig.insert(tokens(16))
        stem, leaf = (rig.cache.match_prefix("", tokens(length)).handle for length in (8, 16))
        root = rig.cache.tree.root
        for length, expected in {
            3: (root, 0, root),
            4: (root, 4, stem),
            8: (stem, 8, stem),
            11: (stem, 8, stem),
            12: (stem, 12, leaf),
            15: (stem, 12, leaf),
            16: (leaf, 16, leaf),
            20: (leaf, 16, leaf),
        }.items():
            found = rig.cache.find_prefix("", tokens(length))
            assert found == expected and isinstance(found[1], int)
        assert rig.cache.total_nodes == 3

    def test_lookup_resumes_after_known_node(self) -> None:
        rig = CacheRig(page_size=4)
        rig.insert(np.append(tokens(8), tokens(8, 100)))
        rig.insert(tokens(16))
        stem, leaf = (rig.cache.match_prefix("", tokens(length)).handle for length in (8, 16))
        unseen = np.append(tokens(8, 500), tokens(6, 8))  # nobody looks at the first eight again
        assert rig.cache.find_prefix("", unseen, after=stem) == (stem, 12, leaf)
        match = rig.cache.match_prefix("", unseen, after=stem)
        assert (match.device_len, match.host_len) == (12, 0) and leaf.parent is match.handle
        assert rig.cache.match_prefix("", tokens(16), after=match.handle).handle is leaf
        rig.verify()

    def test_lookup_after_evicted_node_restarts_at_root(self) -> None:
        rig = CacheRig()
        rig.insert(tokens(8))
        leaf = rig.cache.match_prefix("", tokens(8)).handle
        rig.cache.evict(8)
        rig.insert(tokens(5))
        assert rig.cache.match_prefix("", tokens(8), after=leaf).device_len == 5
        assert rig.cache.find_prefix("", tokens(8), after=leaf)[1] == 5

    def test_evicted_namespaces_leave_no_trace(self) -> None:
        rig = CacheRig()
        for i in range(100):
            rig.cache.match_prefix(f"tenant-{i}", tokens(10))
            rig.insert(tokens(10), f"tenant-{i}")
        assert rig.cache.evict(10_000) == 1000
        assert rig.cache.total_nodes == 0
        assert not rig.cache.tree.root.children

    def test_namespaces_share_nothing(self) -> None:
        rig = CacheRig()
        rig.insert(tokens(10), "a")
        assert rig.cache.match_prefix("", tokens(10)).device_len == 0
        assert rig.cache.match_prefix("b", tokens(10)).device_len == 0
        assert rig.cache.match_prefix("a", tokens(10)).device_len == 10
        rig.insert(tokens(10), "b")
        assert rig.verify().evictable == 20

    def test_published_sequence_stays_in_its_namespace(self) -> None:
        rig = CacheRig()
        running = rig.start(tokens(30), "a")
        assert rig.compute(running, 10)
        rig.publish(running)
        assert rig.compute(running, 30)
        rig.finish(running)
        assert rig.cache.match_len("a", tokens(30)) == 30
        assert rig.cache.match_len("", tokens(30)) == 0

    @pytest.mark.parametrize("page", [1, 64])
    def test_prompt_of_128k_tokens_is_cached(self, page: int) -> None:
        length = 131_072
        rig = CacheRig(num_tokens=2 * length, page_size=page, context=length, rows=2)
        ids = np.random.default_rng(0).integers(0, 32_000, length, dtype=np.int32)
        running = rig.start(ids)
        assert rig.extend(running, length)
        running.committed = length
        rig.finish(running)
        assert rig.cache.match_prefix("", ids).device_len == length
        other = ids.copy()
        other[100_000] += 1
        assert rig.cache.match_prefix("", other).device_len == whole(100_000, page)
        assert rig.verify().evictable == length


def test_long_prompt_lookup_finds_whole_cached_prefix() -> None:
    rig = CacheRig(num_tokens=16_384, context=8192)
    ids = np.arange(6000, dtype=np.int32)
    tree = rig.cache.tree
    top = tree.add_leaf(tree.root, "", ids[:1000].tobytes(), ids[:1000], 0)
    tree.add_leaf(top, "", ids[1000:5900].tobytes(), ids[1000:5900], 0)
    assert [rig.cache.find_prefix("", ids, after)[1] for after in (None, top)] == [5900, 5900]
    other = np.append(ids[:1100], ids[:5000])
    assert [rig.cache.find_prefix("", other, after)[1] for after in (None, top)] == [1100, 1100]
