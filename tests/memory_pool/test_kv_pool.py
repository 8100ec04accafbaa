from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from baton.memory_pool.kv_pool import (
    HUGE_FROM,
    KVPool,
    KVShape,
    MHAKVPool,
    MLAKVPool,
    are_disjoint,
    copy_kv,
    kv_bytes_per_token,
    make_kv_pool,
    uniform_shapes,
    untouched_zeros,
)

CPU = torch.device("cpu")


def make_pool(num_tokens: int = 32, page_size: int = 16, **changes) -> MHAKVPool:
    return MHAKVPool(
        num_tokens=num_tokens,
        page_size=page_size,
        shapes=uniform_shapes(2, 2, 4),
        dtype=torch.float32,
        device=CPU,
        **changes,
    )


def fill(pool: MHAKVPool) -> None:
    """Every number another one."""
    for layer, tensor in enumerate((*pool.k, *pool.v)):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 1000 * layer)


def test_padding_page_is_added_to_pool_size():
    pool = make_pool()
    assert pool.num_slots == 48
    assert [tensor.shape for tensor in (*pool.k, *pool.v)] == [(48, 2, 4)] * 4


def test_fresh_slots_are_zero():
    pool = make_pool()
    assert all(bool((tensor == 0).all()) for tensor in (*pool.k, *pool.v))


def test_untouched_pool_memory_is_not_resident():
    """256 MiB, of which one page is written."""
    before = psutil.Process().memory_info().rss
    pool = make_pool(num_tokens=2**21, page_size=1)
    pool.k[1][5] = 1.0
    assert pool.k[1][5].sum() == 8 and not pool.k[1][6].any() and not pool.v[1][5].any()
    assert psutil.Process().memory_info().rss - before < 64 * 2**20


def test_untouched_memory_is_not_resident_where_as_much_was_freed_before():
    """After the first round, glibc no longer maps such blocks: it takes them from memory that it keeps."""
    blocks: list[tuple[np.ndarray, bytearray]] = []
    for _ in range(2):
        blocks = [(np.ones(2**21, dtype=np.uint8), bytearray(1000)) for _ in range(8)]
    kept = [small for _, small in blocks]  # between the blocks, so that those are not given back
    del blocks
    zeros = [untouched_zeros((2**21,), torch.uint8, CPU) for _ in range(8)]
    assert sum(map(resident_pages, zeros)) == 0 and len(kept) == 8


