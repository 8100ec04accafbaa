from __future__ import annotations

import pytest
import torch

from baton.runtime.memory_sizing import CPU_POOL_LIMIT, available_memory, pool_tokens
from baton.runtime.model_files import ModelLoadError

GIB = 2**30


def tokens(**changes) -> int:
    case = {
        "requested": 0,
        "available": 10 * GIB,
        "mem_fraction": 0.5,
        "weight_bytes": GIB,
        "bytes_per_token": 2**20,
        "page_size": 16,
        "context_length": 1000,
        "is_cpu": False,
    }
    return pool_tokens(**(case | changes))


def test_share_of_memory_minus_weights_minus_the_padding_page():
    assert tokens() == 4 * 1024 - 16


def test_a_cpu_pool_is_capped_unless_asked_for():
    assert tokens(available=100 * GIB, is_cpu=True) == CPU_POOL_LIMIT // 2**20 - 16
    assert tokens(available=100 * GIB, is_cpu=True, requested=50 * 1024) == 50 * 1024


def test_a_request_is_rounded_down_to_pages():
    assert tokens(requested=100) == 96
    with pytest.raises(ModelLoadError, match="less than one page"):
        tokens(requested=15)


def test_a_pool_beyond_the_memory_is_refused():
    assert tokens(requested=8 * 1024) == 8 * 1024
    with pytest.raises(ModelLoadError, match=r"--max-total-tokens 10240 needs 10\.00 GiB"):
        tokens(requested=10 * 1024)


@pytest.mark.parametrize("changes", [{"context_length": 5000}, {"weight_bytes": 6 * GIB}, {"mem_fraction": 0.15}])
def test_less_than_one_request_names_the_flags(changes):
    with pytest.raises(ModelLoadError, match=r"Lower --context-length, raise --mem-fraction-static"):
        tokens(**changes)


def test_the_host_has_some_memory():
    assert GIB // 16 < available_memory(torch.device("cpu")) < 2**50
