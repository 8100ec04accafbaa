"""Turns changes of tree nodes into events of blocks, for routers and other programs that follow a cache from outside.

A block is a fixed number of consecutive tokens of a sequence, counted from its start. Its hash stands for all tokens
up to its end and for their namespace, as block_keys.py has it for blocks on disk; only shorter, as followers keep
hashes in 64 bits. Events are plain data, which runtime/kv_events encodes for the wire.

    node:       |----- a -----|-- b --|------------ c ------------|
    blocks:     |... 0 ...|... 1 ...|... 2 ...|... 3 ...|... 4 ...|
    belong to:       a         b         c         c         c

A block belongs to the node with its last token, so it is on a tier just when that node is: what comes before is there
too, as tiers are prefix-closed. It does not depend on how a path is cut into nodes, so splits need no event.

The hash of a block is kept by the slot of its last token, one array for each tier. A slot stays with its token while
that is on the tier, whatever becomes of nodes. Where no block is announced the arrays hold 0, so nothing is taken back
that was never announced: copies that failed, and what is hidden.

A copy on the host counts when it is made, also if that of what comes before is still under way: that is on the device.

Blocks of a node are announced while the node is of use, see usable_ends.py: where a model has recurrent states, while
one lies at the node's end or further down, on any tier, because a match loads what it needs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .cache import RadixCache
from .node import ID_BYTES, TreeNode
from .usable_ends import UsableEnds

DEVICE, HOST = "GPU", "CPU_PINNED"
"""The tiers, by the names that SGLang and Dynamo give them. GPU is the device of the model, be it a CPU."""

HASH_BYTES = 8
_HASH_MASK = (1 << 63) - 1
"""Followers read hashes as signed or as unsigned integers: these are the same as either."""


@dataclass(slots=True, frozen=True)
class BlocksStored:
    """Consecutive blocks of a sequence are on a tier now that were not."""

    tier: str
    hashes: list[int]
    parent: int | None
    """The hash of the block before the first; None if that is the first of its sequence."""
    ids: bytes
    """The token ids of all blocks, int32."""
    scope: str = ""
    """Where the sequence has a namespace and this is its start: a name for that, which says nothing of it."""


@dataclass(slots=True, frozen=True)
class BlocksRemoved:
    """Blocks have left a tier, each before what comes before it in its sequence."""

    tier: str
    hashes: list[int]


@dataclass(slots=True, frozen=True)
class AllCleared:
    """No tier holds anything any more."""


BlockEvent = BlocksStored | BlocksRemoved | AllCleared


def root_hash(namespace: str) -> int:
    """The initial value for the hash of a sequence's first block."""
    salt = namespace.encode("utf-8", "surrogatepass")
    return _as_int(hashlib.blake2b(salt, digest_size=HASH_BYTES, person=b"baton-kv-events").digest())


def scope_name(namespace: str) -> str:
    """16 hex digits for a namespace, none for the one without a name."""
    return f"{root_hash(namespace):016x}" if namespace else ""


def block_hashes(previous: int, ids: bytes, block_tokens: int) -> list[int]:
    """The hashes of the whole blocks in ``ids``, int32; a partial last block has none. None of them is 0.

    previous: the hash of the block that ends before ids[0], or `root_hash` if a sequence begins there.
    """
    step, blake2b, from_bytes = block_tokens * ID_BYTES, hashlib.blake2b, int.from_bytes
    hashes = list[int]()
    for start in range(0, len(ids) - step + 1, step):
        data = previous.to_bytes(HASH_BYTES, "little") + ids[start : start + step]
        previous = from_bytes(blake2b(data, digest_size=HASH_BYTES).digest(), "little") & _HASH_MASK or 1
        hashes.append(previous)
    return hashes


def _as_int(digest: bytes) -> int:
    return int.from_bytes(digest, "little") & _HASH_MASK or 1


