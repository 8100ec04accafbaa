from __future__ import annotations

import random

import numpy as np
import pytest

from baton.memory_pool.req_to_token import ReqToTokenPool, RowUpdates


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def apply(updates: RowUpdates, mirror: np.ndarray) -> None:
    """What a device does with an update."""
    assert updates.rows.dtype == updates.starts.dtype == updates.lengths.dtype == updates.values.dtype == np.int32
    assert len(updates.rows) == len(updates.starts) == len(updates.lengths) == len(updates)
    assert len(updates.values) == updates.lengths.sum()
    index = updates.flat_index(mirror.shape[1])
    assert index.dtype == np.int64
    mirror.reshape(-1)[index] = updates.values


def test_rows_are_handed_out_once_and_come_back() -> None:
    pool = ReqToTokenPool(3, 4)
    rows = [pool.alloc() for _ in range(3)]
    assert sorted(rows) == [0, 1, 2]  # type: ignore[type-var]
    assert pool.alloc() is None
    assert pool.num_free == 0
    pool.free(1)
    assert pool.num_free == 1
    assert not pool.is_taken(1)
    assert pool.alloc() == 1


@pytest.mark.parametrize("row", [0, -1, 3])
def test_freeing_a_row_that_is_not_taken_is_an_error(row: int) -> None:
    pool = ReqToTokenPool(3, 4)
    with pytest.raises(ValueError, match=f"row {row} is not taken"):
        pool.free(row)


def test_a_row_freed_twice_is_an_error() -> None:
    pool = ReqToTokenPool(3, 4)
    row = pool.alloc()
    assert row is not None
    pool.free(row)
    with pytest.raises(ValueError, match="freed twice"):
        pool.free(row)
    assert pool.num_free == 3


@pytest.mark.parametrize("start", [-1, 3])
def test_a_write_outside_the_row_is_refused_and_changes_nothing(start: int) -> None:
    pool = ReqToTokenPool(2, 4)
    with pytest.raises(ValueError, match="outside the row of 4 tokens"):
        pool.write(0, start, int32(7, 8))
    assert not pool.rows.any()
    assert len(pool.take_updates()) == 0


@pytest.mark.parametrize(("rows", "context"), [(0, 4), (4, 0)])
def test_empty_pools_are_refused(rows: int, context: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ReqToTokenPool(rows, context)


def test_no_change_gives_an_empty_update() -> None:
    pool = ReqToTokenPool(2, 4)
    pool.write(0, 2, int32())
    updates = pool.take_updates()
    assert len(updates) == 0
    assert len(updates.flat_index(4)) == 0
    apply(updates, np.zeros((2, 4), dtype=np.int32))


def test_an_update_is_taken_once() -> None:
    pool = ReqToTokenPool(2, 4)
    pool.write(1, 0, int32(5))
    assert len(pool.take_updates()) == 1
    assert len(pool.take_updates()) == 0


def test_adjoining_writes_become_one_span() -> None:
    pool = ReqToTokenPool(2, 8)
    pool.write(1, 0, int32(5, 6))
    pool.write(1, 2, int32(7))
    pool.write(0, 3, int32(8))  # adjoins the last position, but in another row
    updates = pool.take_updates()
    assert updates.rows.tolist() == [1, 0]
    assert updates.starts.tolist() == [0, 3]
    assert updates.lengths.tolist() == [3, 1]
    assert updates.values.tolist() == [5, 6, 7, 8]


def test_later_writes_win_in_whatever_order_a_device_applies_them() -> None:
    pool = ReqToTokenPool(2, 8)
    pool.write(1, 0, int32(1, 2, 3, 4))
    pool.write_many(int32(1, 0), int32(2, 0), int32(9, 9))
    pool.write(1, 1, int32(7))
    updates = pool.take_updates()
    index = updates.flat_index(8)
    for order in (slice(None), slice(None, None, -1)):
        mirror = np.zeros((2, 8), dtype=np.int32)
        mirror.reshape(-1)[index[order]] = updates.values[order]
        assert mirror.tolist() == pool.rows.tolist()
    assert pool.rows[1].tolist() == [1, 7, 9, 4, 0, 0, 0, 0]


def test_callers_may_reuse_their_arrays_after_write_many() -> None:
    pool = ReqToTokenPool(2, 4)
    rows, positions = int32(0, 1), int32(2, 3)
    pool.write_many(rows, positions, int32(5, 6))
    rows[:], positions[:] = 0, 0
    assert pool.take_updates().flat_index(4).tolist() == [2, 7]


@pytest.mark.parametrize("seed", range(20))
def test_a_mirror_that_applies_all_updates_equals_the_rows(seed: int) -> None:
    rng = random.Random(seed)
    num_rows, context = rng.randrange(1, 6), rng.randrange(1, 30)
    pool = ReqToTokenPool(num_rows, context)
    mirror = np.zeros((num_rows, context), dtype=np.int32)
    for _ in range(60):
        for _ in range(rng.randrange(4)):
            if rng.random() < 0.5:
                start = rng.randrange(context)
                count = rng.randrange(context - start + 1)
                slots = np.array([rng.randrange(1000) for _ in range(count)], dtype=np.int32)
                pool.write(rng.randrange(num_rows), start, slots)
            else:
                chosen = rng.sample(range(num_rows), rng.randrange(1, num_rows + 1))
                positions = [rng.randrange(context) for _ in chosen]
                pool.write_many(int32(*chosen), int32(*positions), int32(*(rng.randrange(1000) for _ in chosen)))
        if rng.random() < 0.5:
            apply(pool.take_updates(), mirror)
            assert (mirror == pool.rows).all(), f"seed {seed}"
