"""Checks, from scratch, of everything that must hold between any two operations. Tests run them after every step.

    device   free + quarantined + evictable + protected + request_private + beam_private == total
    host     free + quarantined + tokens of nodes with a copy + being read from a store  == total
    states   free + quarantined + slots that some holder names                           == total, on each tier
    windows  free + beside pages of the device's pool that are not free                  == total

The first two and the last in tokens, padding excluded. Everything here reads and nothing repairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..memory_pool.allocator import Allocator
from ..memory_pool.state_slots import StateSlots
from .cache import RadixCache
from .kv_sequence import KVSequence
from .lazy_heap import SPARE_ENTRIES
from .lease import LeaseState, LeaseTable
from .node import ID_BYTES, TreeNode
from .tiers.block_tier import BlockTier
from .tiers.host_tier import HostOrder, HostTier
from .tree import RadixTree

SLOT = np.dtype(np.int32)


class InvariantError(AssertionError):
    """An invariant is broken: a bug in the code, never in a request. The message holds a dump."""


@dataclass(frozen=True, slots=True)
class Account:
    """Where every token of the pool is, in tokens."""

    free: int
    evictable: int
    protected: int
    request_private: int
    beam_private: int
    quarantined: int
    total: int

    @property
    def leaked(self) -> int:
        """Tokens without an owner; negative if some are counted twice."""
        held = self.evictable + self.protected + self.request_private + self.beam_private
        return self.total - self.free - held - self.quarantined

    def check(self) -> None:
        if self.leaked:
            kind = "have no owner" if self.leaked > 0 else "have two owners"
            raise InvariantError(f"{abs(self.leaked)} tokens of the pool {kind}: {self}")


def check_tree(
    cache: RadixCache, sequences: Iterable[KVSequence] | None = None, copied: Iterable[TreeNode] = ()
) -> list[TreeNode]:
    """Structure, locks, counters, eviction order and slots of the tree. Returns its nodes, as ``RadixTree.nodes`` does.

    With ``sequences`` (all that are open), each direct lock must also be one of theirs, or of ``copied``: the nodes
    that copies between tiers lock. Raises InvariantError.
    """
    root = cache.tree.root
    direct_locks = None
    if sequences is not None:
        direct_locks = Counter(id(seq.node) for seq in sequences) + Counter(map(id, copied))
        direct_locks[id(root)] += 1  # its permanent lock
    nodes = list(cache.tree.nodes())
    _expect(root.parent is None, cache, "the root has a parent")
    _expect(root.key == b"" and len(root.value) == 0 and root.host is None, cache, "the root has tokens")
    locked = unlocked = 0
    for node in nodes:
        _check_node(cache, root, node)
        _check_children(cache, node, direct_locks)
        if node.lock_ref:
            locked += len(node.value)
        else:
            unlocked += len(node.value)
    _check_children(cache, root, direct_locks)
    slots = _concatenate(node.value for node in nodes)
    _check_pages(cache, nodes, slots)
    _expect(len(nodes) == cache.total_nodes, cache, f"{len(nodes)} nodes, but total_nodes is {cache.total_nodes}")
    if direct_locks is not None:
        unknown = direct_locks.keys() - {id(root)} - {id(node) for node in nodes}
        _expect(not unknown, cache, f"{len(unknown)} sequences lock a node that is not in the tree")
    _expect(locked == cache.protected_tokens, cache, f"{locked} protected tokens, counted {cache.protected_tokens}")
    _expect(unlocked == cache.evictable_tokens, cache, f"{unlocked} evictable tokens, counted {cache.evictable_tokens}")
    _check_order(cache, nodes)
    _expect(not _has_duplicates(slots), cache, "a slot stands in the tree twice")
    return nodes


def check_leases(leases: LeaseTable, cache: RadixCache, nodes: Iterable[TreeNode] | None = None) -> None:
    """Check that every live lease is where the table looks for it, so that it expires and can break, that the budget
    counts what they hold, and that the table's heaps stay small. nodes: all of the tree, where they have been listed.
    Raises InvariantError."""
    expiring, valued = leases.deadlines.serials(), leases.values.serials()
    for lease in leases.live():
        if lease.kv is None or lease.kv.node is None:
            raise InvariantError(f"{lease} is live but holds nothing")
        if lease.state is LeaseState.GRANTED and lease.serial not in expiring:
            raise InvariantError(f"{lease} would never expire")
        unvalued = leases.unvalued.get(lease.serial) is lease
        if unvalued != (lease.value is None) or unvalued == (lease.serial in valued):
            raise InvariantError(f"{lease} would never break, or would be valued in vain")
    if len(leases.unvalued) > len(leases):
        raise InvariantError(f"{len(leases.unvalued)} leases are to be valued, but only {len(leases)} are live")
    budget, page = leases.budget, cache.page_size
    tails = sum(-(-kv.length // page) * page - kv.tree_len for lease in leases.live() if (kv := lease.kv) is not None)
    nodes = cache.tree.nodes() if nodes is None else nodes
    held = sum(len(node) for node in nodes if node.lease_ref) + tails
    if held != budget.tokens:
        raise InvariantError(f"leases hold {held} tokens, {budget.tokens} are counted")
    if budget.uncounted_tokens:
        raise InvariantError(f"{budget.uncounted_tokens} leased tokens count for no lease")
    if budget.leases != len(leases):
        raise InvariantError(f"{len(leases)} leases are live, {budget.leases} are counted")
    most = 2 * budget.max_leases + SPARE_ENTRIES
    for heap in (leases.deadlines, leases.values):
        if len(heap) > most:
            raise InvariantError(f"{len(heap)} entries in a heap of at most {budget.max_leases} leases")


def conservation(
    cache: RadixCache,
    allocator: Allocator,
    sequences: Iterable[KVSequence],
    beam_pages: Iterable[np.ndarray] = (),
    nodes: Iterable[TreeNode] | None = None,
) -> Account:
    """Where every token is, given all open ``sequences``; ``Account.check`` compares the sum.

    beam_pages: int32 [n] for each beam search, the pages that its beams hold, each once. nodes: all of the tree, where
    they have been listed.

    Raises InvariantError where a page has two owners, or a row names a slot that is neither its own nor its path's.
    """
    sequences = list(sequences)
    page = allocator.page_size
    rows = cache.req_to_token.rows
    private = 0
    owners = [("free", allocator.free_pages()), ("quarantined", allocator.quarantined_pages())]
    values = [node.value for node in (cache.tree.nodes() if nodes is None else nodes)]
    owners.append(("tree", _concatenate(values)[::page] // page))  # whole pages each
    if len({seq.row for seq in sequences}) != len(sequences):
        raise InvariantError(f"two sequences share a row: {sequences}")
    for seq in sequences:
        _check_row(cache, seq, rows[seq.row, : seq.length])
        pages = rows[seq.row, seq.tree_len : seq.length : page] // page
        private += len(pages) * page
        owners.append((f"row {seq.row}", pages))
    beam_pages = list(beam_pages)
    owners += [(f"beam search {number}", pages) for number, pages in enumerate(beam_pages)]
    _check_owners(owners, allocator.total_tokens // page)
    return Account(
        free=allocator.free_tokens,
        evictable=cache.evictable_tokens,
        protected=cache.protected_tokens,
        request_private=private,
        beam_private=sum(map(len, beam_pages)) * page,
        quarantined=allocator.quarantined_tokens,
        total=allocator.total_tokens,
    )


def check_states(
    cache: RadixCache, sequences: Iterable[KVSequence], others: Iterable[int] = (), nodes: Iterable[TreeNode] = ()
) -> None:
    """Check that every slot of the recurrent states is free, in quarantine, or named as often as is counted: by nodes,
    by ``sequences`` (all that are open), by copies between the tiers and by ``others``, one slot each. nodes: all of
    the tree, where they have been listed. Raises InvariantError."""
    states = cache.states
    if states is None:
        return
    nodes = list(nodes) or list(cache.tree.nodes())
    for node in (*nodes, cache.tree.root):
        below = sum(child.has_states for child in node.children.values())
        if node.states_below != below:
            raise _broken(cache, node, f"has states below {below} children, not {node.states_below}")
        may_carry = node.on_device and node is not cache.tree.root
        if node.state and not (may_carry and states.on_device.lists(node, node.state)):
            raise _broken(cache, node, f"carries the state {node.state}, which it cannot")
        if node.state and cache.tree.reachable(node) is not node:
            raise _broken(cache, node, f"carries the state {node.state}, but is hidden")
    if unranked := states.on_device.unranked():
        raise InvariantError(f"the states {unranked} of nodes would never be evicted")
    sequences, slots = list(sequences), states.slots
    for seq in sequences:
        lengths = [state.length for state in seq.states.held]
        if lengths != sorted(set(lengths)) or (lengths[-1] if lengths else 0) != seq.length:
            raise InvariantError(f"{seq} has states of {lengths} tokens")
    own = [slot for seq in sequences for slot in seq.states.names()]
    copied = cache.residency.named_states()
    names = Counter([*(node.state for node in nodes if node.state), *own, *others, *copied])
    if len(states) != sum(1 for node in nodes if node.state):
        raise InvariantError(f"{len(states)} nodes with a state are listed: {dump(cache)}")
    _check_slots("state", slots, names)


def _check_slots(kind: str, slots: StateSlots, names: Counter[int]) -> None:
    """Check that each slot is free, in quarantine, or named as often as is counted."""
    gone = Counter([*slots.free_slots().tolist(), *slots.quarantined_slots().tolist()])
    for slot in range(1, slots.total + 1):
        if names[slot] != slots.refs[slot]:
            raise InvariantError(f"{names[slot]} holders name {kind} {slot}, {slots.refs[slot]} are counted: {names}")
        if gone[slot] != (0 if names[slot] else 1):
            raise InvariantError(f"{kind} {slot} is free {gone[slot]} times, and {names[slot]} holders name it")


def check_windows(
    cache: RadixCache,
    sequences: Iterable[KVSequence],
    beam_pages: Iterable[np.ndarray] = (),
    nodes: Iterable[TreeNode] = (),
) -> None:
    """Check that each slot of the window pool is free or beside one page that is not, that pages are held as often as
    is counted, and that nodes and sequences have what they say. sequences, beam_pages: as for `conservation`. nodes:
    all of the tree, where they have been listed. Raises InvariantError."""
    if cache.windows is None:
        return
    pages, page, allocator = cache.windows.pages, cache.page_size, cache.allocator
    slots = np.concatenate([pages.of_page[pages.of_page > 0] // page, pages.free_pages()])
    if _has_duplicates(slots) or len(slots) * page != pages.total_tokens:
        raise InvariantError(f"{len(slots)} pages of the window pool are free or in use, of {pages.total_tokens} slots")
    if pages.has(allocator.free_pages()).any():
        raise InvariantError("free pages of the KV pool have slots of the window pool")
    held: list[np.ndarray] = []
    rows = cache.req_to_token.rows
    for seq in sequences:
        own = rows[seq.row, seq.window_start : seq.length : page] // page
        held.append(own)
        if seq.window_start % page or not pages.has(own).all():
            raise InvariantError(f"{seq} lacks a part of its window from {seq.window_start} on")
        if pages.first_needed(seq.length) < seq.window_start:
            raise InvariantError(f"{seq} sees more than it holds from {seq.window_start} on")
    for own in beam_pages:
        held.append(own)
        if not pages.has(own).all():
            raise InvariantError(f"beams lack slots of the window pool: {own}")
    counts = pages.count_holders(held, allocator.quarantined_pages())
    if len(wrong := np.flatnonzero(counts != pages.holders)[:16]):
        raise InvariantError(
            f"pages {wrong} are held {counts[wrong]} times, counted {pages.holders[wrong]}: {dump(cache)}"
        )
    unheld = np.count_nonzero((pages.of_page > 0) & (pages.holders == 0))
    if unheld * page != pages.evictable_tokens:
        raise InvariantError(f"{unheld} pages of the window pool are held by none, counted {pages.evictable_tokens}")
    listed = cache.windows.listed()
    for node in list(nodes) or list(cache.tree.nodes()):
        there = pages.has(node.value[::page] // page)
        count = node.window_len // page
        if there[: len(there) - count].any() or not there[len(there) - count :].all():
            raise _broken(cache, node, f"has slots {there} of the window pool, not its last {node.window_len}")
        if node.window_len and node not in listed:
            raise _broken(cache, node, "has slots of the window pool that would never be evicted")


def dump(cache: RadixCache, max_nodes: int = 200) -> str:
    """The tree as indented text, children below their parents."""
    lines: list[str] = []
    todo: list[tuple[int, str, TreeNode]] = [(0, "", cache.tree.root)]
    while todo and len(lines) < max_nodes:
        depth, namespace, node = todo.pop()
        lines.append("  " * depth + f"{node}" + (f" namespace={namespace!r}" if depth == 1 else ""))
        for child_key, child in node.children.items():
            todo.append((depth + 1, child_key[0] if isinstance(child_key, tuple) else "", child))
    if todo:
        lines.append(f"… {cache.total_nodes + 1} nodes in all")
    return "\n".join(lines)


def _expect(condition: bool, cache: RadixCache, message: str) -> None:
    if not condition:
        raise InvariantError(f"{message}\n{dump(cache)}")


def _broken(cache: RadixCache, node: TreeNode, message: str) -> InvariantError:
    return InvariantError(f"{node} {message}\n{dump(cache)}")


def _check_node(cache: RadixCache, root: TreeNode, node: TreeNode) -> None:
    """Runs for every node after every step of a simulation: a call, or a text, for each check would take most of the
    time."""
    parent, host, on_device, name = node.parent, node.host, node.on_device, node.child_key
    page, key_bytes = cache.page_size, len(node.key)
    count = key_bytes // ID_BYTES
    if parent is None or parent.children.get(name) is not node:
        raise _broken(cache, node, "and its parent disagree")
    # Under its first page, and under a namespace too where a namespace begins or where it is hidden.
    first_page = node.key[: page * ID_BYTES]
    if isinstance(name, tuple):
        is_filed = name[1] == first_page and (parent is root or cache.tree.is_hidden(node))
    else:
        is_filed = name == first_page and parent is not root
    if not is_filed:
        raise _broken(cache, node, "is not filed under its first page")
    if not count or count % page:
        raise _broken(cache, node, f"does not hold whole pages of {page} tokens")
    if node.prefix_len != parent.prefix_len + count:
        raise _broken(cache, node, "has a wrong prefix_len")
    if not on_device:
        if host is None:
            raise _broken(cache, node, "is on no tier, but in the tree")
        if node.lock_ref or node.storing or node.loading:
            raise _broken(cache, node, "is locked or copied")
    elif not parent.on_device:
        raise _broken(cache, node, "is there without its parent")
    if key_bytes % ID_BYTES:
        raise _broken(cache, node, f"has {key_bytes} key bytes")
    if host is not None and parent is not root and parent.host is None:
        raise _broken(cache, node, "has a copy without its parent")
    for slots, want in ((node.value, count if on_device else 0), (host, count)):
        if slots is None:
            continue
        if slots.dtype != SLOT:
            raise _broken(cache, node, "has slots that are not int32")
        if len(slots) != want:
            raise _broken(cache, node, f"has {key_bytes} key bytes for {len(slots)} slots, not {want}")


def _check_children(cache: RadixCache, node: TreeNode, direct_locks: Counter[int] | None) -> None:
    """Check a node's counts of its children: on the device, with a copy on the host, and in ``lock_ref`` the locked."""
    resident = stored = locked = 0
    if node.children:  # most nodes have none
        for child in node.children.values():
            resident += child.on_device
            stored += child.host is not None
            locked += child.lock_ref > 0
    if node.device_children != resident:
        raise _broken(cache, node, f"has {resident} children on the device")
    if node.host_children != stored:
        raise _broken(cache, node, f"has {stored} children with a copy on the host")
    if node.lock_ref < locked:
        raise _broken(cache, node, f"has {locked} locked children")
    if direct_locks is not None and node.lock_ref != direct_locks[id(node)] + locked:
        raise _broken(cache, node, f"should have lock_ref {direct_locks[id(node)] + locked}")


