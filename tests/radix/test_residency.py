"""What becomes of evicted nodes is asked in one place, after all victims are chosen and before a slot is free."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from baton.radix.invariants import InvariantError, check_tree
from baton.radix.node import TreeNode
from baton.radix.residency import DeviceOnly
from tests.doubles.cache_rig import CacheRig


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


class RecordingResidency(DeviceOnly):
    """Drops everything, and notes what it saw when it was asked."""

    def __init__(self, rig: CacheRig) -> None:
        self.rig = rig
        self.asked: list[list[int]] = []
        """Tokens of each victim, for each call."""
        self.free: list[int] = []
        """Free tokens at each call."""

    def select_dropped(self, victims: Sequence[TreeNode]) -> Sequence[TreeNode]:
        for number, victim in enumerate(victims):
            assert not victim.on_device and not victim.lock_ref and victim.device_children == 0
            assert victim.parent is not None and victim.parent.children[victim.child_key] is victim, "still in the tree"
            assert all(child in victims[:number] for child in victim.children.values()), "children come first"
        self.asked.append([len(victim) for victim in victims])
        self.free.append(self.rig.allocator.free_tokens)
        return victims


def rig_with_stem_and_branches() -> tuple[CacheRig, RecordingResidency]:
    """A stem of 2 tokens with branches of 3 and 4 tokens, and a leaf of 5 beside it that was used last."""
    rig = CacheRig(num_tokens=256)
    residency = rig.cache.residency = RecordingResidency(rig)
    rig.insert(tokens(1, 1, 2, 2, 2))
    rig.insert(tokens(1, 1, 3, 3, 3, 3))
    rig.insert(tokens(5, 5, 5, 5, 5))
    return rig, residency


def test_residency_is_queried_once_before_victims_are_freed() -> None:
    rig, residency = rig_with_stem_and_branches()
    free = rig.allocator.free_tokens
    assert rig.cache.evict(8) == 8
    assert residency.asked == [[3, 4, 1]] and residency.free == [free], "half of the stem is no victim"
    assert rig.allocator.free_tokens == free + 8
    rig.verify()


def test_residency_is_not_queried_without_victims() -> None:
    rig, residency = rig_with_stem_and_branches()
    assert rig.cache.evict(0) == 0
    handle = rig.cache.match_prefix("", tokens(5, 5, 5, 5, 5)).handle
    rig.cache.lock(handle)
    assert rig.cache.evict(1000) == 9 and rig.cache.evict(1000) == 0
    assert residency.asked == [[3, 4, 2]]
    assert rig.cache.reset() is False
    rig.cache.unlock(handle)
    assert rig.cache.reset(), "a reset is no eviction"
    assert residency.asked == [[3, 4, 2]]


def test_device_children_are_counted_after_splits_and_inserts() -> None:
    rig, _ = rig_with_stem_and_branches()
    stem = rig.cache.match_prefix("", tokens(1, 1)).handle
    assert stem.device_children == 2 and rig.cache.tree.root.device_children == 2
    half = rig.cache.match_prefix("", tokens(1)).handle  # splits the stem
    assert half.device_children == 1 and stem.device_children == 2
    rig.insert(tokens(1, 9))
    assert half.device_children == 2
    rig.verify()


def test_a_single_tier_drops_every_victim() -> None:
    rig = CacheRig()
    rig.insert(tokens(1, 2, 3))
    nodes = list(rig.cache.tree.nodes())
    assert DeviceOnly().select_dropped(nodes) == nodes
    assert isinstance(rig.cache.residency, DeviceOnly)


@pytest.mark.parametrize(
    ("damage", "message"),
    [("flag", r"^node #\d .*is on no tier, but in the tree"), ("count", r"^node #\d .*has 2 children on the device")],
)
def test_wrong_residency_is_detected(damage: str, message: str) -> None:
    rig, _ = rig_with_stem_and_branches()
    node = rig.cache.match_prefix("", tokens(1, 1)).handle
    if damage == "flag":
        node.on_device = False
    else:
        node.device_children = 1
    with pytest.raises(InvariantError, match=message):
        check_tree(rig.cache)
