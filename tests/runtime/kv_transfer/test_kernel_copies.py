"""Copies by the device's kernel: the same bytes as without it, and none if the kernel fails its trial."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from baton.memory_pool.kv_pool import KVLayers, KVShape, MHAKVPool, copy_kv, make_kv_pool
from baton.memory_pool.stores.host_copies import CopyPages
from baton.memory_pool.stores.host_pool import HostPool
from baton.runtime.kv_transfer.kernel_copies import KernelCopies, choose_copies
from baton.runtime.layers import sgl_ops
from baton.runtime.layers.op_libraries import select_ops
from baton.runtime.layers.ops import TORCH_OPS, OpShape
from tests.doubles.fake_sgl_kernel import FakeSglKernel
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

PAGE_SIZES = [1, 16, 64]
USABLE = 14
"""Pages of each pool."""


@pytest.fixture(params=["sglang-kernel", "torch"])
def transfer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """By address, like the kernel; and the oracle."""
    if request.param == "torch":
        yield copy_kv
        return
    with FakeSglKernel(monkeypatch) as kernel:
        yield sgl_ops.load(CPU)["transfer_kv"]
        assert set(kernel.calls) == {"transfer_kv_all_layer"}


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernel_copies_move_pages_bit_for_bit(transfer: Any, dtype: torch.dtype, page_size: int) -> None:
    pool = device_pool(USABLE * page_size, page_size, heads=LINES, dtype=dtype)
    host = host_pool(pool, USABLE * page_size, copy_pages=KernelCopies(transfer, page_size, CPU))
    rng = np.random.default_rng(page_size)
    source, kept, target = (some_pages(rng, USABLE, 9) for _ in range(3))
    device, memory = device_bytes(pool), host_bytes(host)
    for _ in range(2):  # the second time by what was kept of the first
        host.store(slots_of(source, page_size), slots_of(kept, page_size))
        memory[kept] = device[source]
        assert (host_bytes(host) == memory).all()
        for layers in (slice(0, 1), slice(1, 3)):
            host.load(slots_of(kept, page_size), slots_of(target, page_size), layers)
            device[target, layers] = memory[kept, layers]
            assert (device_bytes(pool) == device).all()


def test_kernel_copies_are_chosen_after_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = device_pool(32, 16, heads=LINES)
    before = device_bytes(pool)
    assert choose_copies(TORCH_OPS.transfer_kv, pool) is None
    with FakeSglKernel(monkeypatch) as kernel:
        assert isinstance(choose_copies(sgl_ops.load(CPU)["transfer_kv"], pool), KernelCopies)
        assert kernel.calls == ["transfer_kv_all_layer"] * 4
    assert (device_bytes(pool) == before).all()


def test_latents_are_not_copied_by_the_kernel() -> None:
    """It takes K and V of a layer."""

    def kernel(*_: object) -> None:
        raise AssertionError("the kernel was called")

    shapes = [KVShape(1, 36, 32, values_in_keys=True)] * 2
    pool = make_kv_pool(num_tokens=8, page_size=1, shapes=shapes, dtype=torch.bfloat16, device=CPU)
    assert choose_copies(kernel, pool) is None


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("shift", ["source", "target", "first layer only", "nothing"])
def test_copy_kernel_with_wrong_bytes_is_rejected(shift: str, page_size: int, caplog: pytest.LogCaptureFixture) -> None:
    def wrong(source: KVLayers, target: KVLayers, sources: torch.Tensor, targets: torch.Tensor) -> None:
        if shift == "first layer only":
            source, target = source.part(0, 1), target.part(0, 1)
        if shift != "nothing":
            copy_kv(source, target, sources - int(shift == "source"), targets - int(shift == "target"))

    assert choose_copies(wrong, device_pool(32, page_size)) is None
    assert "torch copies between device and host memory, the kernel failed its trial: it copied other" in caplog.text


def test_failing_copy_kernel_is_rejected(caplog: pytest.LogCaptureFixture) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("no kernel image is available")

    with caplog.at_level(logging.WARNING):
        assert choose_copies(failing, device_pool(32)) is None
    assert "its trial: RuntimeError: no kernel image is available" in caplog.text


def test_tokens_of_partial_words_are_copied_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = device_pool(8, heads=SMALL, dtype=torch.bfloat16)  # 12 bytes
    with FakeSglKernel(monkeypatch) as kernel:
        host = host_pool(pool, 8, copy_pages=KernelCopies(sgl_ops.load(CPU)["transfer_kv"], 1, CPU))
        host.store(np.array([3, 5]), np.array([1, 2]))
        assert kernel.calls == []
    assert (host_bytes(host)[[1, 2]] == device_bytes(pool)[[3, 5]]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_kernel_copies_on_gpu(page_size: int) -> None:
    """Without sglang-kernel there is nothing to see here; a kernel that is there must pass its trial."""
    cuda = torch.device("cuda")
    pool = device_pool(USABLE * page_size, page_size, heads=(8, 128), dtype=torch.bfloat16, device=cuda)
    copies = chosen_on_a_gpu(pool)
    host = HostPool(pool, USABLE * page_size, copy_pages=copies)
    pages, at_first = np.arange(1, USABLE), device_bytes(pool)
    slots = slots_of(pages, page_size)
    torch.cuda.set_sync_debug_mode("error")  # neither copy waits for the device
    try:
        host.store(slots, slots)
        for layer in (*pool.k, *pool.v):
            layer[page_size:].zero_()
        for layer in range(3):
            host.load(slots, slots, slice(layer, layer + 1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert (host_bytes(host)[pages] == at_first[pages]).all() and (device_bytes(pool)[pages] == at_first[pages]).all()


def chosen_on_a_gpu(pool: MHAKVPool) -> CopyPages:
    _, kv_heads, head_dim = pool.k[0].shape
    shape = OpShape(256, 512, 2 * kv_heads, kv_heads, head_dim, qk_norm=False, eps=1e-5)
    transfer = select_ops(pool.device, pool.dtype, shape).transfer_kv
    if transfer is TORCH_OPS.transfer_kv:
        pytest.skip("no kernel for these copies: sglang-kernel is not installed")
    copies = choose_copies(transfer, pool)
    assert copies is not None
    return copies