class BlockAnnouncer:
    """Watches a cache from its start. The publisher must take the events often: they are not bounded here.

    block_tokens: a multiple of the page size. host_tokens: of the host tier; 0 if what is there is not announced.
    """

    def __init__(self, cache: RadixCache, block_tokens: int, host_tokens: int = 0) -> None:
        if block_tokens < 1 or block_tokens % cache.page_size:
            raise ValueError(f"a block of {block_tokens} tokens is no multiple of the page size {cache.page_size}")
        self.block_tokens = block_tokens
        self._cache = cache
        self._on_device = np.zeros(cache.allocator.total_tokens + cache.page_size, dtype=np.int64)
        """By slot: the hash of the block that ends there; 0 if none is announced."""
        self._on_host = np.zeros(host_tokens + cache.page_size if host_tokens else 0, dtype=np.int64)
        self._events: list[BlockEvent] = []
        may_be_useless = cache.states is not None or cache.windows is not None
        self._ends = UsableEnds(cache) if may_be_useless else None
        """None where every node is of use."""
        cache.watchers.add_watcher(self)
        cache.watchers.add_tier_watcher(self)

    def take_events(self) -> list[BlockEvent]:
        """The events since the last call, oldest first."""
        if self._ends is not None:
            lost, gained = self._ends.settle()
            self._withdraw(lost)
            for node in gained:
                self._announce_on_device(node)
                self._announce_on_host(node)
        events, self._events = self._events, []
        return events

    # -- as a watcher -------------------------------------------------------------------------------------------------

    def node_stored(self, node: TreeNode) -> None:
        if self._ends is not None:
            self._ends.note(node)
        if self._is_of_use(node):
            self._announce_on_device(node)

    def path_used(self, node: TreeNode, tick: int) -> None:
        pass

    def nodes_removed(self, nodes: Sequence[TreeNode]) -> None:
        self._note_parents(nodes)
        self._withdraw_from_device(nodes)

    def cache_cleared(self) -> None:
        self._on_device.fill(0)
        self._on_host.fill(0)
        if self._ends is not None:
            self._ends.forget_nodes()
        self._events = [AllCleared()]  # what came before is over

    def copy_made(self, node: TreeNode) -> None:
        if self._is_of_use(node):
            self._announce_on_host(node)

    def copy_removed(self, node: TreeNode) -> None:
        self._note_parents([node])
        self._withdraw_from_host(node)

    def nodes_hidden(self, nodes: Sequence[TreeNode]) -> None:
        self._note_parents(nodes)
        self._withdraw(nodes)

    # -- blocks -------------------------------------------------------------------------------------------------------

    def _first_end(self, node: TreeNode) -> int:
        """The offset in the node at which its first block ends; the others end every ``block_tokens`` after it."""
        start = node.prefix_len - len(node)
        return self.block_tokens - 1 - start % self.block_tokens

    def _note_parents(self, nodes: Iterable[TreeNode]) -> None:
        """These may leave the tree, or are hidden."""
        if self._ends is not None:
            for node in nodes:
                if node.parent is not None:
                    self._ends.note(node.parent)

    def _is_of_use(self, node: TreeNode) -> bool:
        return self._ends is None or node.has_ends

    def _announce_on_device(self, node: TreeNode) -> None:
        if node.on_device:
            self._announce(node, DEVICE, self._on_device, node.value)

    def _announce_on_host(self, node: TreeNode) -> None:
        if len(self._on_host) and node.host is not None and not node.storing:
            self._announce(node, HOST, self._on_host, node.host)

    def _withdraw(self, nodes: Sequence[TreeNode]) -> None:
        """Announce that the blocks of these nodes, children before parents, are on no tier."""
        for node in nodes:
            self._withdraw_from_host(node)
        self._withdraw_from_device(nodes)  # after the copies: what comes before one may be on the device alone

    def _withdraw_from_device(self, nodes: Iterable[TreeNode]) -> None:
        self._take_back(DEVICE, self._on_device, [(node, node.value) for node in nodes])

    def _withdraw_from_host(self, node: TreeNode) -> None:
        if len(self._on_host) and node.host is not None:
            self._take_back(HOST, self._on_host, [(node, node.host)])

    def _announce(self, node: TreeNode, tier: str, on_tier: np.ndarray, slots: np.ndarray) -> None:
        size, first_end = self.block_tokens, self._first_end(node)
        if first_end >= len(node):
            return
        above = self._above(node)
        if above is None:
            return
        previous, open_ids, namespace = above
        whole = node.prefix_len % size
        ids = open_ids + (node.key[: len(node.key) - whole * ID_BYTES] if whole else node.key)
        hashes = self._known(node, first_end)
        if hashes is None:
            hashes = block_hashes(root_hash(namespace) if previous is None else previous, ids, size)
        on_tier[slots[first_end::size]] = hashes
        scope = scope_name(namespace) if previous is None else ""
        self._events.append(BlocksStored(tier, hashes, previous, ids, scope))

    def _take_back(self, tier: str, on_tier: np.ndarray, nodes: Sequence[tuple[TreeNode, np.ndarray]]) -> None:
        """Announce that the blocks of these nodes have left the tier. nodes: (node, its slots on the tier)."""
        size, hashes = self.block_tokens, list[int]()
        for node, slots in nodes:
            if (first_end := self._first_end(node)) < len(slots):
                ends = slots[first_end::size]
                hashes += on_tier[ends][::-1].tolist()
                on_tier[ends] = 0
        if hashes and (hashes := [hash for hash in hashes if hash]):
            self._events.append(BlocksRemoved(tier, hashes))

    def _known(self, node: TreeNode, first_end: int) -> list[int] | None:
        """The hashes of a node's blocks, if they are announced on any tier."""
        size = self.block_tokens
        for slots, on_tier in ((node.value, self._on_device), (node.host, self._on_host)):
            if slots is not None and len(slots) and len(on_tier):
                hashes = on_tier[slots[first_end::size]].tolist()
                if hashes[0]:  # then all of them are
                    return hashes
        return None

    def _above(self, node: TreeNode) -> tuple[int | None, bytes, str] | None:
        """The predecessor of a node's first block: (hash of the block before it, None if it is the first; ids of the
        tokens between that block and the node; the namespace, if it is the first). None if the node is hidden."""
        tree = self._cache.tree
        start = node.prefix_len - len(node)
        block = start - start % self.block_tokens  # where its first block begins
        open_ids: list[bytes] = []
        above = node
        while True:
            if tree.is_hidden(above):
                return None
            parent = above.parent
            assert parent is not None
            if parent is tree.root:
                assert isinstance(above.child_key, tuple)
                return None, b"".join(reversed(open_ids)), above.child_key[0]
            above = parent
            begin = above.prefix_len - len(above)
            if above.prefix_len > block:
                open_ids.append(above.key[max(0, block - begin) * ID_BYTES :])
            if block and begin < block:
                previous = self._hash_at(above, block - 1 - begin)
                return (previous, b"".join(reversed(open_ids)), "") if previous else None

    def _hash_at(self, node: TreeNode, place: int) -> int:
        """The hash of the block that ends at this token of the node; 0 if it is not announced on any tier."""
        found = int(self._on_device[node.value[place]]) if node.on_device else 0
        if not found and node.host is not None and len(self._on_host):
            found = int(self._on_host[node.host[place]])
        return found
