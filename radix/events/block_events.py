"""Events of KV blocks, as plain data; runtime/kv_events encodes them for the wire.

A block is a fixed number of consecutive tokens of a sequence, counted from its start. Its hash stands for all tokens
up to its end and for their namespace, as block_keys.py has it for blocks on disk; only shorter, as followers keep
hashes in 64 bits.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from ..node import ID_BYTES

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
