"""The kernel of products with packed weights, compiled once for all tests of a process."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from baton.attention import processor
from baton.attention.numba_paged.team import Team
from baton.runtime.layers.products import BlockKernel


@cache
def kernel(dtype: torch.dtype) -> BlockKernel:
    """Skips the test without Numba, and where oneDNN packs nothing of this dtype, or in another way than for x86
    processors that multiply it."""
    pytest.importorskip("numba")
    if not processor.packs(dtype):
        pytest.skip(f"oneDNN packs no {dtype} on this processor")
    from baton.runtime.layers.numba_ops.blocks import BlockProducts, UnknownBlocksError

    try:
        return BlockProducts(Team(), dtype)
    except UnknownBlocksError as error:
        if processor.is_x86() and processor.multiplies(dtype):
            raise
        pytest.skip(str(error))
