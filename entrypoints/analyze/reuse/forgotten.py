"""A filter of the prefixes that a tree has forgotten, to tell whether an infinite cache would have them.

A Bloom filter (Bloom, 1970) of the prefixes that end at the chunks of forgotten paths. It never misses a prefix that it
was given; it reports an unknown one as known with a small probability, which `false_share` estimates.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

HASHES = 4
MAX_BYTES = 128 << 20


class Forgotten:
    """unit_bytes: bytes of key per unit. chunk: units to which answers are rounded down."""

    def __init__(self, unit_bytes: int, chunk: int, max_bytes: int = MAX_BYTES) -> None:
        """max_bytes: a power of two."""
        self._chunk_bytes = unit_bytes * chunk
        self._chunk = chunk
        self._bits = bytearray(max_bytes)
        self._mask = 8 * max_bytes - 1
        self._num_set = 0

    def add_path(self, namespace: str, key: bytes, start: int) -> None:
        """Add a path that is forgotten from unit ``start`` on."""
        first = -(-(start + 1) // self._chunk)  # the first chunk that ends in the forgotten part
        for places in self._chunks(namespace, key, first):
            for place in places:
                byte, bit = place >> 3, 1 << (place & 7)
                if not self._bits[byte] & bit:
                    self._bits[byte] |= bit
                    self._num_set += 1

    def count_known(self, namespace: str, key: bytes, start: int, limit: int) -> int:
        """Number of units from ``start``, where the tree's knowledge ends, up to ``limit`` that were known once."""
        end = start
        number = start // self._chunk + 1
        for places in self._chunks(namespace, key[: limit // self._chunk * self._chunk_bytes], number):
            if not all(self._bits[place >> 3] >> (place & 7) & 1 for place in places):
                break
            end = number * self._chunk
            number += 1
        return end - start

    @property
    def false_share(self) -> float:
        """Share of unknown chunks that `count_known` takes for known."""
        return (self._num_set / (self._mask + 1)) ** HASHES

    def _chunks(self, namespace: str, key: bytes, first: int) -> Iterator[list[int]]:
        """The filter's bits for each prefix that ends with a whole chunk, from chunk ``first`` (counted from 1) on."""
        width, mask = self._chunk_bytes, self._mask
        digest = xxhash.xxh3_128(namespace.encode("utf-8", "surrogatepass") + b"\0")
        digest.update(key[: (first - 1) * width])
        for offset in range((first - 1) * width, len(key) - width + 1, width):
            digest.update(key[offset : offset + width])
            value = digest.intdigest()
            low, step = value & (2**64 - 1), value >> 64 | 1
            yield [(low + number * step) & mask for number in range(HASHES)]
