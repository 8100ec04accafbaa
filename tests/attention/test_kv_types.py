"""Torch's attention over pools of another type than the model's, against plain arithmetic on the same rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from baton.attention.backend import AttentionSpec
from baton.attention.double_sparse import DoubleSparseBackend, Sparsity, new_slots, score_labels
from baton.attention.probe import BEAMS, DECODE, EXTEND, LONG, ProbeScene, probe_backend
from baton.attention.torch_native import TorchNativeBackend
from baton.memory_pool.kv_rows import quantize, read_rows, select_rows, store_rows

CPU = torch.device("cpu")
FLOAT, BRAIN = torch.float32, torch.bfloat16
INT8, E4M3, E5M2 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2
SPECS = [
    AttentionSpec(0, 4, 2, 8, 0.3),
    AttentionSpec(0, 4, 1, 6, 0.3, sliding_window=40, value_dim=10, logit_cap=2.0, has_sinks=True),
]


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(FLOAT, INT8), (FLOAT, E4M3), (FLOAT, E5M2), (FLOAT, BRAIN), (BRAIN, INT8), (BRAIN, FLOAT)]
)
@pytest.mark.parametrize("page_size", [1, 64])
def test_torch_attention_reads_other_types(page_size: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    probe_backend(
        lambda pool, _: TorchNativeBackend(pool),
        SPECS,
        (DECODE, EXTEND, BEAMS, LONG),
        page_size=page_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=CPU,
    )


def test_probe_scenes_are_rounded_to_the_pool() -> None:
    """Or the probes would compare a kernel with numbers that are not in the pool."""
    plain, rounded = (
        ProbeScene(DECODE, SPECS[0], page_size=1, dtype=FLOAT, device=CPU, kv_dtype=t) for t in (None, INT8)
    )
    assert torch.equal(plain.q, rounded.q)
    difference = (plain.expected() - rounded.expected()).abs().max()
    assert 1e-4 < difference < 0.1


@pytest.mark.parametrize("kv_dtype", [INT8, E4M3])
def test_key_that_is_not_finite_reaches_those_that_see_it(kv_dtype: torch.dtype) -> None:
    scene = ProbeScene(DECODE, SPECS[0], page_size=1, dtype=FLOAT, device=CPU, kv_dtype=kv_dtype)
    slot = scene.batch.req_to_token[1, 70:71].long()
    bad = torch.ones(1, 2, 8)
    bad[0, 1, 3] = float("inf")
    store_rows(scene.pool.k[0], slot, bad)
    out = scene.run(TorchNativeBackend(scene.pool))
    found = out.isfinite().flatten(1).all(1)
    assert found.tolist() == [True, False, True, True, True]


@pytest.mark.parametrize("kv_dtype", [INT8, E5M2])
def test_labels_are_scaled(kv_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(50, 2, 8, generator=generator) * torch.logspace(-2, 2, 50)[:, None, None]
    k = quantize(keys, kv_dtype).view(kv_dtype)
    queries, slots = torch.randn(2, 3, 8, generator=generator), torch.randperm(50, generator=generator)[:30].int()
    read = read_rows(select_rows(k, slots), 8, FLOAT)
    expected = torch.einsum("hgc,nhc->hgn", queries[..., :5], read[..., :5])
    torch.testing.assert_close(score_labels(queries, k, slots, 5), expected)


@pytest.mark.parametrize("kv_dtype", [INT8, E4M3])
def test_sparse_decodes_put_numbers_in_order_and_leave_scales(kv_dtype: torch.dtype) -> None:
    """They attend as over a pool of floats with the same numbers."""
    spec, order = (
        SPECS[0],
        torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(h)) for h in range(2)]),
    )
    sparsity = Sparsity(channels=3, tokens=20, threshold=40, orders={0: order})
    rounded = ProbeScene(DECODE, spec, page_size=1, dtype=FLOAT, device=CPU, kv_dtype=kv_dtype)
    plain = ProbeScene(DECODE, spec, page_size=1, dtype=FLOAT, device=CPU)
    for part in ("k", "v"):
        getattr(plain.pool, part)[0].copy_(read_rows(getattr(rounded.pool, part)[0], 8, FLOAT))
    found = []
    for scene in (rounded, plain):
        batch = replace(scene.batch, decodes=np.ones(5, dtype=bool))
        new = new_slots(batch)
        old = torch.tensor(sorted(set(range(1, scene.pool.num_slots)) - set(new.tolist())))
        keys = scene.pool.layers.k[0]
        rows = keys[old]
        rows[..., :8] = rows[..., :8].gather(2, order.expand(len(old), -1, -1))  # as earlier steps would have
        keys[old] = rows
        backend = DoubleSparseBackend(scene.pool, TorchNativeBackend(scene.pool), sparsity)
        backend.plan(batch)
        found.append(backend.run(spec, scene.q))
    torch.testing.assert_close(*found)
    torch.testing.assert_close(read_rows(rounded.pool.k[0], 8, FLOAT), plain.pool.k[0])
