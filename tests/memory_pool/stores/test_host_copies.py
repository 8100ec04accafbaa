"""Copies between the device's pool and the host's: every byte is where it belongs, and no other has changed."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.memory_pool.allocator import Allocator
from baton.memory_pool.kv_pool import KVLayers, KVShape, MHAKVPool, make_kv_pool
from baton.memory_pool.stores import host_copies
from baton.memory_pool.stores.host_copies import CopyPages, PagedLayers, copies_for
from baton.memory_pool.stores.host_pool import HostPool
from tests.doubles.host_pools import (
    CPU,
    LINES,
    SMALL,
    device_bytes,
    device_pool,
    host_bytes,
    host_pool,
    slots_of,
    some_pages,
)

WAYS = ["numba", "numpy", "torch"]


def way(name: str) -> CopyPages:
    if name == "numba":
        pytest.importorskip("numba")
        return copies_for(CPU)[1]
    return {"numpy": host_copies.copy_pages_numpy, "torch": host_copies.copy_pages_torch}[name]


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("heads", [SMALL, LINES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn])
def test_store_and_load_move_pages_bit_for_bit(name: str, page_size: int, heads: tuple[int, int], dtype: torch.dtype):
    pool = device_pool(24 * page_size, page_size, heads=heads, dtype=dtype)
    host = host_pool(pool, 16 * page_size, copy_pages=way(name))
    rng = np.random.default_rng(page_size)
    source, kept, target = (some_pages(rng, usable, 9) for usable in (24, 16, 24))
    at_first, untouched = device_bytes(pool), host_bytes(host)

    host.store(slots_of(source, page_size), slots_of(kept, page_size, np.int64))
    assert (device_bytes(pool) == at_first).all()
    untouched[kept] = at_first[source]
    assert (host_bytes(host) == untouched).all()

    host.load(slots_of(kept, page_size), slots_of(target, page_size))
    expected = at_first.copy()
    expected[target] = at_first[source]
    assert (device_bytes(pool) == expected).all() and (host_bytes(host) == untouched).all()


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_layerwise_load_equals_whole_load(name: str, page_size: int):
    pool = device_pool(20 * page_size, page_size, layers=5)
    host = host_pool(pool, 20 * page_size, copy_pages=way(name))
    rng = np.random.default_rng(1)
    host.pages_view[:] = rng.integers(0, 256, host.pages_view.shape, dtype=np.uint8)
    kept, target = some_pages(rng, 20, 11), some_pages(rng, 20, 11)
    expected = device_bytes(pool)
    for part in (slice(0, 1), slice(3, 4), slice(4, None), slice(1, 3)):
        host.load(slots_of(kept, page_size), slots_of(target, page_size), part)
        expected[target, part] = host_bytes(host)[kept, part]
        assert (device_bytes(pool) == expected).all(), part
    assert (expected[target] == host_bytes(host)[kept]).all()
    host.load(slots_of(kept, page_size), slots_of(target, page_size), slice(2, 2))
    host.load(slots_of(kept, page_size), slots_of(target, page_size), slice(5, 9))
    assert (device_bytes(pool) == expected).all()


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("shift", [0, 5])
@pytest.mark.parametrize("swapped", [False, True])
def test_copies_of_contiguous_page_runs(name: str, shift: int, swapped: bool):
    """Runs on both sides, on one, and runs that begin where another ends."""
    pool = device_pool(200, heads=LINES, layers=2)
    host = host_pool(pool, 200, copy_pages=way(name))
    runs = [np.arange(100, 180), np.arange(3, 50), np.arange(50, 60)]
    source = np.concatenate(runs)
    target = np.concatenate([runs[0] + shift, runs[2] - shift, runs[1]])
    if swapped:
        source, target = target, source
    expected = host_bytes(host)
    expected[target] = device_bytes(pool)[source]
    host.store(source.astype(np.int32), target.astype(np.int32))
    assert (host_bytes(host) == expected).all()


@pytest.mark.parametrize("name", WAYS)
def test_copies_in_several_pieces(name: str, monkeypatch: pytest.MonkeyPatch):
    """What is gathered or staged at a time is bounded; here it is a few pages, and does not divide their number."""
    pool = device_pool(60)
    host = host_pool(pool, 60, copy_pages=way(name))
    monkeypatch.setattr(host_copies, "GATHERED", 7 * 24)
    monkeypatch.setattr(host_copies, "GATHERED_PIECES", 1)
    monkeypatch.setattr(host_copies, "STAGED", 7 * host.page_nbytes)
    rng = np.random.default_rng(2)
    source, kept = some_pages(rng, 60, 45), some_pages(rng, 60, 45)
    expected = host_bytes(host)
    expected[kept] = device_bytes(pool)[source]
    host.store(source, kept)
    assert (host_bytes(host) == expected).all()
    back = device_bytes(pool)
    back[source[::-1]] = expected[kept]
    host.load(kept, source[::-1].copy())
    assert (device_bytes(pool) == back).all()


def planes_of(k: torch.Tensor, v: torch.Tensor) -> PagedLayers:
    """One layer of pages of one token."""
    layers = KVLayers.of([k], [v], CPU)
    return PagedLayers.of(host_copies.device_planes(layers, 1, host_copies.plane_bytes(layers, 1))[0])


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("offset", [8, 64])
def test_copies_at_any_memory_alignment(name: str, offset: int):
    """Stores of whole cache lines need targets at cache lines; other targets are written in another way."""
    size, rng = 128, np.random.default_rng(3)
    memory = torch.from_numpy(rng.integers(0, 256, 4096, dtype=np.uint8))
    start = -memory.data_ptr() % 64 + offset
    target = memory[start : start + 5 * size].view(5, size)
    source = torch.from_numpy(rng.integers(0, 256, (5, 2, size), dtype=np.uint8))
    k, v = target.view(5, 1, size), torch.zeros(5, 1, size, dtype=torch.uint8)
    expected = memory.clone()
    expected[start + 2 * size : start + 3 * size] = source[4, 0]
    expected[start + 3 * size : start + 4 * size] = source[1, 0]
    device = planes_of(k, v)
    way(name)(host_copies.host_planes(source), device, np.array([4, 1]), np.array([2, 3]))
    assert torch.equal(memory, expected) and torch.equal(v[[2, 3], 0], source[[4, 1], 1])


@pytest.mark.parametrize("name", WAYS)
def test_copies_of_pages_not_spaced_by_cache_lines(name: str):
    """Only the first page of each layer begins at a cache line."""
    rng = np.random.default_rng(8)
    memory = torch.from_numpy(rng.integers(0, 256, 1024, dtype=np.uint8))
    block = memory[-memory.data_ptr() % 64 :][: 5 * 136].view(5, 136)[:, :128].unflatten(1, (2, 64))
    k, v = (torch.from_numpy(rng.integers(0, 256, (5, 1, 64), dtype=np.uint8)) for _ in range(2))
    expected = block.clone()
    expected[3, 0], expected[3, 1] = k[1, 0], v[1, 0]
    host = host_copies.host_planes(block)
    way(name)(planes_of(k, v), host, np.array([1]), np.array([3]))
    assert torch.equal(block, expected)


@pytest.mark.parametrize("name", WAYS)
def test_empty_copies_change_nothing(name: str):
    pool = device_pool()
    host = host_pool(pool, 16, copy_pages=way(name))
    before, none = device_bytes(pool), np.empty(0, dtype=np.int32)
    host.store(none, none)
    host.load(none, none)
    host.load(none, none, slice(1, 2))
    assert (device_bytes(pool) == before).all() and (host.pages_view == 0xA5).all()


@pytest.mark.parametrize("heads", [SMALL, LINES])
@pytest.mark.parametrize(("name", "cycles"), [("numba", 10_000), ("numpy", 10_000), ("torch", 1000)])
def test_random_copies_match_dict_model(name: str, cycles: int, heads: tuple[int, int]):
    page_size, rng = 2, np.random.default_rng(4)
    pool = device_pool(16, page_size, layers=2, heads=heads, dtype=torch.bfloat16)
    host = host_pool(pool, 12, copy_pages=way(name))
    on_device, on_host = dict(enumerate(device_bytes(pool))), dict(enumerate(host_bytes(host)))
    counts, ups, layers = (rng.integers(0, high, cycles) for high in (7, 2, 4))
    for cycle, (count, up, layer) in enumerate(zip(counts.tolist(), ups.tolist(), layers.tolist())):
        device, kept = some_pages(rng, 8, count), some_pages(rng, 6, count)
        part = slice(layer, layer + 1) if layer < 2 else slice(0, 2)
        if up:
            host.load(slots_of(kept, page_size), slots_of(device, page_size), part if layer < 3 else None)
        else:
            host.store(slots_of(device, page_size), slots_of(kept, page_size))
        for page, stored in zip(device.tolist(), kept.tolist()):
            if up:
                on_device[page] = on_device[page].copy()
                on_device[page][part] = on_host[stored][part]
            else:
                on_host[stored] = on_device[page]
        if cycle % 50 == 0:
            assert (device_bytes(pool) == np.stack([*on_device.values()])).all(), cycle
            assert (host_bytes(host) == np.stack([*on_host.values()])).all(), cycle
            pool.k[1][5] = pool.v[0][3] = cycle  # something new, or all pages become alike
            fresh = device_bytes(pool)
            on_device[2], on_device[1] = fresh[2], fresh[1]


@given(data=st.data(), page_size=st.sampled_from([1, 2, 16]), dtype=st.sampled_from([np.int32, np.int64]))
def test_copies_between_slots_of_two_allocators(data: st.DataObject, page_size: int, dtype: Any):
    """As they come from an `Allocator` each, after some of the pages were given back."""
    pool = device_pool(32 * page_size, page_size, layers=2)
    host = host_pool(pool, 20 * page_size)
    slots = []
    for usable in (32, 20):
        allocator = Allocator(usable * page_size, page_size)
        first = allocator.alloc_extend(*(np.array([value], np.int32) for value in (0, usable * page_size, 0)))
        assert first is not None
        freed = data.draw(st.lists(st.integers(0, usable - 1), min_size=10, unique=True))
        for page in freed:
            allocator.free(first[page * page_size : (page + 1) * page_size])
        again = allocator.alloc_extend(*(np.array([value], np.int32) for value in (0, 10 * page_size, 0)))
        assert again is not None
        slots.append(again.astype(dtype))
    expected = host_bytes(host)
    expected[slots[1][::page_size] // page_size] = device_bytes(pool)[slots[0][::page_size] // page_size]
    host.store(*slots)
    assert (host_bytes(host) == expected).all()


def test_threads_copy_concurrently():
    pool = device_pool(400, heads=LINES)
    host = host_pool(pool, 400)
    expected = device_bytes(pool)
    rng = np.random.default_rng(5)
    parts = np.array_split(rng.permutation(400) + 1, 4)

    def go(pages: np.ndarray) -> None:
        for _ in range(20):
            host.store(pages, pages[::-1].copy())
            host.load(pages[::-1].copy(), pages)

    threads = [threading.Thread(target=go, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (device_bytes(pool) == expected).all()
    for pages in parts:
        assert (host_bytes(host)[pages[::-1]] == expected[pages]).all()


def test_copies_fall_back_to_numpy_without_numba(monkeypatch: pytest.MonkeyPatch):
    def missing(*_: object) -> Any:
        raise ImportError("Numba needs NumPy 1.0 or less")

    assert HostPool(device_pool(), 4).copied_by in ("numba", "numpy")
    monkeypatch.setattr(host_copies, "compile_copy", missing)
    host = host_pool(pool := device_pool(), 4)
    assert host.copied_by == "numpy" and copies_for(torch.device("cuda")) == ("torch", host_copies.copy_pages_torch)
    host.store(np.array([7]), np.array([2]))
    assert (host.page_bytes(2) == device_bytes(pool)[7].ravel()).all()


def test_device_kernel_gets_all_copies():
    calls: list[tuple[PagedLayers, PagedLayers, list[int], list[int]]] = []

    def kernel(source: PagedLayers, target: PagedLayers, source_pages: np.ndarray, target_pages: np.ndarray) -> None:
        assert source_pages.dtype == target_pages.dtype == np.int64
        calls.append((source, target, source_pages.tolist(), target_pages.tolist()))

    pool = device_pool(64, 16)
    host = HostPool(pool, 32, copy_pages=kernel)
    host.store(slots_of(np.array([4, 2]), 16), slots_of(np.array([1, 2]), 16))
    host.load(np.arange(32, 48), np.arange(16, 32), slice(1, 3))
    host.store(np.empty(0, np.int64), np.empty(0, np.int64))
    host.load(np.empty(0, np.int64), np.empty(0, np.int64))
    (device, memory, *pages), (part, device_part, *back) = calls
    assert pages == [[4, 2], [1, 2]] and back == [[2], [1]]
    tensors = [tensor for layer in zip(pool.k, pool.v) for tensor in layer]
    assert device.addresses.tolist() == [layer.data_ptr() for layer in tensors]
    assert (device.steps.tolist(), device.page_bytes, device.block) == ([16 * 24] * 6, 16 * 24, None)
    assert memory.addresses.tolist() == [host.memory.data_ptr() + plane * 16 * 24 for plane in range(6)]
    assert (memory.steps.tolist(), memory.page_bytes) == ([host.page_nbytes] * 6, 16 * 24)
    assert device_part.addresses.tolist() == [layer.data_ptr() for layer in tensors[2:]]
    assert part.addresses.tolist() == memory.addresses[2:].tolist()
    assert part.block is not None and part.block.shape == (3, 4, 16 * 24)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_layers_of_different_sizes_survive_store_and_load(name: str, page_size: int):
    """Keys wider than values, a layer of fewer heads: every layer is cut into planes of one size."""
    shapes = [KVShape(2, 24, 16), KVShape(1, 40, 20), KVShape(2, 24, 16)]
    pool = MHAKVPool(num_tokens=8 * page_size, page_size=page_size, shapes=shapes, dtype=torch.bfloat16, device=CPU)
    tensors = [tensor for layer in zip(pool.k, pool.v) for tensor in layer]
    for number, tensor in enumerate(tensors):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 251 + number)
    before = [tensor.clone() for tensor in tensors]
    host = HostPool(pool, 8 * page_size, copy_pages=way(name))
    taken, kept, given = (slots_of(np.array(pages), page_size) for pages in ([5, 2], [1, 7], [3, 8]))
    host.store(taken, kept)
    page = torch.cat([tensor.view(-1, page_size, *tensor.shape[1:])[2].reshape(-1) for tensor in tensors])
    assert (host.page_bytes(7) == page.view(torch.uint8).numpy()).all()
    for layer in (1, 0, 2):
        host.load(kept, given, slice(layer, layer + 1))
        after = [tensor.clone() for tensor in before]
        for done in (1, 0, 2)[: (1, 0, 2).index(layer) + 1]:
            for tensor in after[2 * done : 2 * done + 2]:
                tensor[given] = tensor[taken]
        assert all(torch.equal(found, expected) for found, expected in zip(tensors, after))
    assert host.layout == "of [160, 120, 160] bytes"


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_latents_survive_store_and_load(name: str, page_size: int):
    """A layer is one plane: values are a part of the keys and are not stored again."""
    shapes = [KVShape(1, 36, 32, values_in_keys=True)] * 3
    pool = make_kv_pool(num_tokens=8 * page_size, page_size=page_size, shapes=shapes, dtype=torch.bfloat16, device=CPU)
    for number, tensor in enumerate(pool.k):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 251 + number)
    host = HostPool(pool, 8 * page_size, copy_pages=way(name))
    assert host.layout == "3 of 72 bytes" and host.bytes_per_token == 3 * 72
    assert host.memory.shape == (9, 3, 72 * page_size)
    taken, kept, given = (slots_of(np.array(pages), page_size) for pages in ([5, 2], [1, 7], [3, 8]))
    expected = [tensor.clone() for tensor in pool.k]
    host.store(taken, kept)
    for number, tensor in enumerate(pool.k):
        tensor[taken] = -1
        expected[number][given], expected[number][taken] = expected[number][taken].clone(), -1
        host.load(kept, given, slice(number, number + 1))
        assert torch.equal(tensor, expected[number]) and torch.equal(pool.v[number], tensor[..., :32])


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("pin", [None, False])
@pytest.mark.parametrize("page_size", [1, 16])
def test_gpu_pages_survive_store_and_load(page_size: int, pin: bool | None):
    pool = device_pool(200 * page_size, page_size, heads=LINES, dtype=torch.bfloat16, device=torch.device("cuda"))
    host = host_pool(pool, 160 * page_size, pin=pin)
    assert host.memory.is_pinned() == host.pinned == (pin is None) and host.copied_by == "torch"
    rng = np.random.default_rng(page_size)
    source, kept, target = (some_pages(rng, usable, 90) for usable in (200, 160, 200))
    at_first, stored = device_bytes(pool), host_bytes(host)
    host.store(slots_of(source, page_size), slots_of(kept, page_size))
    torch.cuda.synchronize()
    stored[kept] = at_first[source]
    assert (host_bytes(host) == stored).all()
    expected = at_first.copy()
    expected[target] = at_first[source]
    for layer in range(pool.layers.k_pointers.numel()):
        host.load(slots_of(kept, page_size), slots_of(target, page_size), slice(layer, layer + 1))
    assert (device_bytes(pool) == expected).all()


@pytest.mark.gpu
def test_pinned_memory_copies_do_not_synchronize():
    pool = device_pool(64, device=torch.device("cuda"))
    host = host_pool(pool, 64)
    slots = np.arange(1, 60)
    torch.cuda.set_sync_debug_mode("error")
    try:
        host.store(slots, slots)
        host.load(slots, slots)
        host.load(slots, slots, slice(0, 1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