def _check_pages(cache: RadixCache, nodes: list[TreeNode], slots: np.ndarray) -> None:
    """The slots of all nodes, whole pages each, are pages of the pools; all at once, as most nodes are short. slots:
    all on the device."""
    for tier in (slots, _concatenate(node.host for node in nodes if node.host is not None)):
        if not _are_pages(tier, cache.page_size):
            for node in nodes:
                own = _concatenate([node.value, node.host if node.host is not None else node.value])
                if not _are_pages(own, cache.page_size):
                    raise _broken(cache, node, "has slots that are no pages of the pool")


def _are_pages(slots: np.ndarray, size: int) -> bool:
    if size > 1:  # any slot is a page of one
        pages = slots.reshape(-1, size)
        if (pages[:, 0] % size).any() or (pages != pages[:, :1] + np.arange(size, dtype=np.int32)).any():
            return False
    return bool((slots >= size).all())


def _check_order(cache: RadixCache, nodes: list[TreeNode]) -> None:
    entries: dict[int, int] = {}
    listed = 0
    for rank, node in cache.order.entries():
        entries[id(node)] = rank
        listed += 1
    _expect(len(entries) == listed, cache, "a node has two entries in the eviction order")
    for node in nodes:
        rank = entries.get(id(node))
        if (node.entry is not None) != (rank is not None):
            raise _broken(cache, node, f"has the entry {node.entry and node.entry[:2]}, which is in no lane")
        if rank is not None:
            if rank > cache.order.rank(node):
                raise _broken(cache, node, f"would be evicted late: its entry says {rank}")
        elif node.on_device and not node.device_children and not node.lock_ref:
            raise _broken(cache, node, "is an unlocked leaf without an entry in the eviction order")


