"""The kernels over pools of another type than the model's."""

from __future__ import annotations

import pytest
import torch

from baton.attention.backend import AttentionSpec
from baton.attention.probe import BEAMS, DECODE, EXTEND, LONG, ProbeScene, ProbeStep, probe_backend
from baton.memory_pool.kv_rows import store_rows

pytest.importorskip("numba")

from baton.attention.numba_paged.backend import ANY_EXTEND, NumbaPagedBackend
from baton.attention.numba_paged.label_scores import LabelScores
from baton.attention.numba_paged.library import load_attention
from baton.attention.numba_paged.team import Team

CPU = torch.device("cpu")
FLOAT, BRAIN = torch.float32, torch.bfloat16
INT8, E4M3, E5M2 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2
USUAL = AttentionSpec(0, 4, 2, 64, 0.125)
ODD = AttentionSpec(0, 6, 2, 22, 0.3, sliding_window=70, value_dim=37, logit_cap=3.0, has_sinks=True)
"""Keys and values end within a vector, and their scales behind padding."""
STEPS = (DECODE, EXTEND, BEAMS, LONG)


def open_kernels(pool, specs) -> NumbaPagedBackend:
    return NumbaPagedBackend(pool, specs, team=Team(), longest_extend=ANY_EXTEND)


@pytest.mark.parametrize(
    ("spec", "dtype", "kv_dtype"),
    [(USUAL, FLOAT, INT8), (USUAL, FLOAT, E4M3), (USUAL, BRAIN, E5M2), (ODD, FLOAT, INT8), (USUAL, FLOAT, BRAIN)],
)
def test_kernels_read_other_types(spec: AttentionSpec, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    where = {"dtype": dtype, "kv_dtype": kv_dtype, "device": CPU}
    probe_backend(open_kernels, [spec], STEPS, page_size=16, **where)
    scene = ProbeScene(DECODE, spec, page_size=1, **where)
    own = open_kernels(scene.pool, [spec])
    assert scene.run(own).dtype == dtype


@pytest.mark.parametrize("kv_dtype", [INT8, E4M3])
@pytest.mark.parametrize("magnitude", [1e-6, 3e4])
def test_scales_of_all_magnitudes(kv_dtype: torch.dtype, magnitude: float) -> None:
    """Values of one sequence that are a million times those of another, and keys whose scores are not: a scale that is
    taken from another row, or for the wrong head, is seen."""
    scene = ProbeScene(LONG, USUAL, page_size=1, dtype=FLOAT, device=CPU, kv_dtype=kv_dtype)
    generator = torch.Generator().manual_seed(1)
    slots = torch.arange(len(scene.pool.v[0]))
    factors = 10 ** (4 * torch.rand(len(slots), 2, 1, generator=generator)) * magnitude
    store_rows(scene.pool.v[0], slots, torch.randn(len(slots), 2, 64, generator=generator) * factors)
    store_rows(scene.pool.k[0], slots, torch.randn(len(slots), 2, 64, generator=generator) * factors.log10() / 5)
    found, expected = scene.run(open_kernels(scene.pool, [USUAL])), scene.expected()
    torch.testing.assert_close(found / magnitude, expected / magnitude, atol=2e-2, rtol=1e-3)


@pytest.mark.parametrize("kv_dtype", [INT8, E4M3])
def test_row_that_is_not_finite_reaches_those_that_see_it(kv_dtype: torch.dtype) -> None:
    for part in ("k", "v"):
        scene = ProbeScene(DECODE, USUAL, page_size=1, dtype=FLOAT, device=CPU, kv_dtype=kv_dtype)
        slot = scene.batch.req_to_token[1, 70:71].long()
        bad = torch.ones(1, 2, 64)
        bad[0, 0, 5] = float("nan")
        store_rows(getattr(scene.pool, part)[0], slot, bad)
        found = scene.run(open_kernels(scene.pool, [USUAL])).isfinite().flatten(1).all(1)
        assert found.tolist() == [True, False, True, True, True]


@pytest.mark.parametrize("kv_dtype", [INT8, E4M3])
def test_label_scores(kv_dtype: torch.dtype) -> None:
    LabelScores(Team()).probe(AttentionSpec(0, 4, 2, 22, 1.0), 9, FLOAT, kv_dtype)


def test_loading_probes_the_type_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def probe(make, specs, steps, **where) -> None:
        seen.append(where["kv_dtype"])

    monkeypatch.setattr("baton.attention.numba_paged.library.probe_backend", probe)
    make = load_attention([USUAL], team=Team(), page_size=1, dtype=FLOAT, device=CPU, kv_dtype=INT8)
    assert seen == [INT8, INT8]
    scene = ProbeScene(ProbeStep("one", ((9, 1),)), USUAL, page_size=1, dtype=FLOAT, device=CPU, kv_dtype=INT8)
    torch.testing.assert_close(scene.run(make(scene.pool, [USUAL])), scene.expected(), atol=1e-5, rtol=1e-5)
