"""Checks, from scratch, of everything that must hold between any two operations. Tests run them after every step.

    free + quarantined + evictable + protected + request_private + beam_private == total   (tokens, padding excluded)

Everything here reads and nothing repairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..memory_pool.allocator import Allocator
from .cache import RadixCache
from .kv_sequence import KVSequence
from .lazy_heap import SPARE_ENTRIES
from .lease import LeaseState, LeaseTable
from .node import ID_BYTES, TreeNode


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
        """Tokens that nobody has; negative if some are counted twice."""
        held = self.evictable + self.protected + self.request_private + self.beam_private
        return self.total - self.free - held - self.quarantined

    def check(self) -> None:
        if self.leaked:
            kind = "nobody owns" if self.leaked > 0 else "are owned twice:"
            raise InvariantError(f"{kind} {abs(self.leaked)} tokens of the pool: {self}")


def check_tree(
    cache: RadixCache, sequences: Iterable[KVSequence] | None = None, copied: Iterable[TreeNode] = ()
) -> None:
    """Structure, locks, counters, eviction order and slots of the tree.

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
    _check_locks(cache, root, direct_locks)
    for node in nodes:
        _check_node(cache, node)
        _check_locks(cache, node, direct_locks)
    _check_pages(cache, nodes)
    _expect(len(nodes) == cache.total_nodes, cache, f"{len(nodes)} nodes, but total_nodes is {cache.total_nodes}")
    if direct_locks is not None:
        unknown = direct_locks.keys() - {id(root)} - {id(node) for node in nodes}
        _expect(not unknown, cache, f"{len(unknown)} sequences lock a node that is not in the tree")
    locked = sum(len(node.value) for node in nodes if node.lock_ref)
    unlocked = sum(len(node.value) for node in nodes if not node.lock_ref)
    _expect(locked == cache.protected_tokens, cache, f"{locked} protected tokens, counted {cache.protected_tokens}")
    _expect(unlocked == cache.evictable_tokens, cache, f"{unlocked} evictable tokens, counted {cache.evictable_tokens}")
    _check_order(cache, nodes)
    slots = _concatenate(node.value for node in nodes)
    _expect(len(np.unique(slots)) == len(slots), cache, "a slot stands in the tree twice")


