"""The host's memory, page by page, and the slots that it refuses."""

from __future__ import annotations

import numpy as np
import psutil
import pytest
import torch

from baton.memory_pool.stores import host_copies
from baton.memory_pool.stores.host_pool import HostPool
from tests.doubles.host_pools import LINES, device_bytes, device_pool, host_pool


def test_host_page_is_contiguous_layer_by_layer_k_before_v():
    pool = device_pool(64, 16, layers=2, heads=LINES)
    host = host_pool(pool, 32)
    assert host.memory.shape == (3, 2 * 2, 4 * 16 * 2 * 64) and host.memory.dtype == torch.uint8
    host.store(np.arange(48, 64), np.arange(32, 48))
    parts = [pool.k[0], pool.v[0], pool.k[1], pool.v[1]]
    page = torch.cat([part[48:64].reshape(-1) for part in parts]).view(torch.uint8).numpy()
    assert (host.page_bytes(2) == page).all() and (host.page_bytes(1) == 0xA5).all()


def test_page_bytes_are_view_of_host_memory():
    pool = device_pool(64, 16)
    host = host_pool(pool, 32)
    assert host.page_nbytes == 16 * pool.bytes_per_token == host.page_bytes(1).nbytes == host.pages_view[0].nbytes
    data = np.random.default_rng(6).integers(0, 256, host.page_nbytes, dtype=np.uint8)
    host.page_bytes(2).data[:] = data.data  # as a file reads into it
    assert host.pages_view[2].tobytes() == data.tobytes() and (host.pages_view[:2] == 0xA5).all()
    host.load(np.arange(32, 48), np.arange(16, 32))
    assert (device_bytes(pool)[1].ravel() == data).all()


@pytest.mark.parametrize("page", [-1, 0, 3])
def test_page_bytes_of_invalid_page_are_refused(page: int):
    with pytest.raises(IndexError, match=f"host page {page}: there are pages 1 … 2"):
        host_pool(device_pool(64, 16), 32).page_bytes(page)


def test_untouched_pool_memory_is_not_resident():
    """256 MiB, of which one page is written."""
    pool = device_pool(4, heads=(1, 64), layers=2)
    before = psutil.Process().memory_info().rss
    host = HostPool(pool, 2**18)
    host.store(np.array([3]), np.array([2**17]))
    assert (host.page_bytes(2**17) == device_bytes(pool)[3].ravel()).all() and not host.page_bytes(5).any()
    assert psutil.Process().memory_info().rss - before < 64 * 2**20


def test_host_pool_sizes_and_description():
    pool = device_pool(64, 16, dtype=torch.bfloat16)
    host = HostPool(pool, 32, copy_pages=host_copies.copy_pages_torch)
    assert (host.num_tokens, host.page_size, host.num_slots, host.num_pages) == (32, 16, 48, 3)
    assert (host.num_layers, host.dtype, host.bytes_per_token, host.pinned) == (3, torch.bfloat16, 72, False)
    assert host.describe() == "host KV pool: 32 tokens × 72 bytes = 0.00 GiB (copied by a kernel of the device)"
    host.num_tokens, host.pinned, host.copied_by = 2**25, True, "torch"  # as if it were large, and on a GPU
    assert host.describe() == "host KV pool: 33554432 tokens × 72 bytes = 2.25 GiB (pinned, copied by torch)"


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [0, -16, 8, 40])
def test_host_pool_size_must_be_multiple_of_page_size(num_tokens: int):
    with pytest.raises(ValueError, match=f"host KV pool of {num_tokens} tokens: use a positive multiple .*16"):
        HostPool(device_pool(64, 16), num_tokens)


def test_host_pool_beyond_host_memory_is_refused():
    with pytest.raises(MemoryError, match="cannot allocate the host KV pool: 35184372088832 tokens"):
        HostPool(device_pool(), 2**45)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here memory can be pinned")
def test_pinned_memory_without_gpu_is_refused():
    with pytest.raises(ValueError, match="needs a CUDA device"):
        HostPool(device_pool(), 16, pin=True)


PAGE = np.arange(16)
BAD = {
    "7 device slots for 16 host slots": (PAGE[:7] + 16, PAGE + 16),
    r"7 device slots are no whole pages of 16": (PAGE[:7] + 16, PAGE[:7] + 16),
    r"device slots 16 … 31 of 32 are not one whole page": (np.r_[16:32, 33:49], np.r_[16:48]),
    r"host slots 0 … 15 of 16 are not one whole page": (PAGE + 16, np.r_[17:32, 16]),
    r"host slots 16 … 31 of 32 are not": (np.r_[16:48], np.r_[16:32, 32:40, 16:24]),
    r"device page 0 \(of 16 tokens\) is not one of 1 … 4": (PAGE, PAGE + 16),
    r"host page 0 \(of 16 tokens\) is not one of 1 … 2": (PAGE + 16, PAGE),
    r"device page 5 ": (np.r_[16:32, 80:96], np.r_[16:48]),
    r"host page 3 ": (np.r_[16:48], np.r_[16:32, 48:64]),
    r"device page -1 ": (PAGE - 16, PAGE + 16),
    r"device slots must be int32 or int64 \[n\], not float64 \[16\]": (PAGE + 16.0, PAGE + 16),
    r"host slots must be int32 or int64 \[n\], not uint8 \[16\]": (PAGE + 16, (PAGE + 16).astype(np.uint8)),
    r"host slots must be int32 or int64 \[n\], not int64 \[16, 1\]": (PAGE + 16, PAGE[:, None] + 16),
}


@pytest.mark.parametrize("message", BAD)
def test_copies_with_invalid_slots_change_nothing(message: str):
    device_slots, host_slots = BAD[message]
    pool = device_pool(64, 16)
    host = host_pool(pool, 32)
    before = device_bytes(pool)
    with pytest.raises(ValueError, match=message):
        host.store(device_slots, host_slots)
    with pytest.raises(ValueError, match=message):
        host.load(host_slots, device_slots)
    assert (device_bytes(pool) == before).all() and (host.pages_view == 0xA5).all()


def test_slots_are_checked_at_page_size_one():
    host = host_pool(device_pool(8), 4)
    for bad in ([0], [-3], [9]):
        with pytest.raises(ValueError, match=f"device page {bad[0]} "):
            host.store(np.array(bad), np.array([1]))


def test_strided_layer_slices_are_refused():
    host = host_pool(device_pool(), 4)
    with pytest.raises(ValueError, match="not in steps of 2"):
        host.load(np.array([1]), np.array([1]), slice(0, 3, 2))


@pytest.mark.gpu
def test_dropped_host_pool_unpins_its_memory():
    """Locking it twice would fail."""
    pool = device_pool(64, device=torch.device("cuda"))
    memory = HostPool(pool, 16).memory
    assert not memory.is_pinned()
