"""Names of blocks of KV, drawn from what they hold.

    root = H(model, namespace)      key_0 = H(root, ids of block 0)      key_i = H(key_{i-1}, ids of block i)

    snapshot = H'(key_i, ids behind block i)        of a sequence that ends at the end of block i, or inside the next

A block is the KV of ``block_tokens`` consecutive tokens. KV depends on every token before it, so a key stands for its
whole prefix: two sequences share key i only if they share the model, the namespace and all tokens up to the end of
block i. Nothing needs to be looked up to make one, so servers agree on keys without talking to each other.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

KEY_BYTES = 20
"""160 bits. With 128, computing 2^64 prompts would yield two with the same key, and an attacker could have one answered
with the KV of the other."""


def model_digest(fingerprint: bytes) -> bytes:
    """KEY_BYTES bytes for a fingerprint of any length.

    fingerprint: everything that must be equal for KV to be interchangeable: weights, dtype, page and block size.
    """
    return hashlib.blake2b(fingerprint, digest_size=KEY_BYTES, person=b"baton-kv-model").digest()


def root_key(fingerprint: bytes, namespace: str) -> bytes:
    """The key before the first block.

    Namespaces may be secrets of clients. Only this digest is stored: one salt gives unrelated keys for two models, and
    no namespace is named on disk. A reader of the disk can still confirm a guess of namespace and tokens together, so a
    namespace that must stay secret has to be hard to guess.
    """
    salt = namespace.encode("utf-8", "surrogatepass")
    key = model_digest(fingerprint)
    return hashlib.blake2b(salt, digest_size=KEY_BYTES, key=key, person=b"baton-kv-root").digest()


def block_keys(previous: bytes, ids: np.ndarray, block_tokens: int) -> list[bytes]:
    """The keys of the whole blocks in ``ids``; a partial last block has none.

    previous: `root_key` if ids are the start of a sequence, else the key of the block that ends before ids[0].
    ids: int32 [n] token ids.
    """
    if ids.dtype != np.int32 or ids.ndim != 1:
        raise ValueError(f"token ids must be int32 [n], not {ids.dtype} {list(ids.shape)}")
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, not {block_tokens}")
    data = np.ascontiguousarray(ids, dtype="<i4").data.cast("B")  # the same on every machine
    step = block_tokens * 4
    keys = []
    for start in range(0, len(data) - step + 1, step):
        digest = hashlib.blake2b(previous, digest_size=KEY_BYTES, person=b"baton-kv-block")
        digest.update(data[start : start + step])
        previous = digest.digest()
        keys.append(previous)
    return keys


def tail_keys(previous: bytes, ids: np.ndarray, step: int) -> list[bytes]:
    """The keys of the snapshots 0, ``step``, 2 × ``step``, … tokens behind a block; none is that of a block.

    previous: key of that block, or `root_key`. ids: int32 [n], the tokens behind it.
    """
    if ids.dtype != np.int32 or ids.ndim != 1:
        raise ValueError(f"token ids must be int32 [n], not {ids.dtype} {list(ids.shape)}")
    data = np.ascontiguousarray(ids, dtype="<i4").data.cast("B")
    digest = hashlib.blake2b(previous, digest_size=KEY_BYTES, person=b"baton-kv-tail")
    keys = [digest.digest()]
    for start in range(0, len(data) - 4 * step + 1, 4 * step):
        digest.update(data[start : start + 4 * step])
        keys.append(digest.digest())
    return keys


MAX_PLACES = 1024
"""Most places at which a snapshot is looked for."""


@dataclass(slots=True, frozen=True)
class SnapshotPlaces:
    """Where the snapshots of a sequence may be. Plain data."""

    previous: Sequence[bytes]
    """The key before each block: `root_key`, then those of the whole blocks of ids."""
    ids: np.ndarray
    """int32 [n]"""
    block_tokens: int
    step: int
    """Tokens between two places."""
    above: int
    """Tokens behind which none is of use."""

    def within(self, blocks: int) -> Iterator[tuple[int, bytes]]:
        """(tokens, key) of those behind the first ``blocks`` blocks or fewer, the longest first."""
        size = self.block_tokens
        places = self._within(min(len(self.ids), (blocks + 1) * size - 1))
        return itertools.islice(places, MAX_PLACES)

    def _within(self, end: int) -> Iterator[tuple[int, bytes]]:
        size = self.block_tokens
        for block in range(end // size, self.above // size - 1, -1):
            start = block * size
            tails = tail_keys(self.previous[block], self.ids[start : min(end, start + size - 1)], self.step)
            for number in range(len(tails) - 1, -1, -1):
                if (length := start + number * self.step) > self.above:
                    yield length, tails[number]
