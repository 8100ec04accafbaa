"""The checks of the tiers themselves: each kind of damage, done by hand, is found."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from baton.radix.invariants import InvariantError
from baton.radix.node import TreeNode
from tests.doubles.host_rig import DiskRig, tokens


def healthy() -> tuple[DiskRig, list[TreeNode]]:
    """Pages of 4. A stem of 8 tokens and a branch of 12, both on the device, on the host and on disk; and the stem's
    other branch of 4, which is on the host alone."""
    rig = DiskRig(4, num_tokens=64, page_size=4)
    rig.insert(tokens(20))
    rig.insert(np.concatenate([tokens(8), tokens(4, 100)]))
    rig.to_disk()
    rig.cache.match_prefix("", tokens(20))
    rig.cache.evict(4)
    nodes = sorted(rig.cache.tree.nodes(), key=lambda node: (node.prefix_len, len(node)))
    assert [(len(node), node.on_device, node.host is not None) for node in nodes] == [
        (8, True, True), (4, False, True), (12, True, True),
    ]  # fmt: skip
    rig.check()
    return rig, nodes


def stem_off_the_device(rig: DiskRig, stem: TreeNode, away: TreeNode, branch: TreeNode) -> None:
    stem.on_device, stem.value = False, stem.value[:0]
    rig.cache.tree.root.device_children -= 1


def nowhere(rig: DiskRig, stem: TreeNode, away: TreeNode, branch: TreeNode) -> None:
    away.host = None
    stem.host_children -= 1


def locked_while_away(rig: DiskRig, stem: TreeNode, away: TreeNode, branch: TreeNode) -> None:
    for node in (away, stem, rig.cache.tree.root):
        node.lock_ref += 1


def stored_while_away(rig: DiskRig, stem: TreeNode, away: TreeNode, branch: TreeNode) -> None:
    away.storing = 7


def loaded_while_away(rig: DiskRig, stem: TreeNode, away: TreeNode, branch: TreeNode) -> None:
    away.loading = 7


def copy_without_its_parents(rig: DiskRig, stem: TreeNode, away: TreeNode, branch: TreeNode) -> None:
    stem.host = None
    rig.cache.tree.root.host_children -= 1


def device_children_miscounted(rig: DiskRig, stem: TreeNode, away: TreeNode, branch: TreeNode) -> None:
    stem.device_children += 1


def host_children_miscounted(rig: DiskRig, stem: TreeNode, away: TreeNode, branch: TreeNode) -> None:
    stem.host_children -= 1


def children_of_the_root_miscounted(rig: DiskRig, stem: TreeNode, away: TreeNode, branch: TreeNode) -> None:
    rig.cache.tree.root.device_children += 1


def slots_though_away(rig: DiskRig, stem: TreeNode, away: TreeNode, branch: TreeNode) -> None:
    away.value = stem.value[:4]


def short_copy(rig: DiskRig, stem: TreeNode, away: TreeNode, branch: TreeNode) -> None:
    assert branch.host is not None
    branch.host = branch.host[:8]


def wide_copy(rig: DiskRig, stem: TreeNode, away: TreeNode, branch: TreeNode) -> None:
    assert branch.host is not None
    branch.host = branch.host.astype(np.int64)


def torn_copy(rig: DiskRig, stem: TreeNode, away: TreeNode, branch: TreeNode) -> None:
    assert branch.host is not None
    branch.host[:2] = branch.host[1::-1]


def copies_miscounted(rig: DiskRig, stem: TreeNode, away: TreeNode, branch: TreeNode) -> None:
    rig.tier.tokens += 4


def page_of_the_host_leaks(rig: DiskRig, stem: TreeNode, away: TreeNode, branch: TreeNode) -> None:
    zero = np.zeros(1, dtype=np.int32)
    assert rig.host_allocator.alloc_extend(zero, zero + 4, zero) is not None


def page_of_the_host_twice(rig: DiskRig, stem: TreeNode, away: TreeNode, branch: TreeNode) -> None:
    assert branch.host is not None
    branch.host[:4] = branch.host[4:8]


def page_of_the_host_of_a_node_and_a_read(rig: DiskRig, stem: TreeNode, away: TreeNode, branch: TreeNode) -> None:
    rig.cache.evict(1000)
    rig.tier.evict(1000)
    rig.insert(tokens(4, 300))
    rig.store_all()
    found = rig.disk.find_blocks("", tokens(20))
    assert found is not None
    fence = rig.disk.begin_read(found, timeout=1.0)
    assert fence is not None
    reading = rig.disk.readings[fence]
    rig.check()
    (node,) = rig.cache.tree.nodes()
    assert node.host is not None
    reading.order.host_slots[:4] = node.host


def no_entry(rig: DiskRig, stem: TreeNode, away: TreeNode, branch: TreeNode) -> None:
    rig.tier.order.clear()


def copy_nobody_makes(rig: DiskRig, stem: TreeNode, away: TreeNode, branch: TreeNode) -> None:
    branch.loading = 7


def store_nobody_makes(rig: DiskRig, stem: TreeNode, away: TreeNode, branch: TreeNode) -> None:
    branch.storing = 7


def write_with_a_closed_fence(rig: DiskRig, stem: TreeNode, away: TreeNode, branch: TreeNode) -> None:
    rig.insert(tokens(4, 50))
    rig.store_all()
    rig.pump_disk()
    rig.host_allocator.fences.close_fence(next(iter(rig.disk.writing)))


def block_name_missing(rig: DiskRig, stem: TreeNode, away: TreeNode, branch: TreeNode) -> None:
    assert branch.block_keys is not None
    branch.block_keys.pop()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (stem_off_the_device, "is there without its parent"),
        (nowhere, "is on no tier, but in the tree"),
        (locked_while_away, "is locked or copied"),
        (stored_while_away, "is locked or copied"),
        (loaded_while_away, "is locked or copied"),
        (copy_without_its_parents, "has a copy without its parent"),
        (device_children_miscounted, "has 1 children on the device"),
        (host_children_miscounted, "has 2 children with a copy on the host"),
        (children_of_the_root_miscounted, "^node #0 .*has 1 children on the device"),
        (slots_though_away, "has 16 key bytes for 4 slots, not 0"),
        (short_copy, "has 48 key bytes for 8 slots, not 12"),
        (wide_copy, "slots that are not int32"),
        (torn_copy, "no pages of the pool"),
        (copies_miscounted, "have a copy on the host, 28 are counted"),
        (page_of_the_host_leaks, "being read are not 512"),
        (page_of_the_host_twice, "a page of the host has two owners"),
        (page_of_the_host_of_a_node_and_a_read, "a page of the host has two owners"),
        (no_entry, "could be evicted from the host, but has no entry"),
        (copy_nobody_makes, "waits for copy 7, which is not under way"),
        (store_nobody_makes, "waits for copy 7, which is not under way"),
        (write_with_a_closed_fence, "is under way, but its fence is closed"),
        (block_name_missing, "has 2 block keys"),
    ],
)
def test_tier_damage_is_detected(damage: Callable, message: str) -> None:
    rig, nodes = healthy()
    damage(rig, *nodes)
    with pytest.raises(InvariantError, match=message):
        rig.check()
