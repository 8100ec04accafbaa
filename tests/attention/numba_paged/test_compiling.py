"""How kernels are compiled and kept."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("numba")

from baton.attention.numba_paged import compiling, kernel, operations, vectors
from baton.attention.numba_paged.compiling import checksum
from baton.attention.numba_paged.kernel import compile_kernel


def test_without_a_folder_to_write_to_it_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    compiles = compiling.cfunc

    def cfunc(signature: str, cache: bool = False) -> Any:
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return compiles(signature)

    monkeypatch.setattr(compiling, "cfunc", cfunc)
    assert compile_kernel.__wrapped__(16, 2, "float32").address > 0
    assert asked == [True, False]


def test_what_is_kept_depends_on_all_that_it_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba looks at the kernel's own file only."""
    before = checksum(operations, vectors)
    assert before == checksum(operations, vectors) and before
    monkeypatch.setattr(operations, "__file__", kernel.__file__)
    assert checksum(operations, vectors) != before
