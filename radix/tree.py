"""The radix tree's structure: match, insert, split, remove. It knows nothing of requests, rows or free slots.

Keys are raw int32 memory: ``bytes.startswith(key, offset)`` compares a node with a memcmp and without a copy. A node's
``children`` are found by the bytes of their first page, at the root by (namespace, first page); that is all there is to
namespaces: they share nothing because no path leads from one into another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from .node import ID_BYTES, NO_SLOTS, TreeNode

_HIDDEN = "\0hidden "
"""The keys of hidden branches begin with this; no client's namespace does."""


def common_prefix(data: bytes, offset: int, key: bytes) -> int:
    """Number of leading bytes that data[offset:] and key share, in whole token ids."""
    limit = min(len(key), len(data) - offset)
    view = memoryview(data)[offset : offset + limit]
    done, window = 0, 256
    while done < limit:  # windows double, so that an early difference costs little in a long key
        end = min(done + window, limit)
        if not key.startswith(view[done:end], done):
            count = (end - done) // ID_BYTES
            mine = np.frombuffer(data, dtype=np.int32, count=count, offset=offset + done)
            differs = mine != np.frombuffer(key, dtype=np.int32, count=count, offset=done)
            return done + ID_BYTES * int(differs.argmax())
        done = end
        window *= 2
    return limit


