"""The division of memory between pools."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from baton.runtime.checkpoint.model_files import ModelLoadError
from baton.runtime.runner.memory_plan import CPU_POOL_LIMIT, MARGIN, MemoryPlan, MemorySettings, plan_memory

MIB, GIB = 2**20, 2**30
SETTINGS = MemorySettings(
    mem_fraction_static=0.5,
    context_length=1000,
    page_size=16,
    chunked_prefill_size=2048,
    max_running_requests=64,
    cuda_graph_max_bs=32,
)


def plan(**changes: Any) -> MemoryPlan:
    """10 GiB, half of them to be used, 1 GiB of weights, 1 MiB per token; ``changes`` to that and to the flags."""
    case: dict[str, Any] = {"available": 10 * GIB, "weight_bytes": GIB, "bytes_per_token": MIB, "is_cpu": False}
    flags = {name: changes.pop(name) for name in list(changes) if hasattr(SETTINGS, name)}
    return plan_memory(dataclasses.replace(SETTINGS, **flags), **(case | changes))


def tokens(**changes: Any) -> int:
    return plan(**changes).kv_tokens


def test_kv_tokens_from_memory_share_weights_and_padding_page():
    assert tokens() == 4 * 1024 - 16


def test_cpu_pool_is_capped_unless_set_explicitly():
    assert tokens(available=100 * GIB, is_cpu=True) == CPU_POOL_LIMIT // MIB - 16
    assert tokens(available=100 * GIB, is_cpu=True, max_total_tokens=50 * 1024) == 50 * 1024


def test_max_total_tokens_is_rounded_down_to_pages():
    assert tokens(max_total_tokens=100) == 96
    with pytest.raises(ModelLoadError, match="less than one page"):
        tokens(max_total_tokens=15)


def test_kv_pool_beyond_memory_is_refused():
    assert tokens(max_total_tokens=8 * 1024) == 8 * 1024
    with pytest.raises(ModelLoadError, match=r"--max-total-tokens 10240 needs 10\.00 GiB.*lower it to at most 8960"):
        tokens(max_total_tokens=10 * 1024)
    with pytest.raises(ModelLoadError, match=r"--max-total-tokens 8192 .* activations 1\.00 GiB, CUDA graphs 0\.00"):
        tokens(max_total_tokens=8 * 1024, activation_bytes=GIB)


@pytest.mark.parametrize(
    "changes", [{"context_length": 5000}, {"weight_bytes": 6 * GIB}, {"mem_fraction_static": 0.15}]
)
def test_pool_below_one_request_names_flags(changes):
    with pytest.raises(ModelLoadError, match=r"Lower --context-length, raise --mem-fraction-static"):
        tokens(**changes)


def test_profiled_memory_beyond_reserved_share_reduces_pool():
    assert tokens(activation_bytes=3 * GIB, graph_bytes=GIB) == 4 * 1024 - 16, "half of the memory is left for them"
    assert tokens(activation_bytes=3 * GIB, graph_bytes=3 * GIB) == 3 * 1024 - MARGIN // MIB - 16
    assert tokens(mem_fraction_static=1.0) == 9 * 1024 - MARGIN // MIB - 16


def test_mem_fraction_is_recommended_only_if_it_helps():
    with pytest.raises(ModelLoadError, match=r"Lower --context-length or --chunked-prefill-size \(2048\) or --cuda-g"):
        tokens(activation_bytes=8 * GIB, graph_bytes=GIB)
    with pytest.raises(ModelLoadError, match=r"Lower --context-length or --chunked-prefill-size \(2048\)$"):
        tokens(activation_bytes=8 * GIB, cuda_graph_max_bs=0)


def test_memory_plan_adds_up():
    made = plan(activation_bytes=GIB, graph_bytes=GIB // 2)
    assert made.kv_bytes == (made.kv_tokens + 16) * MIB
    parts = made.weights + made.activations + made.graphs + made.kv_bytes + made.free_left
    assert parts == 10 * GIB and made.free_left >= MARGIN
    assert made.describe() == (
        "memory: weights 1.00 GiB, activations 1.00 GiB, CUDA graphs 0.50 GiB, KV 4080 tokens × 1048576 bytes "
        "in 4.00 GiB, 3.50 GiB left"
    )


def states(**changes: Any) -> MemoryPlan:
    """The same with states of 8 MiB, and 10 rows."""
    return plan(**({"bytes_per_state": 8 * MIB, "num_rows": 10} | changes))


def test_states_are_as_many_as_the_rows_need():
    made = states()
    assert made.num_states == 40 and made.state_bytes == 42 * 8 * MIB
    assert made.kv_tokens == (4 * 1024 - 42 * 8) // 16 * 16 - 16, "the KV pool gets the rest"
    assert made.weights + made.state_bytes + made.kv_bytes + made.free_left == 10 * GIB
    assert ", 40 states × 8388608 bytes in 0.33 GiB, KV 3744 tokens × 1048576 bytes in" in made.describe()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"bytes_per_state": MIB}, 204),  # 5 % of 4 GiB
        ({"num_rows": 1000}, 204 - 2),  # 40 %
        ({"num_rows": 1000, "context_length": 3000}, (4096 - 3008 - 16) // 8 - 2),  # what one context leaves
        ({"bytes_per_state": 200 * MIB, "num_rows": 100}, 6),
        ({"bytes_per_state": 500 * MIB}, 4),  # the least
        ({"bytes_per_state": 1}, 2**16),
        ({"num_rows": 1000, "bytes_per_token": 0}, 510),  # nothing else wants the memory
        ({"num_rows": 1000, "max_total_tokens": 8 * 1024}, (8960 - 8192) // 8 - 2),
    ],
    ids=str,
)
def test_number_of_states_from_memory(changes, expected):
    assert states(**changes).num_states == expected


def test_max_states_sets_their_number():
    assert states(max_states=7).num_states == 7
    made = states(max_states=300, is_cpu=True)
    assert made.num_states == 300 and made.kv_tokens == 4096 - 302 * 8 - 16
    with pytest.raises(
        ModelLoadError, match=r"2000 recurrent states and 2 set aside × 8388608 bytes need 15\.64 GiB, but"
    ):
        states(max_states=2000)
    with pytest.raises(ModelLoadError, match=r"Lower --max-states to at most 1118$"):
        states(max_states=2000)


def test_states_that_leave_no_room_for_a_request_name_their_flag():
    with pytest.raises(ModelLoadError, match=r"500 states 3\.92 GiB\. Lower --context-length or --max-states \(500\)"):
        states(max_states=500)
    with pytest.raises(ModelLoadError, match=r"4 recurrent states and 2 set aside .*raise --mem-fraction-static"):
        states(bytes_per_state=GIB)


def test_tokens_without_kv_take_no_memory():
    made = states(bytes_per_token=0)
    assert made.kv_tokens == 10_000 and made.kv_bytes == 0, "each row may have a whole context"
    assert states(bytes_per_token=0, num_rows=0).kv_tokens == 1008, "of whole pages"
    assert states(bytes_per_token=0, context_length=2**20).kv_tokens == 2**22
    assert states(bytes_per_token=0, max_total_tokens=100).kv_tokens == 96


# -- a pool for layers with a sliding window ---------------------------------------------------------------------------

WINDOWED: dict[str, Any] = {"window": 128, "page_size": 1, "chunked_prefill_size": 256, "context_length": 4096}


def tokens_by_one_pool(full: int, windowed: int, **changes: Any) -> float:
    """Tokens that the two pools hold, by those of one pool for all layers."""
    layer = MIB // 32
    case = WINDOWED | {"num_rows": 4096} | changes
    separate = plan(bytes_per_token=full * layer, bytes_per_window_token=windowed * layer, **case)
    one = plan(bytes_per_token=(full + windowed) * layer, **(case | {"window": 0}))
    assert separate.kv_bytes + separate.window_bytes <= one.kv_bytes + 2 * (full + windowed) * layer
    return separate.kv_tokens / one.kv_tokens


def test_gemma_3_holds_three_times_the_tokens_in_the_same_memory_and_gpt_oss_less_than_twice():
    """Though all rows want their windows at once. With fewer rows both come nearer to the bound: all layers by those
    that see all tokens."""
    assert tokens_by_one_pool(1, 5) == pytest.approx(6 / (1 + 5 * 0.2), rel=0.01)
    assert tokens_by_one_pool(1, 1) == pytest.approx(2 / (1 + 1 * 0.2), rel=0.01)
    assert 4 < tokens_by_one_pool(1, 5, num_rows=1, chunked_prefill_size=16) < 6
    assert 1.8 < tokens_by_one_pool(1, 1, num_rows=1, chunked_prefill_size=16) < 2


def test_windows_get_as_many_tokens_as_the_rows_need_or_the_ratio_says():
    case = WINDOWED | {"bytes_per_token": MIB // 32, "bytes_per_window_token": MIB // 32, "num_rows": 3}
    kept = 128 + 2 * 32 + 2  # window, slack on both ends, two pages
    assert plan(**case).window_tokens == 3 * kept + 256
    half = plan(**case, window_ratio=0.5)
    assert half.window_tokens == pytest.approx(0.5 * half.kv_tokens, rel=0.01)
    assert plan(**case, max_total_tokens=5000, window_ratio=0.3).window_tokens == 1500
    assert plan(**case, max_total_tokens=5000, window_ratio=0.01).window_tokens == kept + 256
    assert plan(**case).describe().split(", ")[-2] == (
        f"windows of 128 tokens: {3 * kept + 256} tokens × {MIB // 32} bytes in 0.03 GiB"
    )


def test_one_pool_serves_all_layers_where_two_are_no_better():
    case = WINDOWED | {"bytes_per_token": MIB, "bytes_per_window_token": MIB, "max_total_tokens": 300}
    one = plan(**case)
    assert (one.window, one.window_tokens, one.bytes_per_token, one.kv_bytes) == (0, 0, 2 * MIB, 301 * 2 * MIB)
    assert "windows" not in one.describe()


def test_a_model_of_windows_alone_has_all_the_memory_for_them():
    case = WINDOWED | {"bytes_per_token": 0, "bytes_per_window_token": MIB, "num_rows": 100}
    found = plan(**case)
    assert (found.kv_tokens, found.kv_bytes) == (100 * 4096, 0)
    assert found.window_tokens == 4 * 1024 - 1


def test_the_division_needs_no_torch():
    code = "import sys, baton.runtime.runner.memory_plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
