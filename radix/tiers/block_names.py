"""Names of the blocks on a path of the tree, remembered node by node."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from ...memory_pool.stores.block_keys import block_keys, root_key
from ..cache import RadixCache
from ..node import ID_BYTES, TreeNode

MAX_ROOTS = 4096
"""Namespaces for which root keys are kept."""


class BlockNames:
    """Blocks of ``block_tokens`` tokens, a multiple of the page size. fingerprint: see `block_keys.model_digest`."""

    def __init__(self, cache: RadixCache, fingerprint: bytes, block_tokens: int) -> None:
        if block_tokens < 1 or block_tokens % cache.page_size:
            raise ValueError(f"a block of {block_tokens} tokens is no multiple of the page size {cache.page_size}")
        self.block_tokens = block_tokens
        self._cache = cache
        self._fingerprint = fingerprint
        self._roots: OrderedDict[str, bytes] = OrderedDict()

    def of_path(self, path: list[TreeNode]) -> list[bytes]:
        """The names of the whole blocks on a path that begins with a child of the root."""
        if not path:
            return []
        keys = list[bytes]()
        open_ids = b""
        """Ids of the tokens behind the last whole block, int32 bytes."""
        for node in path:
            if node.block_keys is None:
                previous = keys[-1] if keys else self._root(self._cache.tree.namespace_of(node))
                ids = np.frombuffer(open_ids + node.key, dtype=np.int32)
                node.block_keys = block_keys(previous, ids, self.block_tokens)
            keys += node.block_keys
            rest = (node.prefix_len - len(keys) * self.block_tokens) * ID_BYTES
            open_ids = (open_ids + node.key)[len(open_ids) + len(node.key) - rest :]
        return keys

    def of_ids(self, namespace: str, path: list[TreeNode], ids: np.ndarray) -> list[bytes]:
        """The names of the whole blocks of ``ids``, int32 [n], which begin with what is on the path."""
        keys = self.of_path(path)
        previous = keys[-1] if keys else self._root(namespace)
        return keys + block_keys(previous, ids[len(keys) * self.block_tokens :], self.block_tokens)

    def _root(self, namespace: str) -> bytes:
        key = self._roots.get(namespace)
        if key is None:
            key = self._roots[namespace] = root_key(self._fingerprint, namespace)
            if len(self._roots) > MAX_ROOTS:
                self._roots.popitem(last=False)
        return key
