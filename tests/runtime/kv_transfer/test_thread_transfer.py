"""The thread's copies: every byte arrives, loads go first and layer by layer, each copy ends once, come what may."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch

from baton.memory_pool.kv_pool import MHAKVPool
from baton.radix.tiers.host_tier import TierCopy
from baton.runtime.kv_transfer.thread_transfer import ThreadTransfers
from baton.runtime.kv_transfer.transfer import Ended, TransferError
from tests.doubles.held_pool import HeldPool, tier_copy
from tests.doubles.host_pools import device_bytes, device_pool, host_bytes, slots_of

LAYERS = 3
load, store = partial(tier_copy, to_host=False), partial(tier_copy, to_host=True)


class Wakes:
    """A wake that counts, and waits for what it counted."""

    def __init__(self) -> None:
        self._woken = threading.Semaphore(0)
        self.threads: set[str] = set()

    def __call__(self) -> None:
        self.threads.add(threading.current_thread().name)
        self._woken.release()

    def wait(self) -> None:
        assert self._woken.acquire(timeout=60)


@pytest.fixture
def wakes() -> Wakes:
    return Wakes()


@pytest.fixture
def device() -> MHAKVPool:
    return device_pool(64, layers=LAYERS)


@pytest.fixture
def pool(device: MHAKVPool) -> HeldPool:
    return HeldPool(device, 64)


@pytest.fixture
def transfers(pool: HeldPool, wakes: Wakes) -> Iterator[ThreadTransfers]:
    """Stores go by 4 tokens."""
    transfers = ThreadTransfers(pool, wakes, piece_bytes=4 * pool.page_nbytes + 1)
    yield transfers
    pool.let_go()
    assert transfers.close(60)


def collect(transfers: ThreadTransfers, count: int) -> list[Ended]:
    """The next ``count`` copies that end."""
    found: list[Ended] = []
    give_up = time.monotonic() + 60
    while len(found) < count and time.monotonic() < give_up:
        found += transfers.poll()
        time.sleep(0.0005)
    assert len(found) == count
    return found


def outcomes(ended: list[Ended]) -> list[tuple[int, bool]]:
    return [(copy.fence, copy.ok) for copy in ended]


def steps(pool: HeldPool) -> list[tuple[str, int, int]]:
    """Kind, first host slot and layer of each call."""
    return [(call.kind, call.first, call.layer) for call in pool.calls]


def aside(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Make a call that may wait. What it returned or raised is in the list afterwards."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_copies_move_the_right_bytes(page_size: int, dtype: torch.dtype, wakes: Wakes) -> None:
    """Copies under way share no page with each other, and a step looks at each layer as soon as it may."""
    rng = np.random.default_rng(page_size)
    pages, kept_pages = 40, 30
    device = device_pool(pages * page_size, page_size, layers=LAYERS, dtype=dtype)
    pool = HeldPool(device, kept_pages * page_size)
    transfers = ThreadTransfers(pool, wakes, piece_bytes=3 * pool.page_nbytes)
    on_device, on_host = device_bytes(device), host_bytes(pool)
    busy: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    fence = most = 0
    for _ in range(150):
        used, used_kept = (
            np.concatenate([[0], *(pair[side] for pair in busy.values())]).astype(int) for side in (0, 1)
        )
        free, free_kept = np.setdiff1d(np.arange(pages + 1), used), np.setdiff1d(np.arange(kept_pages + 1), used_kept)
        copies: list[TierCopy] = []
        for _ in range(int(rng.integers(0, 4))):
            count = min(int(rng.integers(1, 8)), len(free), len(free_kept))
            if not count:
                break
            theirs, kept = rng.permutation(free)[:count], rng.permutation(free_kept)[:count]
            free, free_kept = np.setdiff1d(free, theirs), np.setdiff1d(free_kept, kept)
            fence, to_host = fence + 1, bool(rng.integers(2))
            copies.append(TierCopy(fence, to_host, slots_of(theirs, page_size), slots_of(kept, page_size)))
            busy[fence] = theirs, kept
            if to_host:
                on_host[kept] = on_device[theirs]
            else:
                on_device[theirs] = on_host[kept]
        transfers.order_copies(copies)
        most = max(most, transfers.under_way)
        if rng.random() < 0.3:
            for layer in range(LAYERS):
                transfers.wait_layer(layer)
                found = device_bytes(device)[:, : layer + 1]
                assert (found == on_device[:, : layer + 1]).all()
        for copy in transfers.poll():
            assert copy.ok and copy.seconds > 0
            del busy[copy.fence]
        assert transfers.under_way == len(busy)
    assert {copy.fence for copy in collect(transfers, len(busy))} == set(busy) and most > 5
    assert transfers.close(60) and transfers.under_way == 0 and not transfers.loading
    assert (device_bytes(device) == on_device).all() and (host_bytes(pool) == on_host).all()


class TestOrder:
    def test_load_groups_run_in_turn_layer_by_layer(self, transfers, pool: HeldPool) -> None:
        pool.hold()
        transfers.order_copies([load(1, device=1, host=1, tokens=2), load(2, device=11, host=11, tokens=3)])
        transfers.order_copies([load(3, device=21, host=21, tokens=1)])
        pool.let_go()
        assert outcomes(collect(transfers, 3)) == [(1, True), (2, True), (3, True)]
        first = [("load", slot, layer) for layer in range(LAYERS) for slot in (1, 11)]
        assert steps(pool) == first + [("load", 21, layer) for layer in range(LAYERS)]

    def test_load_waits_for_at_most_one_store_piece(self, transfers, pool: HeldPool, device: MHAKVPool) -> None:
        pool.hold()
        transfers.order_copies([store(1, device=1, host=1, tokens=10), store(2, device=31, host=31, tokens=1)])
        pool.wait_begun()
        transfers.order_copies([store(3, device=41, host=41, tokens=1), load(4, device=21, host=21, tokens=6)])
        pool.permit(1 + LAYERS)
        pool.wait_begun(1 + LAYERS)
        assert outcomes(collect(transfers, 1)) == [(4, True)], "a part of a store is no store"
        pool.let_go()
        assert outcomes(collect(transfers, 3)) == [(1, True), (2, True), (3, True)]
        sizes = [(call.kind, call.first, call.size) for call in pool.calls]
        loads = [("load", 21, 6)] * LAYERS
        rest = [("store", 5, 4), ("store", 9, 2), ("store", 31, 1), ("store", 41, 1)]
        assert sizes == [("store", 1, 4), *loads, *rest]
        assert (host_bytes(pool)[1:11] == device_bytes(device)[1:11]).all()

    def test_store_piece_is_at_least_one_page(self, wakes: Wakes) -> None:
        pool = HeldPool(device_pool(64, 16, layers=LAYERS), 64)
        transfers = ThreadTransfers(pool, wakes, piece_bytes=1)
        transfers.order_copies([store(1, device=16, host=32, tokens=32)])
        assert outcomes(collect(transfers, 1)) == [(1, True)]
        assert [(call.first, call.size) for call in pool.calls] == [(32, 16), (48, 16)]
        assert transfers.close(60)


class TestWaiting:
    def test_wait_layer_waits_for_one_layer_only(self, transfers, pool: HeldPool, device: MHAKVPool) -> None:
        pool.pages_view[1:5] = 7
        pool.hold()
        transfers.order_copies([load(1, device=1, host=1, tokens=4)])
        pool.permit()
        pool.wait_begun(2)  # layer 1 is being copied
        transfers.wait_layer(0)
        assert (device_bytes(device)[1:5, 0] == 7).all() and not (device_bytes(device)[1:5, 1] == 7).all()
        thread, found = aside(lambda: transfers.wait_layer(1))
        thread.join(0.05)
        assert thread.is_alive() and transfers.loading and transfers.poll() == []
        pool.permit()
        thread.join(60)
        assert found == [None] and (device_bytes(device)[1:5, 1] == 7).all() and transfers.loading
        pool.permit()
        transfers.wait_layer(2)
        assert not transfers.loading and transfers.under_way == 1  # it came, and was not polled

    def test_wait_layer_covers_all_load_groups(self, transfers, pool: HeldPool) -> None:
        pool.hold()
        transfers.order_copies([load(1, device=1, host=1, tokens=1)])
        transfers.order_copies([load(2, device=2, host=2, tokens=1)])
        pool.permit(LAYERS)
        assert outcomes(collect(transfers, 1)) == [(1, True)]
        thread, found = aside(lambda: transfers.wait_layer(0))
        thread.join(0.05)
        assert thread.is_alive()
        pool.permit()
        thread.join(60)
        assert found == [None]

    def test_no_step_waits_for_stores(self, transfers, pool: HeldPool) -> None:
        pool.hold()
        transfers.order_copies([store(1, device=1, host=1, tokens=1)])
        transfers.wait_layer(LAYERS - 1)
        assert not transfers.loading and transfers.under_way == 1


class TestFailure:
    @pytest.mark.parametrize("layer", [0, 1, LAYERS - 1])
    def test_failed_load_fails_alone(self, transfers, pool: HeldPool, device, caplog, layer: int) -> None:
        pool.pages_view[21:25] = 9
        pool.errors["load", 11, layer] = RuntimeError("a broken line")
        copies = [load(1, device=21, host=21, tokens=4), load(2, device=31, host=11, tokens=4)]
        pool.hold()
        transfers.order_copies(copies)
        pool.let_go()
        with pytest.raises(TransferError, match=r"KV of 4 tokens from the host to the device failed.*a broken line"):
            transfers.wait_layer(LAYERS - 1)
        assert transfers.loading, "until it is polled, steps might read what has not come"
        with pytest.raises(TransferError):
            transfers.wait_layer(0)
        assert sorted(outcomes(collect(transfers, 2))) == [(1, True), (2, False)]
        transfers.wait_layer(LAYERS - 1)
        assert not transfers.loading and (device_bytes(device)[21:25] == 9).all()
        assert steps(pool).count(("load", 11, layer)) == 1 and ("load", 11, layer + 1) not in steps(pool)
        errors = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert len(errors) == 1 and errors[0].exc_info is not None
        transfers.order_copies([load(3, device=31, host=21, tokens=4)])
        transfers.wait_layer(LAYERS - 1)
        assert outcomes(collect(transfers, 1)) == [(3, True)] and (device_bytes(device)[31:35] == 9).all()

    def test_failed_load_interrupts_waiting_step(self, transfers, pool: HeldPool) -> None:
        pool.errors["load", 1, 0] = RuntimeError("a broken line")
        pool.hold()
        transfers.order_copies([load(1, device=1, host=1, tokens=1)])
        transfers.order_copies([load(2, device=2, host=2, tokens=1)])
        thread, found = aside(lambda: transfers.wait_layer(0))
        pool.permit()
        thread.join(60)
        assert isinstance(found[0], TransferError)

    def test_failed_store_fails_no_step(self, transfers, pool: HeldPool, caplog) -> None:
        pool.errors["store", 5, 0] = MemoryError("no room")
        transfers.order_copies([store(1, device=1, host=1, tokens=10), store(2, device=21, host=21, tokens=1)])
        transfers.wait_layer(LAYERS - 1)
        assert outcomes(collect(transfers, 2)) == [(1, False), (2, True)]
        assert not transfers.loading and ("store", 9, 0) not in steps(pool)
        assert "no room" in caplog.text

    def test_copy_with_invalid_slots_fails_alone(self, transfers, caplog) -> None:
        transfers.order_copies([load(1, device=0, host=1, tokens=1), load(2, device=1, host=1, tokens=1)])
        assert sorted(outcomes(collect(transfers, 2))) == [(1, False), (2, True)]
        assert "device page 0" in caplog.text

    @pytest.mark.parametrize("kind", ["load", "store"])
    def test_a_dead_thread_leaves_no_request_waiting(self, transfers, pool: HeldPool, wakes, caplog, kind) -> None:
        pool.errors[kind, 1, 0] = SystemExit("out of the blue")
        pool.hold()
        make = load if kind == "load" else store
        transfers.order_copies([make(1, device=1, host=1, tokens=1)])
        pool.wait_begun()
        transfers.order_copies([load(2, device=2, host=2, tokens=1), store(3, device=3, host=3, tokens=1)])
        thread, found = aside(lambda: transfers.wait_layer(0))
        pool.let_go()
        thread.join(60)
        assert isinstance(found[0], TransferError)
        wakes.wait()
        assert sorted(outcomes(collect(transfers, 3))) == [(1, False), (2, False), (3, False)]
        transfers.order_copies([load(4, device=4, host=4, tokens=1), store(5, device=5, host=5, tokens=1)])
        with pytest.raises(TransferError, match="the thread that copies has failed"):
            transfers.wait_layer(0)
        assert sorted(outcomes(transfers.poll())) == [(4, False), (5, False)]
        transfers.wait_layer(0)
        assert transfers.under_way == 0 and not transfers.loading and len(pool.calls) == 1
        errors = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert len(errors) == 1 and "out of the blue" in str(errors[0].exc_info)


class TestWake:
    def test_each_completed_copy_wakes_owner(self, transfers, pool: HeldPool, wakes: Wakes) -> None:
        pool.errors["load", 2, 1] = RuntimeError("a broken line")
        for copy in (load(1, device=1, host=1, tokens=1), load(2, device=2, host=2, tokens=1)):
            transfers.order_copies([copy])
            wakes.wait()
            assert [ended.fence for ended in transfers.poll()] == [copy.fence]
        transfers.order_copies([store(3, device=3, host=3, tokens=9)])
        wakes.wait()
        assert outcomes(transfers.poll()) == [(3, True)] and wakes.threads == {"baton-transfer"}

    def test_failed_load_wakes_owner_before_its_group_ends(self, transfers, pool: HeldPool, wakes: Wakes) -> None:
        pool.errors["load", 2, 0] = RuntimeError("a broken line")
        pool.hold()
        transfers.order_copies([load(1, device=1, host=1, tokens=1), load(2, device=2, host=2, tokens=1)])
        pool.permit(2)
        wakes.wait()
        assert outcomes(transfers.poll()) == [(2, False)]

    def test_failing_wake_stops_no_copy(self, pool: HeldPool, caplog) -> None:
        def fail() -> None:
            raise OSError("the socket is gone")

        transfers = ThreadTransfers(pool, fail)
        transfers.order_copies([store(1, device=1, host=1, tokens=1)])
        assert outcomes(collect(transfers, 1)) == [(1, True)]
        transfers.order_copies([store(2, device=1, host=2, tokens=1)])
        assert outcomes(collect(transfers, 1)) == [(2, True)] and transfers.close(60)
        assert "the socket is gone" in caplog.text


class TestClosing:
    def test_copies_that_have_not_begun_are_cancelled(self, transfers, pool: HeldPool) -> None:
        pool.hold()
        transfers.order_copies([load(1, device=1, host=1, tokens=1)])
        pool.wait_begun()
        transfers.order_copies([load(2, device=2, host=2, tokens=1), store(3, device=3, host=3, tokens=1)])
        assert not transfers.close(0.01)
        assert outcomes(transfers.poll()) == [(2, False), (3, False)] and transfers.under_way == 1
        transfers.order_copies([store(4, device=4, host=4, tokens=1)])
        assert outcomes(transfers.poll()) == [(4, False)] and transfers.loading
        pool.let_go()
        assert transfers.close(60) and outcomes(transfers.poll()) == [(1, False)]
        assert transfers.under_way == 0 and not transfers.loading
        assert steps(pool) == [("load", 1, 0)]  # the rest of it was given up too

    def test_close_fails_store_after_current_piece(self, transfers, pool: HeldPool) -> None:
        pool.hold()
        transfers.order_copies([store(1, device=1, host=1, tokens=9)])
        pool.wait_begun()
        assert not transfers.close(0.01) and transfers.poll() == []
        pool.let_go()
        assert transfers.close(60) and outcomes(transfers.poll()) == [(1, False)] and len(pool.calls) == 1

    def test_copy_completing_during_close_succeeds(self, transfers, pool: HeldPool) -> None:
        pool.hold()
        transfers.order_copies([store(1, device=1, host=1, tokens=4)])
        pool.wait_begun()
        assert not transfers.close(0.01)
        pool.let_go()
        assert transfers.close(60) and outcomes(transfers.poll()) == [(1, True)]


def test_copy_seconds_exclude_queueing(transfers, pool: HeldPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that ticks once per look: each part of a copy takes one tick, whatever came in between."""
    ticks = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    pool.hold()
    transfers.order_copies([store(1, device=1, host=1, tokens=10), store(2, device=31, host=31, tokens=1)])
    pool.wait_begun()
    transfers.order_copies([load(3, device=21, host=21, tokens=1), load(4, device=22, host=22, tokens=1)])
    pool.let_go()
    assert {copy.fence: copy.seconds for copy in collect(transfers, 4)} == {1: 3.0, 2: 1.0, 3: LAYERS, 4: LAYERS}