class RadixTree:
    """Maps (namespace, token ids) to slots, in whole pages. Owns the nodes and their links."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.page_bytes = page_size * ID_BYTES
        self.total_nodes = 0
        """Nodes in the tree, without the root."""
        self._next_serial = 0
        self.root = self._new_node(None, None, b"", np.empty(0, dtype=np.int32), 0)
        self.root.lock_ref = 1  # for ever: every walk up ends here, and the root is never evicted

    def _new_node(
        self, parent: TreeNode | None, child_key: object, key: bytes, value: np.ndarray, last_access: int
    ) -> TreeNode:
        self._next_serial += 1
        return TreeNode(self._next_serial - 1, parent, child_key, key, value, last_access)

    def _child_key(self, parent: TreeNode, namespace: str, data: bytes) -> object:
        page = data[: self.page_bytes]
        return (namespace, page) if parent is self.root else page

    # -- match -------------------------------------------------------------------------------------------------------

    def find_match(self, start: TreeNode, namespace: str, data: bytes) -> tuple[TreeNode, int, TreeNode | None, int]:
        """Follow ``data`` down from ``start``; changes nothing.

        Returns (last node matched whole, bytes matched down to there, child matched in part or None, bytes of it that
        match, in whole pages).
        """
        node, offset, width = start, 0, self.page_bytes
        child = node.children.get(self._child_key(node, namespace, data))
        while child is not None:
            key = child.key
            if not data.startswith(key, offset):
                common = common_prefix(data, offset, key)
                return node, offset, child, common - common % width
            offset += len(key)
            node = child
            child = node.children.get(data[offset : offset + width])
        return node, offset, None, 0

    def match(self, start: TreeNode, namespace: str, data: bytes) -> TreeNode:
        """The node at which the longest prefix of ``data`` below ``start`` ends, in whole pages. Splits a longer node
        if need be."""
        node, _, partial, common = self.find_match(start, namespace, data)
        return node if partial is None else self.split(partial, common // ID_BYTES)

    # -- change ------------------------------------------------------------------------------------------------------

    def split(self, node: TreeNode, count: int) -> TreeNode:
        """Cut a node after ``count`` tokens (whole pages, not all of it); returns the new upper part.

        ``node`` stays the lower part, so handles to it stay valid. A locked node counts once in its parent's
        lock_ref, however often it is locked; so the upper part gets 1.
        """
        assert node.parent is not None and 0 < count < len(node)
        cut = count * ID_BYTES
        # Copies, not views: a view of a few slots would keep the array of a long evicted tail alive.
        upper = self._new_node(node.parent, node.child_key, node.key[:cut], node.value[:count].copy(), node.last_access)
        upper.on_device, upper.hits = node.on_device, node.hits
        upper.born, upper.used = node.born, node.used
        upper.turn, upper.priority, upper.note = node.turn, node.priority, node.note
        upper.client, upper.past, upper.retired_end = node.client, node.past, node.retired_end
        upper.storing, upper.loading = node.storing, node.loading
        node.block_keys = None
        upper.lock_ref = 1 if node.lock_ref else 0
        upper.lease_ref = 1 if node.lease_ref else 0
        node.parent.children[node.child_key] = upper
        node.key = node.key[cut:]
        node.value = node.value[count:].copy()
        if node.host is not None:
            upper.host, node.host = node.host[:count].copy(), node.host[count:].copy()
            upper.host_children = 1
        node.parent = upper
        node.child_key = node.key[: self.page_bytes]
        upper.children[node.child_key] = node
        upper.device_children = 1 if node.on_device else 0
        upper.states_below = 1 if node.has_states else 0
        upper.has_ends = node.has_ends
        if node.window_len > len(node):
            upper.window_len, node.window_len = node.window_len - len(node), len(node)
        self.total_nodes += 1
        return upper

    def node_at(self, node: TreeNode, length: int) -> TreeNode:
        """The node that holds the last of the first ``length`` tokens of the path down to ``node``; of none, the root.
        Two paths agree in so many tokens if this is the same node for both."""
        while node.parent is not None and node.parent.prefix_len >= length:
            node = node.parent
        return node

    def cut_path(self, node: TreeNode, length: int) -> TreeNode:
        """The node at which the first ``length`` tokens of the path down to ``node`` end, in whole pages; not more than
        the path has. Splits a longer node if need be."""
        node = self.node_at(node, length)
        if node.prefix_len == length:
            return node
        assert node.parent is not None
        return self.split(node, length - node.parent.prefix_len)

    def add_leaf(self, parent: TreeNode, namespace: str, key: bytes, value: np.ndarray, last_access: int) -> TreeNode:
        """Hang a new node below ``parent``. No child there may begin with key's first page."""
        child_key = self._child_key(parent, namespace, key)
        assert child_key not in parent.children
        leaf = self._new_node(parent, child_key, key, value, last_access)
        parent.branched |= bool(parent.children)
        parent.children[child_key] = leaf
        parent.device_children += 1
        self.total_nodes += 1
        return leaf

    def add_host_leaf(
        self, parent: TreeNode, namespace: str, key: bytes, host: np.ndarray, last_access: int
    ) -> TreeNode:
        """As `add_leaf`, for a node that is on the host only; its parent is there too, or is the root."""
        leaf = self.add_leaf(parent, namespace, key, NO_SLOTS, last_access)
        leaf.on_device, leaf.host = False, host
        parent.device_children -= 1
        parent.host_children += 1
        return leaf

    def namespace_of(self, node: TreeNode) -> str:
        """The namespace of a node that `reachable` returns, the root aside."""
        while node.parent is not self.root:
            assert node.parent is not None
            node = node.parent
        assert isinstance(node.child_key, tuple)
        return node.child_key[0]

    def remove_leaves(self, leaves: Sequence[TreeNode]) -> None:
        """Remove nodes without a copy on the host that have no children, or only such as come earlier in ``leaves``.
        Handles to them are dead from now on."""
        for leaf in leaves:
            parent = leaf.parent
            assert parent is not None and not leaf.children and leaf.host is None
            del parent.children[leaf.child_key]
            leaf.parent = None
            if leaf.on_device:
                leaf.on_device = False
                parent.device_children -= 1
        self.total_nodes -= len(leaves)

    def hide(self, node: TreeNode, kept: int) -> tuple[TreeNode, TreeNode]:
        """Hide all tokens after the first ``kept`` of the path down to ``node``, and all nodes below them, from
        matches: the branch gets a key that no tokens lead to. Its nodes stay in the tree, with their handles and locks.

        kept: whole pages, fewer than the path has. Returns the last node that is not hidden and the first that is.
        """
        parent = self.cut_path(node, kept)
        top = self.node_at(node, kept + 1)
        del parent.children[top.child_key]
        top.child_key = (f"{_HIDDEN}{top.serial}", top.key[: self.page_bytes])
        parent.children[top.child_key] = top
        return parent, top

    # -- read --------------------------------------------------------------------------------------------------------

    def path_values(self, node: TreeNode, top: TreeNode) -> list[np.ndarray]:
        """Slot arrays on the path from below ``top`` down to ``node``, in token order."""
        values: list[np.ndarray] = []
        while node is not top:
            values.append(node.value)
            parent = node.parent
            assert parent is not None
            node = parent
        values.reverse()
        return values

    def last_on_device(self, node: TreeNode) -> TreeNode:
        """The last node of the path down to ``node`` that is on the device."""
        while not node.on_device:
            assert node.parent is not None
            node = node.parent
        return node

    def path(self, node: TreeNode, start: int) -> list[TreeNode]:
        """The nodes from position ``start``, where one begins, of the path down to ``node``, from the top."""
        found: list[TreeNode] = []
        while node.prefix_len > start:
            found.append(node)
            assert node.parent is not None
            node = node.parent
        return found[::-1]

    def without_copy(self, node: TreeNode) -> list[TreeNode]:
        """The node and those above it that have no copy on the host, from the top down."""
        found: list[TreeNode] = []
        above: TreeNode | None = node
        while above is not None and above is not self.root and above.host is None:
            found.append(above)
            above = above.parent
        return found[::-1]

    def reachable(self, node: TreeNode) -> TreeNode:
        """The node if a match may begin there; else the root: it has left the tree, or is hidden."""
        above: TreeNode | None = node
        while above is not None and above is not self.root:
            if self.is_hidden(above):
                return self.root
            above = above.parent
        return node if above is not None else self.root

    def is_hidden(self, node: TreeNode) -> bool:
        """True for the first node of a hidden branch."""
        key = node.child_key
        return isinstance(key, tuple) and str(key[0]).startswith(_HIDDEN)

    def nodes(self, top: TreeNode | None = None) -> Iterator[TreeNode]:
        """Every node without the root, or ``top`` and all below it; parents before children."""
        todo = list(self.root.children.values()) if top is None else [top]
        while todo:
            node = todo.pop()
            if node.children:
                todo.extend(node.children.values())
            yield node
