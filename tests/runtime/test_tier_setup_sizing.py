from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.memory_pool.allocator import Allocator
from baton.runtime.checkpoint.model_files import ModelLoadError
from baton.runtime.runner.memory_sizing import available_memory
from baton.runtime.tier_setup import HostCacheError, plan_host_tokens

KIB, GIB = 2**10, 2**30


def tokens(gb: float = 0.0, ratio: float = 0.0, **changes: Any) -> int:
    """16 KiB per token, 100,000 tokens on the device, pages of 16, 8 GiB to be had."""
    case = {"device_tokens": 100_000, "bytes_per_token": 16 * KIB, "page_size": 16, "available_bytes": 8 * GIB}
    return plan_host_tokens(gb, ratio, **(case | changes))


def test_no_host_pool_without_flag():
    assert tokens(available_bytes=0) == 0


def test_host_cache_size_includes_padding_page():
    assert tokens(gb=1) == 65536 - 16
    assert tokens(gb=0.5, page_size=1) == 32768 - 1
    assert tokens(gb=1, bytes_per_token=100_000) == 10736 - 16  # 10737 tokens, whole pages of them


def test_host_cache_ratio_is_relative_to_device_tokens():
    assert tokens(ratio=2.0) == 200_000
    assert tokens(ratio=0.33) == 32_992  # whole pages of 33,000
    assert tokens(ratio=0.33, page_size=1) == 33_000


@pytest.mark.parametrize("value", [-1.0, -0.001, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("flag", ["gb", "ratio"])
def test_invalid_host_cache_sizes_are_refused(flag: str, value: float):
    with pytest.raises(HostCacheError, match=f"--host-cache-{flag} is {value}; use a number from 0"):
        tokens(**{flag: value})


def test_host_cache_size_and_ratio_together_are_refused():
    with pytest.raises(HostCacheError, match=r"--host-cache-gb 1.0 and --host-cache-ratio 2.0 both"):
        tokens(gb=1.0, ratio=2.0)


def test_host_cache_below_one_page_is_refused():
    page = 16 * 16 * KIB / GIB
    assert tokens(gb=2 * page) == 16
    with pytest.raises(HostCacheError, match=r"--host-cache-gb 0.0\d+ is less than one page \(16 tokens.*0.50 MiB"):
        tokens(gb=1.99 * page)
    assert tokens(ratio=0.00016) == 16
    with pytest.raises(HostCacheError, match=r"--host-cache-ratio 0.00015 is less than one page \(16 [^,]*; raise it"):
        tokens(ratio=0.00015)


def test_host_cache_beyond_available_memory_is_refused():
    assert tokens(gb=8) == 8 * 65536 - 16
    with pytest.raises(
        HostCacheError, match=r"--host-cache-gb 8.1 needs 8.10 GiB .* 8.00 GiB is still free .* --host-cache-gb,"
    ):
        tokens(gb=8.1)
    needed = (200_000 + 16) * 16 * KIB
    assert tokens(ratio=2.0, available_bytes=needed) == 200_000
    with pytest.raises(HostCacheError, match=r"--host-cache-ratio 2.0 needs 3.05 GiB .*lower --host-cache-ratio,"):
        tokens(ratio=2.0, available_bytes=needed - 1)
    with pytest.raises(HostCacheError, match=r"but 0.00 MiB is still free"):
        tokens(gb=1, available_bytes=-5)


def test_host_slots_beyond_int32_are_refused():
    many = {"bytes_per_token": 1, "page_size": 1, "available_bytes": 2**40}
    assert tokens(gb=2.0, **many) == 2**31 - 1
    with pytest.raises(HostCacheError, match="int32"):
        tokens(gb=2.0 + 2**-30, **many)


def test_host_cache_is_bounded_by_this_machine():
    """The limit of a container counts, as `available_memory` has it."""
    available = available_memory(torch.device("cpu"))
    assert tokens(gb=0.9 * available / GIB, available_bytes=available) > 0
    with pytest.raises(ModelLoadError, match="needs"):
        tokens(gb=1.1 * available / GIB, available_bytes=available)


@given(
    gb=st.floats(0, 1e3) | st.just(0.0),
    ratio=st.floats(0, 1e3) | st.just(0.0),
    device_tokens=st.integers(1, 10**8),
    bytes_per_token=st.integers(1, 2**20),
    page_size=st.sampled_from([1, 16, 64]),
    available_bytes=st.integers(0, 2**42),
)
def test_host_cache_plan_fits_or_is_refused(gb, ratio, device_tokens, bytes_per_token, page_size, available_bytes):
    try:
        planned = plan_host_tokens(gb, ratio, device_tokens, bytes_per_token, page_size, available_bytes)
    except HostCacheError:
        return
    assert (planned == 0) == (gb == ratio == 0)
    if planned:
        assert (planned + page_size) * bytes_per_token <= available_bytes
        assert not gb or (planned + page_size) * bytes_per_token <= gb * GIB
        assert not ratio or planned <= ratio * device_tokens
        assert planned % page_size == 0 and planned + page_size <= 2**31
        if planned < 10**6:
            Allocator(planned, page_size)