def check_leases(leases: LeaseTable, cache: RadixCache) -> None:
    """Check that every live lease is where the table looks for it, so that it expires and can break, that the budget
    counts what they hold, and that the table's heaps stay small. Raises InvariantError."""
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
    held = sum(len(node) for node in cache.tree.nodes() if node.lease_ref) + tails
    if held != budget.tokens:
        raise InvariantError(f"leases hold {held} tokens, {budget.tokens} are counted")
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
) -> Account:
    """Where every token is, given all open ``sequences``; ``Account.check`` compares the sum.

    beam_pages: int32 [n] for each beam search, the pages that its beams hold, each once.

    Raises InvariantError where a page has two owners, or a row names a slot that is neither its own nor its path's.
    """
    sequences = list(sequences)
    page = allocator.page_size
    rows = cache.req_to_token.rows
    private = 0
    owners = [("free", allocator.free_pages()), ("quarantined", allocator.quarantined_pages())]
    owners.append(("tree", _concatenate(node.value[::page] // page for node in cache.tree.nodes())))
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


def _expect(condition: bool, cache: RadixCache, message: str, node: TreeNode | None = None, *numbers: int) -> None:
    """node: whom the message is about, put in front of it. numbers: put into it. (Formatting for every check would take
    most of the time.)"""
    if not condition:
        message = message % numbers if numbers else message
        raise InvariantError(f"{message if node is None else f'{node} {message}'}\n{dump(cache)}")


def _check_node(cache: RadixCache, node: TreeNode) -> None:
    page = cache.page_size
    page_bytes = page * ID_BYTES
    parent = node.parent
    _expect(parent is not None and parent.children.get(node.child_key) is node, cache, "and its parent disagree", node)
    first_page = node.key[:page_bytes]
    if parent is cache.tree.root or cache.tree.is_hidden(node):
        named = isinstance(node.child_key, tuple) and node.child_key[1] == first_page
    else:
        named = node.child_key == first_page
    _expect(named, cache, "is not filed under its first page", node)
    _expect(len(node) > 0 and len(node) % page == 0, cache, "does not hold whole pages of %d tokens", node, page)
    _expect(parent is None or node.prefix_len == parent.prefix_len + len(node), cache, "has a wrong prefix_len", node)
    resident = sum(child.on_device for child in node.children.values())
    stored = sum(child.host is not None for child in node.children.values())
    _expect(node.on_device or node.host is not None, cache, "is on no tier, but in the tree", node)
    _expect(not node.on_device or parent is None or parent.on_device, cache, "is there without its parent", node)
    _expect(node.on_device or not (node.lock_ref or node.storing or node.loading), cache, "is locked or copied", node)
    _expect(node.device_children == resident, cache, "has %d children on the device", node, resident)
    _expect(node.host_children == stored, cache, "has %d children with a copy on the host", node, stored)
    _expect(
        node.host is None or parent is cache.tree.root or (parent is not None and parent.host is not None),
        cache,
        "has a copy without its parent",
        node,
    )
    _expect(len(node.key) % ID_BYTES == 0, cache, "has %d key bytes", node, len(node.key))
    _check_count(cache, node, node.value, len(node) if node.on_device else 0)
    if node.host is not None:
        _check_count(cache, node, node.host, len(node))


def _check_count(cache: RadixCache, node: TreeNode, slots: np.ndarray, want: int) -> None:
    _expect(slots.dtype == np.int32, cache, "has slots that are not int32", node)
    _expect(len(slots) == want, cache, "has %d key bytes for %d slots, not %d", node, len(node.key), len(slots), want)


def _check_pages(cache: RadixCache, nodes: list[TreeNode]) -> None:
    """The slots of all nodes, whole pages each, are pages of the pools; all at once, as most nodes are short."""
    for tier in ([node.value for node in nodes], [node.host for node in nodes if node.host is not None]):
        if not _are_pages(_concatenate(tier), cache.page_size):
            for node in nodes:
                own = _concatenate([node.value, node.host if node.host is not None else node.value])
                _expect(_are_pages(own, cache.page_size), cache, "has slots that are no pages of the pool", node)


def _are_pages(slots: np.ndarray, size: int) -> bool:
    pages = slots.reshape(-1, size)
    whole = (pages[:, 0] % size == 0).all() and (pages == pages[:, :1] + np.arange(size)).all()
    return bool(whole and (pages >= size).all())


def _check_locks(cache: RadixCache, node: TreeNode, direct_locks: Counter[int] | None) -> None:
    locked_children = sum(child.lock_ref > 0 for child in node.children.values())
    _expect(node.lock_ref >= locked_children, cache, "has %d locked children", node, locked_children)
    if direct_locks is not None:
        want = direct_locks[id(node)] + locked_children
        _expect(node.lock_ref == want, cache, "should have lock_ref %d", node, want)


def _check_order(cache: RadixCache, nodes: list[TreeNode]) -> None:
    entries = {id(node): time for time, node in cache.order.entries()}
    _expect(
        len(entries) == sum(1 for _ in cache.order.entries()), cache, "a node has two entries in the eviction order"
    )
    for node in nodes:
        _expect(node.in_order == (id(node) in entries), cache, "in_order is %s, its entry differs", node, node.in_order)
        if node.on_device and not node.device_children and not node.lock_ref:
            _expect(node.in_order, cache, "is an unlocked leaf without an entry in the eviction order", node)
        if node.in_order:
            late = entries[id(node)] > node.last_access
            _expect(not late, cache, "would be evicted late: its entry says %d", node, entries[id(node)])


def _check_row(cache: RadixCache, seq: KVSequence, row: np.ndarray) -> None:
    if not cache.req_to_token.is_taken(seq.row):
        raise InvariantError(f"{seq} holds a row that is free")
    if seq.node is None or not 0 <= seq.tree_len <= seq.length or seq.tree_len % cache.page_size:
        raise InvariantError(f"{seq} is closed or has impossible lengths")
    path = _concatenate(cache.tree.path_values(seq.node, cache.tree.root))
    if not np.array_equal(path, row[: seq.tree_len]):
        raise InvariantError(f"{seq}: row and tree disagree\nrow  {row[: seq.tree_len]}\ntree {path}")
    page = cache.page_size
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
