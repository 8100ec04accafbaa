"""The checks themselves: each kind of damage, done by hand, is found."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from baton.radix.invariants import Account, InvariantError, check_states, check_tree, conservation, dump
from baton.radix.node import ID_BYTES, StateKind, TreeNode
from baton.radix.sequence_states import HeldState
from tests.doubles.cache_rig import CacheRig, Running
from tests.doubles.state_rig import StateRig


def tokens(count: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def healthy() -> tuple[CacheRig, Running]:
    """Pages of 4; a stem of 8 tokens with branches of 12 and 4, and a sequence on the longer one."""
    rig = CacheRig(num_tokens=256, page_size=4)
    rig.insert(tokens(20))
    rig.insert(np.concatenate([tokens(8), tokens(4, 100)]))
    running = rig.start(tokens(40))
    assert rig.compute(running, 35)
    rig.verify()
    return rig, running


def test_account_covers_every_token() -> None:
    rig, _ = healthy()
    assert rig.verify() == Account(
        free=256 - 24 - 16, evictable=4, protected=20, request_private=16, beam_private=0, quarantined=0, total=256
    )


def test_dump_shows_the_tree() -> None:
    rig, _ = healthy()
    rig.cache.match_prefix("salt", tokens(4))
    assert re.sub(r" last_access=\d+", "", dump(rig.cache)).splitlines() == [
        "node #0 [] tokens=0 lock_ref=2 children=1",
        "  node #2 [0 1 2 3 …] tokens=8 lock_ref=1 children=2 namespace=''",
        "    node #3 [100 101 102 103] tokens=4 lock_ref=0 children=0",
        "    node #1 [8 9 10 11 …] tokens=12 lock_ref=1 children=0",
    ]
    rig.insert(tokens(8, 50), "salt")
    assert "namespace='salt'" in dump(rig.cache).splitlines()[1]


def test_long_dump_is_truncated() -> None:
    rig, _ = healthy()
    assert len(dump(rig.cache, max_nodes=4).splitlines()) == 4
    cut = dump(rig.cache, max_nodes=2).splitlines()
    assert len(cut) == 3 and cut[-1] == "… 4 nodes in all"
    rig = CacheRig()
    for first in range(250):
        rig.insert(tokens(1, first))
    assert len(dump(rig.cache).splitlines()) == 200 + 1


def steal_lock(rig: CacheRig, running: Running) -> None:
    assert running.kv.node is not None
    running.kv.node.lock_ref += 1


def lose_lock(rig: CacheRig, running: Running) -> None:
    node = running.kv.node
    assert node is not None
    node.lock_ref = 0


def miscount_evictable(rig: CacheRig, running: Running) -> None:
    rig.cache.evictable_tokens += 4


def miscount_protected(rig: CacheRig, running: Running) -> None:
    rig.cache.protected_tokens -= 4


def miscount_nodes(rig: CacheRig, running: Running) -> None:
    rig.cache.tree.total_nodes += 1


def forget_a_leaf(rig: CacheRig, running: Running) -> None:
    rig.cache.order.pop()


def forget_the_order(rig: CacheRig, running: Running) -> None:
    rig.cache.order.clear()


def entry_too_late(rig: CacheRig, running: Running) -> None:
    for node in rig.cache.tree.nodes():
        node.last_access = -1


def wrong_parent(rig: CacheRig, running: Running) -> None:
    assert running.kv.node is not None
    running.kv.node.parent = rig.cache.tree.root


def wrong_prefix_len(rig: CacheRig, running: Running) -> None:
    assert running.kv.node is not None
    running.kv.node.prefix_len += 4


def wrong_key(rig: CacheRig, running: Running) -> None:
    assert running.kv.node is not None
    running.kv.node.key = tokens(12, 50).tobytes()


def root_with_a_parent(rig: CacheRig, running: Running) -> None:
    rig.cache.tree.root.parent = running.kv.node


def root_with_a_key(rig: CacheRig, running: Running) -> None:
    rig.cache.tree.root.key = tokens(4).tobytes()


def root_with_slots(rig: CacheRig, running: Running) -> None:
    rig.cache.tree.root.value = tokens(4)


def steal_a_lock_of_the_root(rig: CacheRig, running: Running) -> None:
    rig.cache.tree.root.lock_ref += 1


def part_of_a_page(rig: CacheRig, running: Running) -> None:
    assert running.kv.node is not None
    running.kv.node.key = running.kv.node.key[: 11 * ID_BYTES]


def no_tokens(rig: CacheRig, running: Running) -> None:
    assert running.kv.node is not None
    running.kv.node.key = b""


def wide_slots(rig: CacheRig, running: Running) -> None:
    assert running.kv.node is not None
    running.kv.node.value = running.kv.node.value.astype(np.int64)


def key_too_long(rig: CacheRig, running: Running) -> None:
    assert running.kv.node is not None
    running.kv.node.key += tokens(4).tobytes()


def two_entries(rig: CacheRig, running: Running) -> None:
    lane = rig.cache.order._lanes.all[0]
    lane.push_entry(lane.first())


def no_entry_but_marked(rig: CacheRig, running: Running) -> None:
    assert running.kv.node is not None
    assert running.kv.node.parent is not None
    running.kv.node.parent.entry = (7, 0, running.kv.node.parent)


def misfiled_below_the_root(rig: CacheRig, running: Running) -> None:
    root = rig.cache.tree.root
    ((key, stem),) = root.children.items()
    del root.children[key]
    stem.child_key = ("", tokens(4, 60).tobytes())
    root.children[stem.child_key] = stem


def torn_page(rig: CacheRig, running: Running) -> None:
    assert running.kv.node is not None
    running.kv.node.value[:2] = running.kv.node.value[1::-1]


def unaligned_page(rig: CacheRig, running: Running) -> None:
    assert running.kv.node is not None
    running.kv.node.value[:4] += 1


def page_out_of_order(rig: CacheRig, running: Running) -> None:
    assert running.kv.node is not None
    running.kv.node.value[1:3] = running.kv.node.value[2:0:-1]


def padding_page(rig: CacheRig, running: Running) -> None:
    assert running.kv.node is not None
    running.kv.node.value[:4] = np.arange(4)


def slot_twice_in_the_tree(rig: CacheRig, running: Running) -> None:
    assert running.kv.node is not None
    running.kv.node.value[:4] = running.kv.node.value[4:8]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (root_with_a_parent, "^the root has a parent"),
        (root_with_a_key, "^the root has tokens"),
        (root_with_slots, "^the root has tokens"),
        (steal_a_lock_of_the_root, r"^node #0 .*should have lock_ref 2"),
        (steal_lock, r"^node #1 .*should have lock_ref 1"),
        (lose_lock, r"^node #2 .*should have lock_ref 0"),
        (part_of_a_page, r"^node #1 .*does not hold whole pages of 4 tokens"),
        (no_tokens, r"^node #1 .*(is not filed under its first page|does not hold whole pages of 4 tokens)"),
        (wide_slots, r"^node #1 .*slots that are not int32"),
        (key_too_long, r"^node #1 .*has a wrong prefix_len"),
        (two_entries, "^a node has two entries in the eviction order"),
        (no_entry_but_marked, r"^node #2 .*has the entry \(\d+, \d+\), which is in no lane"),
        (miscount_evictable, "evictable tokens, counted"),
        (miscount_protected, "protected tokens, counted"),
        (miscount_nodes, "total_nodes"),
        (forget_a_leaf, r"^node #3 .*an unlocked leaf without an entry"),
        (forget_the_order, r"^node #\d .*has the entry \(\d+, \d+\), which is in no lane"),
        (entry_too_late, r"^node #\d .*would be evicted late: its entry says"),
        (wrong_parent, r"^node #1 .*and its parent disagree"),
        (wrong_prefix_len, r"^node #1 .*has a wrong prefix_len"),
        (wrong_key, r"^node #1 .*not filed under its first page"),
        (misfiled_below_the_root, r"^node #2 .*not filed under its first page"),
        (torn_page, r"^node #1 .*no pages of the pool"),
        (unaligned_page, "no pages of the pool"),
        (page_out_of_order, "no pages of the pool"),
        (padding_page, "no pages of the pool"),
        (slot_twice_in_the_tree, "stands in the tree twice"),
    ],
)
def test_tree_damage_is_detected(damage: Callable[[CacheRig, Running], None], message: str) -> None:
    rig, running = healthy()
    damage(rig, running)
    with pytest.raises(InvariantError, match=message) as error:
        check_tree(rig.cache, [running.kv])
    assert "node #" in str(error.value)  # the dump


def test_missing_lock_is_detected_without_sequences() -> None:
    rig, running = healthy()
    node = running.kv.node
    assert node is not None
    assert node.parent is not None
    node.parent.lock_ref = 0
    with pytest.raises(InvariantError, match=r"^node #2 .*has 1 locked children"):
        check_tree(rig.cache)


def test_sequence_on_removed_node_is_detected() -> None:
    rig, running = healthy()
    rig.release(running)
    stray = rig.cache.match_prefix("", tokens(20)).handle
    rig.cache.evict(1000)
    running.kv.node = stray
    with pytest.raises(InvariantError, match="not in the tree"):
        check_tree(rig.cache, [running.kv])


def free_what_a_row_names(rig: CacheRig, running: Running) -> None:
    rig.allocator.free(rig.pool.rows[running.kv.row, 20:24])


def quarantine_what_a_row_names(rig: CacheRig, running: Running) -> None:
    rig.allocator.quarantine(rig.pool.rows[running.kv.row, 20:24], [rig.allocator.fences.open_fence()])


def row_names_a_page_of_the_tree(rig: CacheRig, running: Running) -> None:
    rig.pool.rows[running.kv.row, 20:24] = rig.pool.rows[running.kv.row, :4]


def row_differs_from_its_path(rig: CacheRig, running: Running) -> None:
    rig.pool.rows[running.kv.row, 3] += 1


def row_out_of_order(rig: CacheRig, running: Running) -> None:
    rig.pool.rows[running.kv.row, 20:22] = rig.pool.rows[running.kv.row, 21:19:-1]


def row_between_pages(rig: CacheRig, running: Running) -> None:
    rig.pool.rows[running.kv.row, 20:24] += 1


def closed(rig: CacheRig, running: Running) -> None:
    running.kv.node = None


def row_outside_the_pool(rig: CacheRig, running: Running) -> None:
    rig.pool.rows[running.kv.row, 20:24] = np.arange(4) + 256 + 4


def row_freed(rig: CacheRig, running: Running) -> None:
    rig.pool.free(running.kv.row)


def broken_length(rig: CacheRig, running: Running) -> None:
    running.kv.tree_len = 19


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (free_what_a_row_names, "has 2 owners: free, row"),
        (quarantine_what_a_row_names, "has 2 owners: quarantined, row"),
        (row_names_a_page_of_the_tree, "has 2 owners: tree, row"),
        (row_differs_from_its_path, "row and tree disagree"),
        (row_out_of_order, "no whole pages in order"),
        (row_between_pages, "no whole pages in order"),
        (closed, "is closed or has"),
        (row_outside_the_pool, "outside 1 … 64"),
        (row_freed, "a row that is free"),
        (broken_length, "impossible lengths"),
    ],
)
def test_sequence_damage_is_detected(damage: Callable[[CacheRig, Running], None], message: str) -> None:
    rig, running = healthy()
    damage(rig, running)
    with pytest.raises(InvariantError, match=message):
        conservation(rig.cache, rig.allocator, [running.kv])


def test_row_with_two_owners_is_detected() -> None:
    rig, running = healthy()
    with pytest.raises(InvariantError, match="share a row"):
        conservation(rig.cache, rig.allocator, [running.kv, running.kv])


def test_closed_sequence_is_detected() -> None:
    rig, running = healthy()
    rig.release(running)
    with pytest.raises(InvariantError, match="free"):
        conservation(rig.cache, rig.allocator, [running.kv])


def test_leaked_and_doubly_owned_tokens_are_distinguished() -> None:
    rig, running = healthy()
    account = conservation(rig.cache, rig.allocator, [])
    assert account.leaked == 16
    with pytest.raises(InvariantError, match="16 tokens of the pool have no owner"):
        account.check()
    rig.cache.evictable_tokens += 20
    with pytest.raises(InvariantError, match="20 tokens of the pool have two owners"):
        conservation(rig.cache, rig.allocator, [running.kv]).check()


def test_leak_of_a_single_token_is_detected() -> None:
    account = Account(free=9, evictable=1, protected=1, request_private=1, beam_private=1, quarantined=1, total=14)
    account.check()
    with pytest.raises(InvariantError, match="1 tokens of the pool have no owner"):
        replace(account, total=15).check()


def test_beam_pages_are_counted_and_have_one_owner() -> None:
    rig, running = healthy()
    slots = rig.allocator.alloc_extend(tokens(1), tokens(13)[-1:], tokens(1))
    assert slots is not None
    pages = slots[::4] // 4
    account = conservation(rig.cache, rig.allocator, [running.kv], [pages[:1], pages[1:]])
    assert account.beam_private == 12 and account.leaked == 0
    with pytest.raises(InvariantError, match="has 2 owners: beam search 0, beam search 1"):
        conservation(rig.cache, rig.allocator, [running.kv], [pages, pages[2:]])


def test_leak_of_the_whole_pool_is_counted() -> None:
    rig = CacheRig(num_tokens=16, page_size=4)
    assert rig.allocator.alloc_extend(tokens(1), tokens(17)[-1:], tokens(1)) is not None
    assert conservation(rig.cache, rig.allocator, []).leaked == 16


def stateful() -> tuple[StateRig, Running, TreeNode]:
    """Pages of 4; a stem of 8 tokens with a state and two branches with one each, and a sequence on one of them with
    states of 12 and 15 tokens. Returns the node of the stem, too."""
    rig = StateRig(num_tokens=256, page_size=4, rows=4, context=64, states=12)
    for ids in (tokens(8), tokens(12), np.concatenate([tokens(8), tokens(4, 100)])):
        running = rig.start(ids)
        assert rig.compute(running)
        rig.finish_turn(running, StateKind.TURN_END)
    running = rig.start(tokens(40))
    assert rig.compute(running, 15)
    rig.settle(running)
    rig.verify()
    stem = running.kv.open_node().parent
    assert stem is not None and [held.length for held in running.kv.states.held] == [12, 15]
    return rig, running, stem


def lose_name_of_node(rig: StateRig, running: Running, stem: TreeNode) -> None:
    rig.slots.refs[stem.state] = 0


def name_twice(rig: StateRig, running: Running, stem: TreeNode) -> None:
    rig.slots.refs[stem.state] += 1


def drop_what_sequence_names(rig: StateRig, running: Running, stem: TreeNode) -> None:
    rig.slots.drop(running.kv.states.held[-1].slot)


def leak(rig: StateRig, running: Running, stem: TreeNode) -> None:
    assert rig.slots.take() is not None


def lose_free_slot(rig: StateRig, running: Running, stem: TreeNode) -> None:
    slot = rig.slots.take()
    rig.slots.refs[slot] = 0


def free_what_node_names(rig: StateRig, running: Running, stem: TreeNode) -> None:
    slot = stem.state
    rig.slots.drop(slot)
    rig.slots.refs[slot] = 1


def two_nodes_with_one_slot(rig: StateRig, running: Running, stem: TreeNode) -> None:
    running.kv.open_node().state = stem.state


def state_of_root(rig: StateRig, running: Running, stem: TreeNode) -> None:
    rig.cache.tree.root.state = stem.state


def state_without_kv(rig: StateRig, running: Running, stem: TreeNode) -> None:
    stem.on_device = False


def unlisted_node(rig: StateRig, running: Running, stem: TreeNode) -> None:
    del rig.nodes.on_device.nodes[stem.state]


def unlisted_slot(rig: StateRig, running: Running, stem: TreeNode) -> None:
    rig.nodes.on_device._named[stem.state] = False


def listed_under_other_node(rig: StateRig, running: Running, stem: TreeNode) -> None:
    rig.nodes.on_device.nodes[stem.state] = running.kv.open_node()


def forgotten_node(rig: StateRig, running: Running, stem: TreeNode) -> None:
    stem.state = 0


def never_evicted(rig: StateRig, running: Running, stem: TreeNode) -> None:
    rig.nodes.on_device._standings[stem.state].rank += 1


def too_many_states_below(rig: StateRig, running: Running, stem: TreeNode) -> None:
    stem.states_below += 1


def no_states_below_root(rig: StateRig, running: Running, stem: TreeNode) -> None:
    rig.cache.tree.root.states_below = 0


def states_out_of_order(rig: StateRig, running: Running, stem: TreeNode) -> None:
    running.kv.states.held.reverse()


def state_of_fewer_tokens(rig: StateRig, running: Running, stem: TreeNode) -> None:
    held = running.kv.states.held
    held[-1] = HeldState(held[-1].slot, 14)


def state_of_no_sequence(rig: StateRig, running: Running, stem: TreeNode) -> None:
    running.kv.states.held.clear()


def target_that_is_free(rig: StateRig, running: Running, stem: TreeNode) -> None:
    running.kv.states.targets = [int(rig.slots.free_slots()[0])]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_name_of_node, r"1 holders name state \d+, 0 are counted"),
        (name_twice, r"1 holders name state \d+, 2 are counted"),
        (drop_what_sequence_names, r"1 holders name state \d+, 0 are counted"),
        (leak, r"0 holders name state \d+, 1 are counted"),
        (lose_free_slot, r"state \d+ is free 0 times, and 0 holders name it"),
        (free_what_node_names, r"state \d+ is free 1 times, and 1 holders name it"),
        (two_nodes_with_one_slot, r"carries the state \d+, which it cannot"),
        (state_of_root, r"^node #0 .*carries the state \d+, which it cannot"),
        (state_without_kv, r"carries the state \d+, which it cannot"),
        (unlisted_node, r"carries the state \d+, which it cannot"),
        (unlisted_slot, r"carries the state \d+, which it cannot"),
        (listed_under_other_node, r"carries the state \d+, which it cannot"),
        (forgotten_node, "nodes with a state are listed"),
        (never_evicted, "would never be evicted"),
        (too_many_states_below, "has states below 2 children, not 3"),
        (no_states_below_root, "^node #0 .*has states below 1 children, not 0"),
        (states_out_of_order, r"has states of \[15, 12\] tokens"),
        (state_of_fewer_tokens, r"has states of \[12, 14\] tokens"),
        (state_of_no_sequence, r"has states of \[\] tokens"),
        (target_that_is_free, r"1 holders name state \d+, 0 are counted"),
    ],
)
def test_state_damage_is_detected(damage: Callable[[StateRig, Running, TreeNode], None], message: str) -> None:
    rig, running, stem = stateful()
    damage(rig, running, stem)
    with pytest.raises(InvariantError, match=message):
        check_states(rig.cache, [running.kv])


def test_states_of_other_holders_are_counted() -> None:
    rig, running, stem = stateful()
    rig.slots.share(stem.state)
    check_states(rig.cache, [running.kv], [stem.state])
    with pytest.raises(InvariantError, match="2 are counted"):
        check_states(rig.cache, [running.kv])


def test_slot_in_quarantine_is_counted() -> None:
    rig, running, _ = stateful()
    assert rig.extend(running, 16)
    fence = rig.allocator.fences.open_fence()
    rig.release(running, fence)
    assert rig.slots.quarantined == 2
    check_states(rig.cache, [])
