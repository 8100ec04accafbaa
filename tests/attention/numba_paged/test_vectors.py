"""What the processor can do that code is made for."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from numba import njit

from baton.attention import processor
from baton.attention.numba_paged import target, vectors
from baton.attention.numba_paged.operations import soften


def test_features_follow_numba_target_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "features", lambda: frozenset({"avx2", "avx512_bf16"}))
    for name, features, found in (
        (None, None, [True, True]),
        ("haswell", None, [False, False]),
        ("haswell", "+avx2,-avx512bf16", [True, False]),
    ):
        for variable, value in ((target.CPU_NAME, name), (target.CPU_FEATURES, features)):
            if value is None:
                monkeypatch.delenv(variable, raising=False)
            else:
                monkeypatch.setenv(variable, value)
        assert [target.has("avx2"), target.has("avx512_bf16")] == found


def test_tanh_is_right_to_a_few_last_digits() -> None:
    """The error is relative to the value, not to 1: small scores under a large cap must not change."""
    x = np.concatenate([np.linspace(-40, 40, 100_001), np.geomspace(1e-30, 40, 50_001), [0.0, np.inf]])
    x = np.resize(x.astype(np.float32), -(-len(x) // vectors.LANES) * vectors.LANES)
    found = _tanh(x)
    expected = np.tanh(x.astype(np.float64))
    assert (np.abs(found - expected) <= 3e-7 * np.abs(expected)).all()
    assert np.abs(found).max() == 1.0 and (np.signbit(found) == np.signbit(x)).all()
    x[5] = np.nan
    assert (np.isnan(_tanh(x)) == np.isnan(x)).all()


def _tanh(x: np.ndarray) -> np.ndarray:
    """By the kernel's `soften`, block by block."""
    found = x.copy()
    _soften_all(found.ctypes.data, len(found))
    return found


@njit
def _soften_all(address, count):  # type: ignore
    soften(1, 1, address, count, np.float32(1.0))