def _check_row(cache: RadixCache, seq: KVSequence, row: np.ndarray) -> None:
    if not cache.req_to_token.is_taken(seq.row):
        raise InvariantError(f"{seq} holds a row that is free")
    if seq.node is None or not 0 <= seq.tree_len <= seq.length or seq.tree_len % cache.page_size:
        raise InvariantError(f"{seq} is closed or has impossible lengths")
    path = _concatenate(cache.tree.path_values(seq.node, cache.tree.root))
    if len(path) != seq.tree_len or (path != row[: seq.tree_len]).any():
        raise InvariantError(f"{seq}: row and tree disagree\nrow  {row[: seq.tree_len]}\ntree {path}")
    page = cache.page_size
    if page == 1:
        return
    private = row[seq.tree_len :]
    in_pages = np.repeat(private[::page], page)[: len(private)] + np.arange(len(private)) % page
    if not np.array_equal(private, in_pages) or (private[::page] % page).any():
        raise InvariantError(f"{seq}: the private slots are no whole pages in order: {private}")


def _check_owners(owners: list[tuple[str, np.ndarray]], num_pages: int) -> None:
    everything = _concatenate(pages for _, pages in owners)
    if len(everything) == 0:
        return
    if everything.min() < 1 or everything.max() > num_pages:
        raise InvariantError(f"a page outside 1 … {num_pages} is owned: {everything.min()} … {everything.max()}")
    counts = np.bincount(everything)
    if counts.max() > 1:
        page = int(counts.argmax())
        who = [name for name, pages in owners if page in pages]
        raise InvariantError(f"page {page} has {counts[page]} owners: {', '.join(who)}")


