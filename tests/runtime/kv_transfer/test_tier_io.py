"""Orders of the tiers go to the component that executes them, and each comes back once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.memory_pool.kv_pool import KVShape, make_kv_pool
from baton.memory_pool.kv_rows import store_rows
from baton.memory_pool.stores.disk_pool import DiskPool
from baton.memory_pool.stores.host_pool import HostPool
from baton.radix.tiers.block_orders import BlockFind, BlockRead, BlockTouch, BlockWrite
from baton.radix.tiers.host_tier import TierCopy
from baton.runtime.kv_transfer.block_io import BlockIO
from baton.runtime.kv_transfer.tier_io import BlocksEnded, TierIO, is_finite, is_finite_snapshot
from baton.runtime.kv_transfer.transfer import Ended
from tests.doubles.disk_blocks import fill, key_of, open_pool

PAGE, PAGES_PER_BLOCK = 1000, 5


class NoCopies:
    """Notes the copies between device and host; they end when they are polled."""

    def __init__(self) -> None:
        self.copies: list[TierCopy] = []

    def order_copies(self, copies: list[TierCopy]) -> None:
        self.copies += copies

    @property
    def under_way(self) -> int:
        return len(self.copies)

    def poll(self) -> list[Ended]:
        ended, self.copies = self.copies, []
        return [Ended(copy.fence, True, 0.5) for copy in ended]

    def close(self, timeout: float) -> bool:
        return True


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[DiskPool]:
    pool = open_pool(tmp_path)
    yield pool
    pool.close()


@pytest.fixture
def memory() -> np.ndarray:
    return np.arange(41, dtype=np.uint8)[:, None].repeat(PAGE, axis=1)


@pytest.fixture
def tier_io(pool: DiskPool, memory: np.ndarray) -> Iterator[TierIO]:
    transfers: Any = NoCopies()
    io = BlockIO(pool, memory, 2 * pool.block_bytes)
    tiers = TierIO(transfers, 2, {"disk": io})
    yield tiers
    assert tiers.close(60)


def slots(first_page: int, pages: int = PAGES_PER_BLOCK) -> np.ndarray:
    """Slots of these pages of a host with two tokens per page."""
    return np.arange(2 * first_page, 2 * (first_page + pages), dtype=np.int32)


def finish(tiers: TierIO) -> dict[int, Ended | BlocksEnded]:
    """Poll until nothing is under way."""
    found: dict[int, Ended | BlocksEnded] = {}
    give_up = time.monotonic() + 60
    while tiers.under_way and time.monotonic() < give_up:
        for ended in tiers.poll():
            assert ended.fence not in found, "it came back twice"
            found[ended.fence] = ended
        time.sleep(0.001)
    assert tiers.poll() == []
    return found


def blocks(ended: Ended | BlocksEnded) -> int:
    assert isinstance(ended, BlocksEnded)
    return ended.blocks


def test_each_tier_order_completes_once(tier_io: TierIO, pool: DiskPool, memory: np.ndarray) -> None:
    fill(pool, [1, 2])
    copy = TierCopy(7, True, slots(1), slots(1))
    find = BlockFind("disk", 8, (key_of(1), key_of(2), key_of(3)), 60.0)
    read = BlockRead("disk", 9, (key_of(1), key_of(2), key_of(3)), slots(11, 15), 60.0)
    tier_io.submit_orders([copy, find, read, BlockWrite("disk", 10, key_of(4), slots(31))])
    assert tier_io.under_way == 4
    found = finish(tier_io)
    assert found[7] == Ended(7, True, 0.5)
    assert [blocks(found[fence]) for fence in (8, 9, 10)] == [2, 2, 1] and len(found) == 4
    into = np.empty(pool.block_bytes, dtype=np.uint8)
    assert pool.read_block(key_of(4), into, 0.0) and (into == memory[31:36].reshape(-1)).all()
    assert pool.read_block(key_of(2), into, 0.0) and (into == memory[16:21].reshape(-1)).all()


def test_orders_for_stored_or_refused_blocks_end_at_once(tier_io: TierIO, pool: DiskPool) -> None:
    fill(pool, [1])
    tier_io.submit_orders([BlockWrite("disk", 3, key_of(1), slots(1))])
    (ended,) = tier_io.poll()
    assert ended == BlocksEnded(3, 1, 0.0) and tier_io.under_way == 0
    assert tier_io.close(60)
    tier_io.submit_orders(
        [BlockWrite("disk", 4, key_of(2), slots(1)), BlockRead("disk", 5, (key_of(1),), slots(1), 60.0)]
    )
    assert [(ended.fence, blocks(ended)) for ended in tier_io.poll()] == [(4, 0), (5, 0)]


def test_blocks_in_use_are_touched_after_the_writes_without_a_completion(tier_io: TierIO, pool: DiskPool) -> None:
    fill(pool, [1, 2, 3])
    used = BlockTouch("disk", (key_of(1), key_of(2), key_of(4)))
    tier_io.submit_orders([BlockWrite("disk", 9, key_of(4), slots(1)), used])
    assert tier_io.under_way == 1 and [*finish(tier_io)] == [9] and tier_io.under_way == 0
    assert tier_io.close(60) and pool.by_age() == [key_of(number) for number in (3, 4, 2, 1)]
    tier_io.submit_orders([used])
    assert tier_io.under_way == 0 and tier_io.poll() == []


def test_read_timeout_starts_at_submission(pool: DiskPool, memory: np.ndarray) -> None:
    fill(pool, [1])
    transfers: Any = NoCopies()
    now = 1000.0
    io = BlockIO(pool, memory, pool.block_bytes, clock=lambda: now)
    tiers = TierIO(transfers, 2, {"disk": io}, clock=lambda: now)
    tiers.submit_orders(
        [BlockRead("disk", 1, (key_of(1),), slots(1), 0.0), BlockRead("disk", 2, (key_of(1),), slots(1), 0.1)]
    )
    assert {fence: blocks(ended) for fence, ended in finish(tiers).items()} == {1: 0, 2: 1}
    assert tiers.close(60)


def test_nonfinite_blocks_are_not_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pool = open_pool(tmp_path, block_bytes=4096)
    numbers = torch.randn(4, 1024)
    numbers[2, 777] = torch.nan
    io = BlockIO(pool, numbers.view(torch.uint8).numpy(), 10 * 4096, is_sound=partial(is_finite, dtype="float32"))
    transfers: Any = NoCopies()
    tiers = TierIO(transfers, 1, {"disk": io})
    tiers.submit_orders(
        [BlockWrite("disk", page, key_of(page), np.array([page], dtype=np.int32)) for page in (1, 2, 3)]
    )
    assert {fence: blocks(ended) for fence, ended in finish(tiers).items()} == {1: 1, 2: 0, 3: 1}
    assert not pool.contains(key_of(2)) and io.stats.unsound_stores == 1 and "are not finite" in caplog.text
    assert tiers.close(60)
    pool.close()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_blocks_with_nan_or_infinity_are_not_finite(dtype: str) -> None:
    kind = getattr(torch, dtype)
    numbers = torch.tensor([0.0, -1.5, torch.finfo(kind).max, torch.finfo(kind).tiny], dtype=kind)
    assert is_finite(numbers.view(torch.uint8).numpy(), dtype)
    for bad in (torch.nan, torch.inf, -torch.inf):
        spoilt = torch.cat([numbers, torch.tensor([bad], dtype=kind), numbers])
        assert not is_finite(spoilt.view(torch.uint8).numpy(), dtype)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantized_blocks_are_finite_if_their_scales_are(dtype: torch.dtype) -> None:
    """Wherever the bad row is, and whatever the bytes of the others would be as numbers."""
    shapes = [KVShape(2, 12, 6), KVShape(1, 8, 20)]
    pool = make_kv_pool(num_tokens=32, page_size=4, shapes=shapes, dtype=dtype, device=torch.device("cpu"))
    host, slots = HostPool(pool, 32), np.arange(4, 36)
    generator = torch.Generator().manual_seed(0)
    tensors = [
        (tensor[layer], size)
        for layer, shape in enumerate(shapes)
        for tensor, size in zip((pool.k, pool.v), shape.row_sizes)
    ]
    for tensor, size in tensors:
        numbers = torch.randn(36, tensor.shape[1], size, generator=generator)
        store_rows(tensor, torch.arange(36), 1e30 * numbers)
    of_pages: dict[str, Any] = {"scales": host.scales, "page_nbytes": host.page_nbytes}
    is_sound = partial(is_finite, dtype=str(dtype), **of_pages)
    state = np.zeros(64, dtype=np.uint8)
    is_sound_snapshot = partial(
        is_finite_snapshot, tensors=[(slice(64), torch.float32)], tail_dtype=str(dtype), **of_pages
    )
    blocks = host.pages_view[1:].reshape(4, -1)  # of two pages
    host.store(slots, slots)
    assert all(is_sound(block) and is_sound_snapshot(np.concatenate([state, block])) for block in blocks)
    for tensor, size in tensors:
        for token, spoilt in ((12, 1), (21, 2)):
            kept = tensor.view(torch.uint8)[token].clone()
            bad = torch.ones(1, tensor.shape[1], size)
            bad[0, -1, size - 1] = torch.nan
            store_rows(tensor, torch.tensor([token]), bad)
            host.store(slots, slots)
            expected = [number != spoilt for number in range(4)]
            assert [is_sound(block) for block in blocks] == expected
            assert [is_sound_snapshot(np.concatenate([state, block])) for block in blocks] == expected
            tensor.view(torch.uint8)[token] = kept
