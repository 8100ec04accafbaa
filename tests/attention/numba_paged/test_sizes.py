"""The kernel with heads of all sizes, numbers of all types, and steps that are cut as they are in earnest."""

from __future__ import annotations

import pytest
import torch

from baton.attention.backend import AttentionSpec
from baton.attention.probe import BEAMS, DECODE, EXTEND, TOLERANCE, ProbeScene

pytest.importorskip("numba")

from baton.attention.numba_paged.backend import NumbaPagedBackend
from baton.attention.numba_paged.team import Team

FLOAT, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "head_dim"),
    # Two are of a size that test_whole_blocks compiles anyway.
    [(FLOAT, 1, 1, 1), (FLOAT, 4, 4, 20), (FLOAT, 14, 2, 32), (FLOAT, 3, 3, 128), (BRAIN, 4, 2, 64), (HALF, 8, 1, 72)],
)
def test_head_sizes_and_dtypes(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    spec = AttentionSpec(0, heads, kv_heads, head_dim, head_dim**-0.5)
    for step in (DECODE, EXTEND, BEAMS):
        scene = ProbeScene(step, spec, page_size=16, dtype=dtype, device=torch.device("cpu"))
        own = NumbaPagedBackend(scene.pool, [spec], team=Team())
        own.plan(scene.batch)
        found = own.run(spec, scene.q)
        assert found.dtype == dtype and found.is_contiguous()
        torch.testing.assert_close(found, scene.expected(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
