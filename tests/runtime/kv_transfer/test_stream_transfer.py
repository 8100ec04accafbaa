"""The logic of copies by streams, over streams that run in any order they may. None of this ran on a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from baton.memory_pool.stores.host_copies import copy_pages_torch
from baton.memory_pool.stores.host_pool import HostPool
from baton.radix.tiers.host_tier import TierCopy
from baton.runtime.kv_transfer.stream_transfer import StreamTransfers
from baton.runtime.kv_transfer.thread_transfer import ThreadTransfers
from baton.runtime.kv_transfer.tier_io import make_transfers
from baton.runtime.kv_transfer.transfer import Ended, TransferError
from tests.doubles.fake_streams import FakeCuda
from tests.doubles.held_pool import HeldPool, tier_copy
from tests.doubles.host_pools import CPU, SMALL, device_bytes, device_pool, host_bytes, slots_of

LAYERS = 3
load, store = partial(tier_copy, to_host=False), partial(tier_copy, to_host=True)


class Rig:
    def __init__(self, seed: int = 0, **options: Any) -> None:
        self.cuda = FakeCuda(seed)
        self.device = device_pool(64, layers=LAYERS)
        self.pool = HeldPool(self.device, 64, copy_pages=self.cuda.queued())
        self.transfers = StreamTransfers(self.pool, CPU, cuda=self.cuda, **options)
        _, self.up, self.down = self.cuda.streams


def outcomes(ended: list[Ended]) -> list[tuple[int, bool]]:
    return [(copy.fence, copy.ok) for copy in ended]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("layers_at_once", [1, 2, 5])
def test_concurrent_steps_and_copies_see_the_same_as_serial_ones(seed: int, layers_at_once: int) -> None:
    """Each step reads all pages of the device, layer by layer, and writes new ones, which are stored at once. Pages
    that it has read are loaded over. Nothing waits for the streams but the streams."""
    rng, pages, page_size = np.random.default_rng(seed), 12, 2
    cuda = FakeCuda(seed)
    device = device_pool(pages * page_size, page_size, layers=LAYERS)
    pool = HostPool(device, pages * page_size, copy_pages=cuda.queued())
    transfers = StreamTransfers(pool, CPU, layers_at_once=layers_at_once, cuda=cuda)
    on_device, on_host = device_bytes(device), host_bytes(pool)
    busy: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    checked = 0

    def check(layer: int, expected: np.ndarray) -> None:
        nonlocal checked
        assert (device_bytes(device)[:, layer] == expected).all(), layer
        checked += 1

    def write(layer: int, new: np.ndarray, value: int) -> None:
        for tensor in (device.k[layer], device.v[layer]):
            tensor.view(torch.uint8)[torch.from_numpy(slots_of(new, page_size, np.int64))] = value

    for turn in range(60):
        free, kept = (
            np.setdiff1d(np.arange(1, pages + 1), np.concatenate([[0], *(pair[side] for pair in busy.values())]))
            for side in (0, 1)
        )
        copies: list[TierCopy] = []
        for number in range(int(rng.integers(0, 3))):
            count = min(int(rng.integers(1, 4)), len(free), len(kept))
            if not count:
                break
            theirs, ours = rng.permutation(free)[:count], rng.permutation(kept)[:count]
            free, kept = np.setdiff1d(free, theirs), np.setdiff1d(kept, ours)
            to_host = bool(rng.integers(2))
            if to_host:
                on_host[ours] = on_device[theirs]
            else:
                on_device[theirs] = on_host[ours]
            fence = 10 * turn + number + 1
            busy[fence] = theirs, ours
            copies.append(TierCopy(fence, to_host, slots_of(theirs, page_size), slots_of(ours, page_size)))
        transfers.order_copies(copies)
        new = free[: int(rng.integers(0, 3))]  # a step: pages that are not being stored
        on_device[new] = turn
        loading = transfers.loading
        for layer in range(LAYERS):
            if loading:
                transfers.wait_layer(layer)
            cuda.queue(partial(write, layer, new, turn))
            cuda.queue(partial(check, layer, on_device[:, layer].copy()))
        for _ in range(int(rng.integers(0, 25))):
            if any(stream.pieces for stream in cuda.streams):
                cuda.run(1)
        for ended in transfers.poll():
            assert ended.ok
            del busy[ended.fence]
        assert transfers.under_way == len(busy)
    assert transfers.close(60)
    cuda.run()
    assert sorted(ended.fence for ended in transfers.poll()) == sorted(busy) and checked == 60 * LAYERS
    assert (device_bytes(device) == on_device).all() and (host_bytes(pool) == on_host).all()


def test_wait_layer_waits_for_one_layer_only() -> None:
    rig = Rig()
    rig.cuda.compute.held = True
    rig.transfers.order_copies([store(1, device=1, host=1, tokens=1), load(2, device=11, host=11, tokens=1)])
    order: list[str] = []
    for layer in range(LAYERS):
        rig.transfers.wait_layer(layer)
        rig.cuda.queue(partial(order.append, f"layer {layer} computed"))
    rig.cuda.run()
    assert len(rig.up.pieces) > 0 < len(rig.down.pieces), "they may not overtake what was launched before them"
    rig.cuda.compute.held, rig.down.held, rig.up.held = False, True, True
    rig.cuda.run()
    assert order == []
    rig.up.held = False
    for layer in range(LAYERS):
        while len(order) == layer:
            rig.cuda.run(1)
        left = sum("copy_pages" in piece.run.__qualname__ for piece in rig.up.pieces)
        assert left <= LAYERS - layer - 1
    rig.cuda.run()
    assert len(order) == LAYERS and not rig.transfers.loading, "no step waits for stores"
    assert outcomes(rig.transfers.poll()) == [(2, True)] and rig.transfers.under_way == 1
    rig.down.held = False
    rig.cuda.run()
    assert outcomes(rig.transfers.poll()) == [(1, True)] and rig.transfers.poll() == []


def test_first_layer_does_not_wait_for_last() -> None:
    rig = Rig()
    rig.transfers.order_copies([load(1, device=1, host=1, tokens=1), load(2, device=11, host=11, tokens=1)])
    assert [(call.first, call.layer) for call in rig.pool.calls] == [(s, i) for i in range(LAYERS) for s in (1, 11)]
    seen: list[bool] = []
    rig.transfers.wait_layer(0)
    rig.cuda.queue(lambda: seen.append(rig.transfers.loading))
    rig.up.held = True
    rig.cuda.run()
    assert not seen
    rig.up.held = False
    while not seen:
        rig.cuda.run(1)
    assert len(rig.up.pieces) > 0


def test_wait_layer_covers_all_ordered_loads() -> None:
    rig = Rig()
    rig.transfers.order_copies([load(1, device=1, host=1, tokens=1)])
    rig.transfers.order_copies([load(2, device=2, host=2, tokens=1)])
    while sum("copy_pages" in piece.run.__qualname__ for piece in rig.up.pieces) > 1:
        rig.cuda.run(1)
    assert rig.transfers.loading, "the first has come, the second has not"
    rig.transfers.wait_layer(0)
    read: list[np.ndarray] = []
    rig.cuda.queue(lambda: read.append(device_bytes(rig.device)[1:3, 0]))
    rig.cuda.run()
    assert (read[0] == host_bytes(rig.pool)[1:3, 0]).all()


class TestFailure:
    @pytest.mark.parametrize("layer", range(LAYERS))
    def test_failed_stream_load_fails_alone_after_it_has_run(
        self, caplog: pytest.LogCaptureFixture, layer: int
    ) -> None:
        """Its queued part has run by the time it is reported, as its slots are then reused."""
        rig = Rig()
        rig.pool.errors["load", 11, layer] = RuntimeError("a broken line")
        rig.pool.pages_view[1:5] = 9
        rig.transfers.order_copies([load(1, device=1, host=11, tokens=4), load(2, device=21, host=1, tokens=4)])
        with pytest.raises(TransferError, match=r"KV of 4 tokens from the host to the device failed.*a broken line"):
            rig.transfers.wait_layer(0)
        assert rig.transfers.loading
        before = device_bytes(rig.device)[1:5].copy()
        assert outcomes(rig.transfers.poll()) == [(1, False)]
        rig.cuda.run()
        assert (device_bytes(rig.device)[1:5] == before).all()
        rig.transfers.wait_layer(LAYERS - 1)
        assert not rig.transfers.loading and outcomes(rig.transfers.poll()) == [(2, True)]
        assert (device_bytes(rig.device)[21:25] == 9).all() and rig.transfers.under_way == 0
        assert caplog.text.count("a broken line") >= 1 and len(caplog.records) == 1

    def test_failed_load_counts_as_loading_until_polled(self) -> None:
        rig = Rig()
        rig.pool.errors["load", 1, 0] = RuntimeError("a broken line")
        rig.transfers.order_copies([load(1, device=1, host=1, tokens=1)])
        assert rig.transfers.loading and rig.transfers.poll() and not rig.transfers.loading

    def test_failed_store_fails_no_step(self, caplog: pytest.LogCaptureFixture) -> None:
        rig = Rig()
        rig.pool.errors["store", 1, 0] = MemoryError("no room")
        rig.transfers.order_copies([store(1, device=1, host=1, tokens=1), store(2, device=2, host=2, tokens=1)])
        rig.transfers.wait_layer(LAYERS - 1)
        rig.cuda.run()
        assert outcomes(rig.transfers.poll()) == [(1, False), (2, True)] and not rig.transfers.loading


def test_group_copy_time_is_split_by_tokens() -> None:
    """A copy takes a millisecond per layer here, and so does an event."""
    rig = Rig()
    rig.transfers.order_copies([load(1, device=1, host=1, tokens=3), load(2, device=11, host=11, tokens=1)])
    rig.cuda.run()
    assert {copy.fence: copy.seconds for copy in rig.transfers.poll()} == pytest.approx(
        {1: 0.009 * 3 / 4, 2: 0.009 / 4}
    )


def test_closing_waits_for_queued_copies_and_accepts_no_more() -> None:
    rig = Rig()
    rig.transfers.order_copies([store(1, device=1, host=1, tokens=1), load(2, device=2, host=2, tokens=1)])
    assert rig.transfers.close(0.0)
    rig.transfers.order_copies([store(3, device=3, host=3, tokens=1), load(4, device=4, host=4, tokens=1)])
    assert sorted(outcomes(rig.transfers.poll())) == [(1, True), (2, True), (3, False), (4, False)]
    assert rig.transfers.under_way == 0 and len(rig.pool.calls) == 1 + LAYERS


def test_copies_of_inference_mode_pools() -> None:
    """torch writes to such tensors in no other mode."""
    with torch.inference_mode():
        device = device_pool(8, heads=SMALL, dtype=torch.uint8)
        pool = HostPool(device, 8, copy_pages=copy_pages_torch)
    transfers = StreamTransfers(pool, CPU, cuda=FakeCuda())
    transfers.order_copies([store(1, device=1, host=1, tokens=4), load(2, device=5, host=5, tokens=4)])
    assert transfers.close(60) and sorted(outcomes(transfers.poll())) == [(1, True), (2, True)]


def test_cpu_uses_thread_transfers() -> None:
    transfers = make_transfers(HostPool(device_pool(8), 8), CPU, lambda: None)
    assert isinstance(transfers, ThreadTransfers) and transfers.close(60)


@pytest.mark.parametrize(("copied_by", "pieces"), [("torch", 1), ("a kernel of the device", LAYERS)])
def test_gpu_uses_stream_transfers(monkeypatch: pytest.MonkeyPatch, copied_by: str, pieces: int) -> None:
    """Without a kernel, single layers would be many small transfers."""
    monkeypatch.setattr(torch.cuda, "Stream", FakeCuda().Stream)
    pool = HostPool(device_pool(8, layers=LAYERS), 8)
    pool.copied_by = copied_by
    transfers = make_transfers(pool, torch.device("cuda"), lambda: None)
    assert isinstance(transfers, StreamTransfers) and len(transfers._pieces) == pieces
