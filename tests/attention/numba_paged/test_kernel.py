"""The sizes of what the kernel works in."""

from __future__ import annotations

import pytest

pytest.importorskip("numba")

from baton.attention.numba_paged.kernel import BLOCK, scratch_bytes, tile_tokens


@pytest.mark.parametrize(("group", "tokens"), [(1, 4), (2, 2), (3, 1), (7, 1)])
def test_tile_and_scratch_sizes(group: int, tokens: int) -> None:
    assert tile_tokens(group) == tokens
    assert scratch_bytes(64, 64, group, 64) >= 4 * (64 * group * 66 + tokens * group * 65 + 64 * 64)
    assert scratch_bytes(64, 96, group, 64) - scratch_bytes(64, 64, group, 64) == 4 * 32 * (64 * group + BLOCK)
