"""What the processor can do that code is made for."""

from __future__ import annotations

import pytest

pytest.importorskip("numba")

from numba.core import config

from baton.attention.numba_paged import vectors


def test_the_processor_is_the_one_that_numba_compiles_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "get_host_cpu_features", lambda: {"avx2": True, "avx512bf16": True})
    for name, features, found in (
        (None, None, [True, True]),
        ("haswell", None, [False, False]),
        ("haswell", "+avx2,-avx512bf16", [True, False]),
    ):
        monkeypatch.setattr(config, "CPU_NAME", name, raising=False)
        monkeypatch.setattr(config, "CPU_FEATURES", features, raising=False)
        assert [vectors.has("avx2"), vectors.has("avx512bf16")] == found
