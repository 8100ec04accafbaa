"""K and V on their way to a pool of another type than the model's: torch's operation, and Numba's bit by bit."""

from __future__ import annotations

import pytest
import torch

from baton.memory_pool.kv_rows import LARGEST, quantize, row_items
from baton.runtime.layers.op_libraries import Trial, try_out
from baton.runtime.layers.ops import TORCH_OPS, OpShape

CPU = torch.device("cpu")
FLOAT, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16
QUANTIZED = list(LARGEST)
KV_HEADS = 2


def shape_of(head_dim: int, *, norms: bool = False) -> OpShape:
    return OpShape(96, 72, num_heads=4, num_kv_heads=KV_HEADS, head_dim=head_dim, qk_norm=norms, eps=1e-5)


def store(op, qkv: torch.Tensor, head_dim: int, kv_dtype: torch.dtype) -> list[torch.Tensor]:
    """K and V as bytes, from an operation that turns nothing."""
    tokens = len(qkv)
    table = torch.cat((torch.ones(16, head_dim // 2), torch.zeros(16, head_dim // 2)), 1).to(qkv.dtype)
    slots = torch.randperm(tokens, generator=torch.Generator().manual_seed(0)) + 1
    size = tokens + 1, KV_HEADS, row_items(head_dim, kv_dtype)
    pools = [torch.zeros(size, dtype=kv_dtype) for _ in range(2)]
    op(qkv.clone(), torch.arange(tokens) % 16, table, slots, *pools, None, 1e-5)
    return [pool.view(torch.uint8)[slots] for pool in pools]


def extreme_rows(head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """q, k and v of many magnitudes, and rows of zeros, NaN, infinity, the largest and the least numbers."""
    generator = torch.Generator().manual_seed(1)
    factors = torch.logspace(-35, 30, 60)[:, None] if dtype != HALF else torch.logspace(-6, 4, 60)[:, None]
    rows = (torch.randn(60, 8 * head_dim, generator=generator) * factors).to(dtype)
    k, v = 4 * head_dim, 6 * head_dim
    rows[3], rows[4, k + 1], rows[5, v + head_dim - 1], rows[6, v] = 0, torch.nan, torch.inf, -torch.inf
    rows[7], rows[8] = torch.finfo(dtype).max, -torch.finfo(dtype).tiny / 8
    return rows


@pytest.mark.parametrize("kv_dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("dtype", [FLOAT, BRAIN, HALF], ids=str)
def test_torch_stores_quantized_rows(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    rows = extreme_rows(6, dtype)
    heads = rows.unflatten(1, (8, 6))
    k, v = store(TORCH_OPS.rotate_and_store, rows, 6, kv_dtype)
    assert torch.equal(k, quantize(heads[:, 4:6], kv_dtype)) and torch.equal(v, quantize(heads[:, 6:], kv_dtype))


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn, BRAIN], ids=str)
def test_torch_op_passes_its_own_trial(kv_dtype: torch.dtype) -> None:
    trial = Trial(shape_of(64, norms=True), 5, FLOAT, kv_dtype=kv_dtype)
    assert try_out("rotate_and_store", TORCH_OPS.rotate_and_store, trial, CPU) is None

    def stores_half(qkv, *others):
        qkv[:, 6 * 64 :] /= 2
        return TORCH_OPS.rotate_and_store(qkv, *others)

    assert try_out("rotate_and_store", stores_half, trial, CPU) == "gives wrong numbers"


@pytest.mark.parametrize(
    ("head_dim", "dtype", "kv_dtype"),
    [
        (64, FLOAT, torch.int8),
        (64, FLOAT, torch.float8_e4m3fn),
        (64, BRAIN, torch.float8_e5m2),
        (22, BRAIN, torch.int8),
        (22, HALF, torch.float8_e4m3fn),
    ],
)
def test_numba_stores_the_same_bytes(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    pytest.importorskip("numba")
    from baton.attention.numba_paged.team import Team
    from baton.runtime.layers.numba_ops.operations import RotateAndStore

    kinds = (str(each).removeprefix("torch.") for each in (dtype, kv_dtype))
    op, rows = RotateAndStore(Team(), shape_of(head_dim), *kinds), extreme_rows(head_dim, dtype)
    found, expected = (store(each, rows, head_dim, kv_dtype) for each in (op, TORCH_OPS.rotate_and_store))
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    (v, alone) = found[1], [store(op, row[None], head_dim, kv_dtype)[1][0] for row in rows]
    assert torch.equal(v, torch.stack(alone)), "whatever step a token is in"


@pytest.mark.parametrize("kv_dtype", [torch.int8, FLOAT], ids=str)
def test_numba_op_passes_the_trial(kv_dtype: torch.dtype) -> None:
    pytest.importorskip("numba")
    from baton.attention.numba_paged.team import Team
    from baton.runtime.layers.numba_ops.operations import RotateAndStore

    shape = shape_of(64, norms=True)
    op = RotateAndStore(Team(), shape, "bfloat16", str(kv_dtype).removeprefix("torch."))
    assert try_out("rotate_and_store", op, Trial(shape, 19, BRAIN, kv_dtype=kv_dtype), CPU) is None
