"""What the processor can do that code is made for."""

from __future__ import annotations

import pytest

pytest.importorskip("numba")

from numba.core import config

from baton.attention import processor
from baton.attention.numba_paged import vectors


def test_features_follow_numba_target_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "features", lambda: frozenset({"avx2", "avx512_bf16"}))
    for name, features, found in (
        (None, None, [True, True]),
        ("haswell", None, [False, False]),
        ("haswell", "+avx2,-avx512bf16", [True, False]),
    ):
        monkeypatch.setattr(config, "CPU_NAME", name, raising=False)
        monkeypatch.setattr(config, "CPU_FEATURES", features, raising=False)
        assert [vectors.has("avx2"), vectors.has("avx512_bf16")] == found
