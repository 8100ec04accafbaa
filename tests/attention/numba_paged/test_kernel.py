"""How the kernel is compiled and kept."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("numba")

from baton.attention.numba_paged import kernel, operations
from baton.attention.numba_paged.kernel import compile_kernel, scratch_bytes, tile_tokens


def test_without_a_folder_to_write_to_it_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    compiles = kernel.cfunc

    def cfunc(signature: str, cache: bool = False) -> Any:
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return compiles(signature)

    monkeypatch.setattr(kernel, "cfunc", cfunc)
    assert compile_kernel.__wrapped__(16, 2, "float32").address > 0
    assert asked == [True, False]


def test_what_is_kept_depends_on_all_that_it_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba looks at the kernel's own file only."""
    before = kernel._sources()
    assert before == kernel._sources() and before
    monkeypatch.setattr(operations, "__file__", kernel.__file__)
    assert kernel._sources() != before


@pytest.mark.parametrize(("group", "tokens"), [(1, 4), (2, 2), (3, 1), (7, 1)])
def test_rows_that_are_multiplied_at_a_time(group: int, tokens: int) -> None:
    assert tile_tokens(group) == tokens
    assert scratch_bytes(64, group, 64) >= 4 * (64 * group * 66 + tokens * group * 65 + 64 * 64)
