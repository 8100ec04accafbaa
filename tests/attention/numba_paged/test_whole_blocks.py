"""Prompts whose tokens are attended several at once, block by block, against a loop over every query."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from baton.attention.backend import AttentionBatch, SharedPrefix
from tests.doubles.attention_scene import Scene

pytest.importorskip("numba")

from baton.attention.numba_paged import backend, pieces, vectors
from baton.attention.numba_paged.backend import NumbaPagedBackend
from baton.attention.numba_paged.team import Team

FLOAT, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16

TOLERANCE = {FLOAT: 5e-6, BRAIN: 1e-2, HALF: 2e-3}
"""For outputs of about 1: bfloat16 has 8 bits, and weights are rounded as well as the outputs."""

SIZES = {FLOAT: [(2, 2, 64), (1, 3, 48)], BRAIN: [(2, 2, 64), (7, 1, 32), (5, 1, 16)], HALF: [(2, 2, 64)]}
"""Query heads per KV head, KV heads and head size. Each takes three seconds to compile, for each type of number."""
SLOW_SIZES = {FLOAT: [(7, 1, 32), (5, 1, 16)], BRAIN: [(1, 3, 48)]}


@pytest.fixture(autouse=True, params=[1, 2], ids="threads={}".format)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "ONE_THREAD", 0)
    monkeypatch.setattr(pieces, "LEAST_WORK", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)


def check(scene: Scene, tolerance: float = 0.0) -> None:
    found = scene.run(NumbaPagedBackend(scene.pool, [scene.spec], team=Team(), longest_extend=backend.ANY_EXTEND))
    tolerance = tolerance or TOLERANCE[scene.q.dtype]
    message = f"seed {scene.seed}, {scene.spec}"
    torch.testing.assert_close(
        found.float(), scene.expected(), atol=tolerance, rtol=tolerance, msg=lambda text: f"{text}\n{message}"
    )


@pytest.mark.parametrize("window", [None, 50, 200])
@pytest.mark.parametrize(
    ("dtype", "group", "kv_heads", "head_dim"),
    [
        *((dtype, *size) for dtype, sizes in SIZES.items() for size in sizes),
        *(pytest.param(dtype, *size, marks=pytest.mark.slow) for dtype, sizes in SLOW_SIZES.items() for size in sizes),
    ],
)
def test_sizes(group: int, kv_heads: int, head_dim: int, dtype: torch.dtype, window: int | None) -> None:
    """A head of 48 or 16 numbers does not fill vectors of pairs."""
    heads = group * kv_heads
    lengths = [(0, 200), (37, 90), (500, 1), (300, 66), (64, 64), (5, 3)]
    check(Scene(lengths, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, window=window, seed=head_dim))


@pytest.mark.parametrize("dtype", [FLOAT, BRAIN], ids=str)
def test_random_batches(dtype: torch.dtype) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    for _ in range(6):
        lengths = [(rng.randrange(400), rng.choice((1, 2, 5, 40, 150))) for _ in range(rng.randrange(1, 5))]
        group, _, head_dim = rng.choice(SIZES[dtype])
        kv_heads, window, page_size = rng.choice((1, 2)), rng.choice((None, None, 70)), rng.choice((1, 16))
        shape: dict[str, Any] = {"heads": group * kv_heads, "kv_heads": kv_heads, "head_dim": head_dim}
        check(Scene(lengths, **shape, page_size=page_size, dtype=dtype, window=window, seed=seed))


@pytest.mark.parametrize("dtype", [FLOAT, BRAIN], ids=str)
def test_beams_over_a_long_prefix(dtype: torch.dtype) -> None:
    check(Scene([(9, 1), *[(330, 1)] * 12, (70, 70)], shared=(SharedPrefix(1, 12, 320),), head_dim=64, dtype=dtype))


@pytest.mark.parametrize("dtype", [FLOAT, BRAIN], ids=str)
def test_extreme_scores_stay_accurate(dtype: torch.dtype) -> None:
    """One key is all that counts, or the largest comes last, or all are far below 0."""
    for factor in (1e4, -3e3, 1e-4):
        scene = Scene([(130, 100)], head_dim=64, dtype=dtype, seed=3)
        scene.q *= factor
        check(scene, tolerance=1e-2)  # a float32 of 10⁵ is right to 0.004


@pytest.mark.parametrize("dtype", [FLOAT, BRAIN], ids=str)
def test_nan_stays_visible(dtype: torch.dtype) -> None:
    scene = Scene([(200, 70), (90, 80)], head_dim=64, dtype=dtype)
    scene.pool.k[0][int(scene.req_to_token[scene.rows[0], 70])] = float("nan")
    found = scene.run(NumbaPagedBackend(scene.pool, [scene.spec], team=Team(), longest_extend=backend.ANY_EXTEND))
    assert found[:70].isnan().all() and not found[70:].isnan().any()


@pytest.mark.skipif(not vectors.HAS_PAIRS, reason="this processor multiplies no pairs of bfloat16")
def test_bfloat16_weight_rounding_preserves_constant_values() -> None:
    """Where every value is the same, so is every output: the weights' rounding does not show in their sum."""
    scene = Scene([(0, 256)], head_dim=64, dtype=BRAIN)
    scene.pool.v[0][:] = 1.0
    found = scene.run(NumbaPagedBackend(scene.pool, [scene.spec], team=Team(), longest_extend=backend.ANY_EXTEND))
    assert (found.float() - 1).abs().max() <= 2**-8


@pytest.mark.parametrize("dtype", [FLOAT, BRAIN], ids=str)
def test_prompt_tokens_match_single_token_extends(dtype: torch.dtype) -> None:
    """Else guesses that are verified together, or another chunk size, would lead to other answers."""
    scene = Scene([(290, 40)], head_dim=64, dtype=dtype)
    one = NumbaPagedBackend(scene.pool, [scene.spec], team=Team(), longest_extend=backend.ANY_EXTEND)
    together, whole = scene.run(one), scene.batch()
    alone = []
    for token in range(40):
        lens = np.array([290 + token], np.int32), np.array([1], np.int32)
        one.plan(AttentionBatch(whole.req_to_token, whole.host_rows, *lens, whole.pad_row))
        alone.append(one.run(scene.spec, scene.q[token : token + 1]))
    found = torch.cat(alone)
    if dtype == FLOAT:
        torch.testing.assert_close(found, together, atol=1e-6, rtol=1e-6)
    else:
        assert (found != together).float().mean() < 0.002, "they differ in more than last digits that rounding shows"
