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
    copies = updates.copies
    before = mirror.copy()  # a device may read all sources first
    assert copies.sources.dtype == copies.targets.dtype == copies.lengths.dtype == np.int32
    for source, target, length in zip(copies.sources.tolist(), copies.targets.tolist(), copies.lengths.tolist()):
        mirror[target, :length] = before[source, :length]


def test_rows_are_allocated_once_and_reused() -> None:
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
def test_freeing_untaken_row_is_refused(row: int) -> None:
    pool = ReqToTokenPool(3, 4)
    with pytest.raises(ValueError, match=f"row {row} is not taken"):
        pool.free(row)


def test_double_free_of_row_is_refused() -> None:
    pool = ReqToTokenPool(3, 4)
    row = pool.alloc()
    assert row is not None
    pool.free(row)
    with pytest.raises(ValueError, match="freed twice"):
        pool.free(row)
    assert pool.num_free == 3


@pytest.mark.parametrize("start", [-1, 3])
def test_write_outside_row_is_refused_and_changes_nothing(start: int) -> None:
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


def test_row_updates_are_taken_once() -> None:
    pool = ReqToTokenPool(2, 4)
    pool.write(1, 0, int32(5))
    assert len(pool.take_updates()) == 1
    assert len(pool.take_updates()) == 0


def test_adjacent_writes_become_one_span() -> None:
    pool = ReqToTokenPool(2, 8)
    pool.write(1, 0, int32(5, 6))
    pool.write(1, 2, int32(7))
    pool.write(0, 3, int32(8))  # adjoins the last position, but in another row
    updates = pool.take_updates()
    assert updates.rows.tolist() == [1, 0]
    assert updates.starts.tolist() == [0, 3]
    assert updates.lengths.tolist() == [3, 1]
    assert updates.values.tolist() == [5, 6, 7, 8]


def test_later_writes_win_in_any_application_order() -> None:
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
def test_mirror_with_all_updates_equals_rows(seed: int) -> None:
    rng = random.Random(seed)
    num_rows, context = rng.randrange(1, 6), rng.randrange(1, 30)
    pool = ReqToTokenPool(num_rows, context)
    mirror = np.zeros((num_rows, context), dtype=np.int32)
    for _ in range(60):
        for _ in range(rng.randrange(4)):
            kind = rng.choice(["span", "block", "points", "copy"])
            if kind == "copy" and num_rows > 1:
                shuffled = rng.sample(range(num_rows), num_rows)
                half = num_rows // 2
                pool.copy_rows(int32(*shuffled[:half]), int32(*shuffled[-half:]), rng.randrange(context + 1))
            elif kind == "block":
                start = rng.randrange(context)
                chosen = rng.sample(range(num_rows), rng.randrange(num_rows + 1))
                shape = (len(chosen), rng.randrange(context - start + 1))
                pool.write_block(int32(*chosen), start, np.full(shape, rng.randrange(1000), dtype=np.int32))
            elif kind == "span":
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


def test_write_block_writes_one_span_of_several_rows() -> None:
    pool = ReqToTokenPool(3, 6)
    pool.write_block(int32(2, 0), 1, np.array([[1, 2], [3, 4]], dtype=np.int32))
    assert pool.rows.tolist() == [[0, 3, 4, 0, 0, 0], [0] * 6, [0, 1, 2, 0, 0, 0]]
    updates = pool.take_updates()
    assert updates.rows.tolist() == [2, 0] and updates.starts.tolist() == [1, 1] and updates.lengths.tolist() == [2, 2]
    with pytest.raises(ValueError, match="outside rows of 6 tokens"):
        pool.write_block(int32(0), 5, np.zeros((1, 2), dtype=np.int32))


def test_a_copied_row_is_not_uploaded() -> None:
    pool = ReqToTokenPool(4, 6)
    pool.write(0, 0, int32(5, 6, 7, 8))
    pool.take_updates()
    pool.copy_rows(int32(0, 0), int32(2, 3), 4)
    pool.write_block(int32(2, 3), 4, np.array([[1], [2]], dtype=np.int32))
    assert pool.rows[2].tolist() == [5, 6, 7, 8, 1, 0] and pool.rows[3].tolist() == [5, 6, 7, 8, 2, 0]
    updates = pool.take_updates()
    assert updates.values.tolist() == [1, 2]
    assert updates.copies.targets.tolist() == [2, 3] and updates.copies.lengths.tolist() == [4, 4]
    pool.put_back(updates)  # it may not have come to the device
    again = pool.take_updates()
    assert len(again.copies) == 0 and sorted(again.values.tolist()) == sorted([5, 6, 7, 8, 1, 5, 6, 7, 8, 2])


def test_outdated_and_chained_row_copies_are_uploaded() -> None:
    pool = ReqToTokenPool(4, 4)
    pool.write(0, 0, int32(5, 6))
    pool.take_updates()
    pool.copy_rows(int32(0), int32(1), 2)
    pool.copy_rows(int32(1), int32(2), 2)
    pool.copy_rows(int32(0), int32(3), 2)
    pool.write(3, 0, int32(9))
    updates = pool.take_updates()
    assert updates.copies.targets.tolist() == [1]
    mirror = np.zeros((4, 4), dtype=np.int32)
    mirror[0, :2] = 5, 6
    apply(updates, mirror)
    assert (mirror == pool.rows).all()
    pool.copy_rows(int32(1), int32(2), 2)
    pool.copy_rows(int32(1), int32(2), 1)
    assert len(pool.take_updates().copies) == 0