def _concatenate(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype=np.int32), *arrays])


def _has_duplicates(numbers: np.ndarray) -> bool:
    ordered = np.sort(numbers)
    return bool((ordered[1:] == ordered[:-1]).any())


def check_host(tier: HostTier, nodes: Iterable[TreeNode]) -> None:
    """nodes: all of the tree. Raises InvariantError."""
    nodes = list(nodes)
    _check_host_states(tier, nodes)
    stored = [(node, node.host) for node in nodes if node.host is not None]
    held = sum(len(node) for node, _ in stored)
    allocator, page = tier.allocator, tier.allocator.page_size
    if held != tier.tokens:
        raise InvariantError(f"{held} tokens have a copy on the host, {tier.tokens} are counted")
    coming = [slots for below in tier.below for slots in below.incoming_slots]
    read = sum(map(len, coming))
    if allocator.free_tokens + allocator.quarantined_tokens + held + read != allocator.total_tokens:
        raise InvariantError(
            f"host: {allocator.free_tokens} free + {allocator.quarantined_tokens} quarantined + {held} held + {read} "
            f"being read are not {allocator.total_tokens}"
        )
    in_use = _concatenate([*(host for _, host in stored), *coming])[::page] // page  # whole pages each
    if _has_duplicates(np.concatenate([allocator.free_pages(), allocator.quarantined_pages(), in_use])):
        raise InvariantError("a page of the host has two owners")
    for node, _ in stored:
        if HostOrder.is_leaf(node) and not tier.order.has(node):
            raise InvariantError(f"{node} could be evicted from the host, but has no entry")
        if node.storing or node.loading:
            for fence in (node.storing, node.loading):
                if fence and fence not in tier.under_way:
                    raise InvariantError(f"{node} waits for copy {fence}, which is not under way")