def resident_pages(tensor: torch.Tensor) -> int:
    """Pages of the tensor's memory that the system has given it."""
    first = -(-tensor.data_ptr() // mmap.PAGESIZE)
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(8 * first)
        entries = np.frombuffer(pagemap.read(8 * (end - first)), dtype=np.uint64)
    return int((entries >> np.uint64(63)).sum())


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no huge pages")
def test_only_large_zeros_ask_for_huge_pages():
    small, large = (untouched_zeros((size,), torch.uint8, CPU) for size in (HUGE_FROM // 2, HUGE_FROM))
    assert (has_huge_pages(small), has_huge_pages(large)) == (False, True)


def has_huge_pages(tensor: torch.Tensor) -> bool:
    """True if the mapping that the tensor lies in asks for them."""
    middle, mappings = tensor.data_ptr() + tensor.nbytes // 2, Path("/proc/self/smaps").read_text()
    for bounds, flags in re.findall(r"^([0-9a-f]+-[0-9a-f]+) .*?^VmFlags: (.*?)$", mappings, re.MULTILINE | re.DOTALL):
        first, end = (int(address, 16) for address in bounds.split("-"))
        if first <= middle < end:
            return "hg" in flags.split()
    raise AssertionError("the tensor is in no mapping")


def test_untouched_zeros_that_the_system_cannot_map_are_refused():
    with pytest.raises(MemoryError, match="cannot map"):
        untouched_zeros((2**62,), torch.uint8, CPU)


@pytest.mark.parametrize("page_size", [1, 16])
def test_kv_pool_of_a_single_page(page_size: int):
    pool = make_pool(num_tokens=page_size, page_size=page_size)
    assert (pool.num_tokens, pool.page_size, pool.num_slots) == (page_size, page_size, 2 * page_size)
    assert (pool.dtype, pool.device) == (torch.float32, CPU)


def test_kv_pool_tensors_are_on_requested_device():
    """The meta device has no memory, so that this runs anywhere."""
    meta = torch.device("meta")
    pool = MHAKVPool(num_tokens=32, page_size=16, shapes=uniform_shapes(2, 2, 4), dtype=torch.bfloat16, device=meta)
    for tensor in (*pool.k, *pool.v):
        assert (tensor.shape, tensor.dtype, tensor.device) == ((48, 2, 4), torch.bfloat16, meta)
    assert pool.layers.k_pointers.device == pool.layers.v_pointers.device == meta


def test_copy_between_different_layer_counts_is_refused():
    pool = make_pool()
    slot = torch.tensor([1])
    with pytest.raises(ValueError, match="shorter"):
        copy_kv(pool.layers, pool.layers.part(0, 1), slot, slot)


def test_untouched_zeros_are_cache_line_aligned():
    kept = [untouched_zeros((size,), torch.uint8, CPU) for size in (1, 5, 33, 100, 1000, 4001) for _ in range(5)]
    assert all(zeros.data_ptr() % 64 == 0 and not zeros.any() for zeros in kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32])
def test_untouched_zeros_behave_like_torch_zeros(dtype):
    zeros = untouched_zeros((5, 3, 7), dtype, CPU)
    assert torch.equal(zeros, torch.zeros(5, 3, 7, dtype=dtype)) and zeros.dtype == dtype
    assert zeros.is_contiguous() and zeros.data_ptr() % 64 == 0
    zeros[2] += 1
    assert zeros.sum() == 21


def test_kv_pool_bytes_per_token_and_description():
    assert kv_bytes_per_token(shapes=uniform_shapes(2, 2, 4), dtype=torch.bfloat16) == 64
    pool = make_pool()
    assert pool.bytes_per_token == 128
    assert sum(tensor.nbytes for tensor in (*pool.k, *pool.v)) == 128 * pool.num_slots
    assert pool.describe() == "KV pool: 32 tokens × 128 bytes = 0.00 GiB"
    pool.num_tokens = 3 * 2**22  # as if it were large
    assert pool.describe() == "KV pool: 12582912 tokens × 128 bytes = 1.50 GiB"


@pytest.mark.parametrize("num_tokens", [0, 8, 40])
def test_kv_pool_size_must_be_multiple_of_page_size(num_tokens):
    with pytest.raises(ValueError, match="multiple of the page size"):
        make_pool(num_tokens=num_tokens)


def test_kv_pool_beyond_device_memory_names_flag():
    with pytest.raises(MemoryError, match="--max-total-tokens"):
        make_pool(num_tokens=2**45, page_size=1)


def test_overlapping_copies_read_before_writing():
    pool = make_pool()
    fill(pool)
    before = [tensor.clone() for tensor in (*pool.k, *pool.v)]
    pool.copy(torch.tensor([3, 4, 40]), torch.tensor([4, 3, 17]))
    for tensor, old in zip((*pool.k, *pool.v), before, strict=True):
        old[[4, 3, 17]] = old[[3, 4, 40]]
        assert torch.equal(tensor, old)


def test_disjoint_copies_use_fast_path():
    calls = []

    def fast(*arguments) -> None:
        calls.append(arguments[0] is arguments[1])
        copy_kv(*arguments)

    pool = make_pool(copy_disjoint=fast)
    fill(pool)
    expected = pool.v[1][[20, 30]]
    pool.copy(torch.tensor([20, 30]), torch.tensor([2, 47]), disjoint=True)
    assert torch.equal(pool.v[1][[2, 47]], expected) and calls == [True]
    pool.copy(torch.tensor([20]), torch.tensor([30]))
    assert calls == [True]


def test_slot_overlap_is_detected_on_host():
    def slots(*numbers: int) -> np.ndarray:
        return np.array(numbers, dtype=np.int32)

    assert are_disjoint(slots(1, 2), slots(3)) and are_disjoint(slots(), slots())
    assert not are_disjoint(slots(5, 1, 2), slots(9, 2, 7))


def test_layers_hold_data_pointers():
    pool = make_pool()
    assert pool.layers.k_pointers.dtype == torch.uint64
    assert pool.layers.k_pointers.tolist() == [tensor.data_ptr() for tensor in pool.k]
    last = pool.layers.part(1, 1)
    assert last.v[0] is pool.v[1] and last.v_pointers.tolist() == [pool.v[1].data_ptr()]
    assert last.k[0] is pool.k[1] and last.k_pointers.tolist() == [pool.k[1].data_ptr()]


def test_layers_are_copied_between_pools():
    pool, other = make_pool(), make_pool(num_tokens=64)
    fill(pool)
    copy_kv(pool.layers.part(1, 1), other.layers.part(0, 1), torch.tensor([1, 2]), torch.tensor([60, 61]))
    assert torch.equal(other.k[0][[60, 61]], pool.k[1][[1, 2]])
    assert torch.equal(other.v[0][[60, 61]], pool.v[1][[1, 2]])
    assert not other.k[1].any() and not other.k[0][:60].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("part", ["k", "v"])
def test_first_non_finite_slot_is_found(part: str, bad: float) -> None:
    pool = make_pool()
    slots = torch.tensor([9, 4, 30, 12, 7, 21], dtype=torch.int32)
    assert pool.first_not_finite(slots) is None
    getattr(pool, part)[1][12, -1, -1] = bad
    getattr(pool, part)[0][21, 0, 0] = bad
    getattr(pool, part)[0][5, 0, 0] = bad  # not among them
    for piece in (1, 2, 3, 4096):
        assert pool.first_not_finite(slots, piece) == 3
    assert pool.first_not_finite(slots[:3]) is None and pool.first_not_finite(slots[:0]) is None


# -- latents -----------------------------------------------------------------------------------------------------------

LATENTS = [KVShape(1, 12, 8, values_in_keys=True)] * 3


def latent_pool(page_size: int = 16, **changes) -> KVPool:
    pool = make_kv_pool(num_tokens=64, page_size=page_size, shapes=LATENTS, dtype=torch.bfloat16, device=CPU, **changes)
    for layer, tensor in enumerate(pool.k):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 251 + layer)
    return pool


def test_pool_fits_the_shapes():
    assert isinstance(latent_pool(), MLAKVPool)
    plain = make_kv_pool(num_tokens=4, page_size=1, shapes=uniform_shapes(2, 2, 4), dtype=torch.float32, device=CPU)
    assert type(plain) is MHAKVPool
    with pytest.raises(ValueError, match="some layers keep K and V and others latents"):
        make_kv_pool(
            num_tokens=4,
            page_size=1,
            shapes=[*LATENTS, KVShape(1, 12, 8)],
            dtype=torch.float32,
            device=CPU,
        )


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_latent_pool_keeps_a_token_once(page_size: int):
    """layers × (latent + rotary part) × bytes, and no memory for values."""
    pool = latent_pool(page_size)
    assert pool.bytes_per_token == kv_bytes_per_token(LATENTS, torch.bfloat16) == 3 * 12 * 2
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in (*pool.k, *pool.v)}
    assert sum(storage.nbytes() for storage in storages.values()) == pool.bytes_per_token * pool.num_slots
    assert pool.layers.v == [] and len(pool.layers.v_pointers) == 0 and not pool.layers.is_uniform
    for keys, values in zip(pool.k, pool.v, strict=True):
        assert values.shape == (64 + page_size, 1, 8) and torch.equal(values, keys[..., :8])
    pool.k[1][5, 0, 7] = -3
    assert pool.v[1][5, 0, 7] == -3


@pytest.mark.parametrize("disjoint", [False, True])
def test_latent_copies_move_whole_tokens(disjoint: bool):
    """By torch: the kernel for copies takes K and V."""

    def kernel(*_: object) -> None:
        raise AssertionError("the kernel was called")

    pool = latent_pool(copy_disjoint=kernel)
    before = [tensor.clone() for tensor in pool.k]
    source, target = ([20, 30], [2, 47]) if disjoint else ([3, 4, 40], [4, 3, 17])
    pool.copy(torch.tensor(source), torch.tensor(target), disjoint=disjoint)
    for tensor, old in zip(pool.k, before, strict=True):
        old[target] = old[source]
        assert torch.equal(tensor, old)


@pytest.mark.parametrize("number", [0, 8, 11])
def test_non_finite_latent_is_found(number: int) -> None:
    """Also in the rotary part, which is no value."""
    pool = latent_pool()
    slots = torch.tensor([9, 4, 30], dtype=torch.int32)
    assert pool.first_not_finite(slots) is None
    pool.k[2][4, 0, number] = float("nan")
    assert pool.first_not_finite(slots) == 1
