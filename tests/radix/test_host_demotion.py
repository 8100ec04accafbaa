"""What no lease keeps any more goes to the host, also where only what was hit again is stored."""

from __future__ import annotations

import numpy as np
import pytest

from baton.radix.discarding import drop_path, retire
from baton.radix.kv_sequence import SequenceEnd
from baton.radix.lease import LeaseTable, LeaseTerms
from baton.radix.lease_budget import LeaseBudget
from baton.radix.node import TreeNode
from baton.radix.tiers.host_tier import HostPolicy
from tests.doubles.host_rig import TierRig, tokens

SELECTIVE = HostPolicy(min_hits=5)
POLICIES = pytest.mark.parametrize(
    "policy", [HostPolicy(), SELECTIVE, HostPolicy(write_back=True)], ids=["through", "selective", "back"]
)


def node_of(rig: TierRig, ids: np.ndarray) -> TreeNode:
    return rig.cache.match_prefix("", ids).handle


class TestPromise:
    @POLICIES
    def test_demoted_path_is_stored_under_memory_pressure(self, policy: HostPolicy) -> None:
        """The path and what hangs on it in the middle: only the path is promised."""
        rig = TierRig(page_size=4, policy=policy)
        rig.insert(tokens(32))
        rig.insert(tokens(64))
        rig.insert(np.concatenate([tokens(32), tokens(16, 500)]))
        node = node_of(rig, tokens(64))
        rig.tier.path_demoted(node)
        assert rig.tier.promised_tokens(node) == 64
        rig.cache.evict(10**9)
        rig.check()
        rig.store_all()
        rig.cache.evict(10**9)
        rig.check()
        assert not node.on_device and rig.cache.match_len("", tokens(64)) == 64
        other = rig.cache.match_len("", np.concatenate([tokens(32), tokens(16, 500)]))
        assert other == (48 if policy.write_back else 32)

    def test_demoted_path_is_stored_in_background_without_pressure(self) -> None:
        rig = TierRig(page_size=4, policy=SELECTIVE)
        rig.insert(tokens(64))
        rig.insert(tokens(64, 1000))
        rig.store_all()
        assert rig.tier.tokens == 0
        rig.tier.path_demoted(node_of(rig, tokens(64)))
        rig.store_all()
        rig.check()
        assert rig.tier.tokens == 64 and node_of(rig, tokens(64)).host is not None

    def test_demoted_path_is_stored_only_once(self) -> None:
        """The host may have given it up: a promise is no pin."""
        rig = TierRig(page_size=4, policy=SELECTIVE)
        rig.insert(tokens(64))
        node = node_of(rig, tokens(64))
        rig.tier.path_demoted(node)
        rig.store_all()
        rig.tier.evict(64)
        assert rig.cache.evict(64) == 64 and rig.cache.total_nodes == 0
        rig.check()

    def test_promised_tokens_are_limited_by_host_capacity(self) -> None:
        rig = TierRig(page_size=4, host_tokens=64)
        rig.insert(tokens(48))
        rig.store_all()
        rig.insert(tokens(72))
        rig.tier.path_demoted(node_of(rig, tokens(72)))
        assert rig.tier.promised_tokens(node_of(rig, tokens(72))) == 48
        rig.insert(tokens(64, 1000))
        rig.insert(tokens(68, 2000))
        assert rig.tier.promised_tokens(node_of(rig, tokens(64, 1000))) == 64
        assert rig.tier.promised_tokens(node_of(rig, tokens(68, 2000))) == 0

    def test_dropped_path_is_not_demoted(self) -> None:
        rig = TierRig(page_size=4)
        running = rig.start(tokens(64))
        assert rig.compute(running)
        rig.publish(running)
        node = running.kv.node
        assert node is not None
        drop_path(rig.cache, node, kept=32)
        rig.tier.path_demoted(node)
        assert rig.tier.promised_tokens(node) == 0
        rig.finish(running)
        rig.store_all()
        rig.check()
        assert rig.tier.tokens == 0


@pytest.mark.parametrize("end", ["broken", "expired", "released", "handed off"])
def test_only_broken_or_expired_leases_are_demoted(end: str) -> None:
    rig = TierRig(page_size=4, policy=SELECTIVE)
    budget = LeaseBudget(4, max_tokens=512, max_leases=4)
    leases = LeaseTable(rig.cache, budget, value=lambda lease, now: (0.0,))
    running = rig.start(tokens(63))
    assert rig.compute(running)
    rig.publish(running)
    lease = leases.grant(running.kv, LeaseTerms(deadline=5.0, now=0.0))
    assert lease is not None
    match end:
        case "broken":
            leases.break_one(1.0)
            rig.running.clear()
        case "expired":
            leases.expire(5.0)
            rig.running.clear()
        case "released":
            leases.release(lease)
            rig.running.clear()
        case _:
            assert leases.hand_off(lease) is running.kv
    rig.store_all()
    rig.check()
    assert rig.tier.tokens == (60 if end in ("broken", "expired") else 0)


class TestRetired:
    @pytest.mark.parametrize("write_back", [False, True])
    @pytest.mark.parametrize("how", [SequenceEnd.FINISHED, SequenceEnd.RELEASED])
    def test_kv_that_only_goes_early_is_stored_and_kv_that_is_over_is_not(
        self, how: SequenceEnd, write_back: bool
    ) -> None:
        """A first turn with a broken lease may well be continued."""
        rig = TierRig(page_size=4, policy=HostPolicy(write_back=write_back))
        rig.insert(tokens(64))
        retire(rig.cache, rig.cache.find_prefix("", tokens(64))[0], how=how)
        rig.store_all()
        rig.cache.evict(10**9)
        rig.store_all()
        rig.check()
        assert rig.tier.tokens == (64 if how is SequenceEnd.FINISHED else 0)

    def test_path_that_a_lease_has_held_is_stored_all_the_same(self) -> None:
        """A request may continue from there."""
        rig = TierRig(page_size=4)
        rig.insert(tokens(64))
        node = rig.cache.find_prefix("", tokens(64))[0]
        retire(rig.cache, node)
        rig.tier.path_demoted(node)
        rig.store_all()
        assert rig.tier.tokens == 64
