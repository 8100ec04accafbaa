"""Token buffers share memory, and none of them ever changes what another one holds."""

from __future__ import annotations

import random
from unittest.mock import Mock

import numpy as np
import pytest

from baton.scheduler import token_buffer
from baton.scheduler.token_buffer import TokenBuffer, pack_ids, unpack_ids


def buffer(*ids: int) -> TokenBuffer:
    made = TokenBuffer(np.array(ids[:1], dtype=np.int32))
    made.extend(np.array(ids[1:], dtype=np.int32))
    return made


def test_extending_cut_buffer_leaves_shared_ids_intact() -> None:
    first = buffer(1, 2, 3)
    second = first.share()
    second.extend(np.array([4, 5], dtype=np.int32))
    shorter = first.cut(2)
    shorter.extend(np.array([9, 9], dtype=np.int32))
    assert second.view().tolist() == [1, 2, 3, 4, 5] and shorter.view().tolist() == [1, 2, 9, 9]


def test_unshared_memory_after_cut_is_reused() -> None:
    first = buffer(1, 2, 3)
    shorter = first.cut(2)
    shorter.extend(np.array([9], dtype=np.int32))
    assert shorter.memory is first.memory and shorter.view().tolist() == [1, 2, 9]


def test_failed_copy_loses_no_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a prompt would go on without its end, and say what nobody has asked for."""
    ids = buffer(1, 2, 3)
    with monkeypatch.context() as patched:
        patched.setattr(token_buffer, "TokenMemory", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            ids.view()
    assert len(ids) == 3 and ids.view().tolist() == [1, 2, 3]


@pytest.mark.parametrize("seed", range(3))
def test_random_buffer_operations_match_lists(seed: int) -> None:
    rng = random.Random(seed)
    kept = [(buffer(1), [1])]
    for number in range(400):
        ids, expected = rng.choice(kept)
        action = rng.randrange(4)
        if action == 0:
            kept.append((ids.share(), list(expected)))
        elif action == 1:
            ids.append(number)
            expected.append(number)
        elif action == 2:
            more = list(range(number, number + rng.randrange(5)))
            ids.extend(np.array(more, dtype=np.int32))
            expected += more
        elif len(expected) > 1 and all(other is ids or other.memory is not ids.memory for other, _ in kept):
            length = rng.randrange(1, len(expected))
            kept.remove((ids, expected))
            kept.append((ids.cut(length), expected[:length]))
        for other, wanted in kept:
            assert len(other) == len(wanted) and other.view().tolist() == wanted


def test_ids_are_packed_as_four_bytes_each() -> None:
    assert pack_ids([1, 258]) == pack_ids(np.array([1, 258])) == b"\x01\0\0\0\x02\x01\0\0"
    assert unpack_ids(pack_ids([1, 2**31 - 1])).tolist() == [1, 2**31 - 1]
