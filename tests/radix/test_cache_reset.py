"""The cache forgets everything, and refuses what cannot be meant."""

from __future__ import annotations

import numpy as np
import pytest

from baton.memory_pool.allocator import Allocator
from baton.memory_pool.req_to_token import ReqToTokenPool
from baton.radix.cache import RadixCache
from tests.doubles.cache_rig import CacheRig

PAGES = [1, 4, 16]


def tokens(count: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def whole(length: int, page: int) -> int:
    return length - length % page


class TestReset:
    def test_reset_frees_everything(self) -> None:
        rig = CacheRig(page_size=4)
        for i in range(5):
            rig.insert(tokens(30, 100 * i))
        assert rig.cache.reset()
        account = rig.verify()
        assert account.free == account.total
        assert rig.cache.total_nodes == 0
        rig.insert(tokens(30))
        assert rig.verify().evictable == 28

    def test_reset_is_refused_while_sequence_is_open(self) -> None:
        rig = CacheRig()
        rig.insert(tokens(10))
        running = rig.start(tokens(20))
        assert not rig.cache.reset()
        assert rig.verify().protected == 10
        rig.release(running)
        assert rig.cache.reset()


class TestMisuse:
    def test_closed_sequence_cannot_be_used(self) -> None:
        rig = CacheRig()
        running = rig.start(tokens(5))
        rig.release(running)
        for call in (
            lambda: rig.cache.cache_finished_req(running.kv, tokens(0)),
            lambda: rig.cache.cache_unfinished_req(running.kv, tokens(0)),
            lambda: rig.cache.release(running.kv),
        ):
            with pytest.raises(ValueError, match="closed"):
                call()
        rig.verify()

    @pytest.mark.parametrize("count", [3, 21])
    def test_committed_tokens_must_have_slots_and_cover_the_tree_part(self, count: int) -> None:
        rig = CacheRig()
        rig.insert(tokens(10))
        running = rig.start(tokens(30))
        assert rig.extend(running, 20)
        with pytest.raises(ValueError, match="10 tokens in the tree and slots for 20"):
            rig.cache.cache_finished_req(running.kv, tokens(count))
        with pytest.raises(ValueError, match="10 tokens in the tree and slots for 20"):
            rig.cache.cache_unfinished_req(running.kv, tokens(count))
        rig.verify()

    def test_cache_is_enabled_by_default(self) -> None:
        assert not RadixCache(ReqToTokenPool(2, 8), Allocator(64), page_size=1).disabled

    def test_cache_page_size_must_match_allocator(self) -> None:
        with pytest.raises(ValueError, match="differs from the allocator's 16"):
            RadixCache(ReqToTokenPool(2, 8), Allocator(64, 16), page_size=1)
