"""A key stands for the model, the namespace and every token up to the end of its block."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest

from baton.memory_pool.stores.block_keys import KEY_BYTES, block_keys, model_digest, root_key

ROOT = root_key(b"model", "")
IDS = np.arange(40, dtype=np.int32)


def test_only_whole_blocks_have_keys() -> None:
    lengths = {count: len(block_keys(ROOT, IDS[:count], 16)) for count in (0, 1, 15, 16, 31, 32, 40)}
    assert lengths == {0: 0, 1: 0, 15: 0, 16: 1, 31: 1, 32: 2, 40: 2}


def test_block_keys_are_documented_blake2b_chain() -> None:
    expected, previous = [], ROOT
    for start in (0, 8, 16):
        ids = struct.pack("<8i", *range(start, start + 8))
        previous = hashlib.blake2b(previous + ids, digest_size=KEY_BYTES, person=b"baton-kv-block").digest()
        expected.append(previous)
    assert block_keys(ROOT, IDS[:24], 8) == expected


def test_block_keys_continue_from_known_key() -> None:
    keys = block_keys(ROOT, IDS, 8)
    assert block_keys(keys[1], IDS[16:], 8) == keys[2:]


@pytest.mark.parametrize("changed", range(0, 40, 5))
def test_token_change_alters_its_block_key_and_all_later(changed: int) -> None:
    ids = IDS.copy()
    ids[changed] += 1
    before, after = block_keys(ROOT, IDS, 8), block_keys(ROOT, ids, 8)
    assert [a == b for a, b in zip(before, after)] == [block < changed // 8 for block in range(5)]


def test_keys_differ_by_model_namespace_and_block_size() -> None:
    roots = [root_key(model, space) for model in (b"", b"model", b"other") for space in ("", "a", "b", "a\0", "\ud800")]
    keys = [key for root in roots for key in [root, *block_keys(root, IDS, 8), *block_keys(root, IDS, 16)]]
    assert len(set(keys)) == len(keys) and {len(key) for key in keys} == {KEY_BYTES}


def test_root_keys_are_stable_across_processes() -> None:
    """They name files that outlive it."""
    assert root_key(b"model", "salt").hex() == "54f0680879e2a848f3952dfa7d5ecf1d715886e0"
    assert model_digest(b"model").hex() == "a271eb93d051fc418a2726ae675f6dd728b8500f"


def test_strided_ids_give_same_block_keys() -> None:
    assert block_keys(ROOT, np.repeat(IDS, 2)[::2], 8) == block_keys(ROOT, IDS, 8)


@pytest.mark.parametrize(
    ("ids", "block_tokens", "message"),
    [
        (IDS.astype(np.int64), 8, r"must be int32 \[n\], not int64 \[40\]"),
        (IDS.reshape(5, 8), 8, r"must be int32 \[n\], not int32 \[5, 8\]"),
        (IDS, 0, "block_tokens must be at least 1, not 0"),
    ],
)
def test_invalid_block_key_arguments_are_refused(ids: np.ndarray, block_tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        block_keys(ROOT, ids, block_tokens)