def _check_host_states(tier: HostTier, nodes: list[TreeNode]) -> None:
    with_state = [node for node in nodes if node.host_state]
    states = tier.states_on_host
    if states is None:
        if with_state:
            raise InvariantError(f"{with_state[0]} has a state on a host that keeps none")
        return
    for node in with_state:
        if node.host is None or not states.lists(node, node.host_state):
            raise InvariantError(f"{node} has the state {node.host_state} on the host, which it cannot")
    for node in nodes:
        if node.state_loading and not (node.state and node.state_loading in tier.under_way):
            raise InvariantError(f"{node} waits for a state by copy {node.state_loading}, which is not under way")
    if len(with_state) != len(states.nodes):
        raise InvariantError(f"{len(states.nodes)} nodes with a state on the host are listed, not {len(with_state)}")
    if unranked := states.unranked():
        raise InvariantError(f"the states {unranked} would never be evicted from the host")
    _check_slots("host state", states.slots, tier.state_names())


def check_blocks(disk: BlockTier, host: HostTier, tree: RadixTree) -> None:
    """Raises InvariantError."""
    for fence in (*disk.writing, *disk.readings, *disk.finds):
        if not host.allocator.fences.is_open(fence):
            raise InvariantError(f"order {fence} is under way, but its fence is closed")
    for node in tree.nodes():
        if node.block_keys is not None:
            first = (node.prefix_len - len(node)) // disk.block_tokens
            if len(node.block_keys) != node.prefix_len // disk.block_tokens - first:
                raise InvariantError(f"{node} has {len(node.block_keys)} block keys")
