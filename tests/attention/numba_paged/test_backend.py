"""The kernel against a loop over every query, and against torch's backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.attention.backend import AttentionBatch, SharedPrefix
from tests.doubles.attention_scene import Scene

pytest.importorskip("numba")

from baton.attention.numba_paged import backend, pieces
from baton.attention.numba_paged.backend import NumbaPagedBackend
from baton.attention.numba_paged.team import Team

SHAPES = {
    "decode, equal lengths": [(20, 1)] * 5,
    "decode, ragged": [(0, 1), (3, 1), (90, 1), (17, 1), (18, 1), (19, 1)],
    "decode, one sequence": [(40, 1)],
    "decode, borders of blocks": [(63, 1), (64, 1), (65, 1), (127, 1), (128, 1), (129, 1)],
    "decode, long beside short": [(600, 1), (2, 1), (3, 1), (500, 1)],
    "a long prefill alone": [(0, 61)],
    "short extends over prefixes": [(40, 3), (41, 2), (38, 3), (7, 1)],
    "an extend over a long prefix": [(600, 20)],
    "padding": [(12, 1), (0, 0), (9, 1)],
    "all at once": [(0, 70), (25, 1), (100, 30), (5, 4), (6, 4), (0, 2), (200, 40)],
}


@pytest.fixture(autouse=True, params=[1, 2, 3], ids="threads={}".format)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """With several, work is cut into many parts that are joined."""
    monkeypatch.setattr(backend, "ONE_THREAD", 0)
    monkeypatch.setattr(backend, "LEAST_SHARED_KEYS", 0)
    monkeypatch.setattr(pieces, "LEAST_WORK", 8)
    monkeypatch.setattr(pieces, "PART_KEYS", 16)
    monkeypatch.setattr(pieces, "TOKENS_AT_ONCE", 7)
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    return request.param


def test_queries_may_be_slices_of_fused_qkv() -> None:
    """As they are in a fused product for queries, keys and values."""
    scene = Scene(SHAPES["all at once"])
    heads, head_dim = scene.q.shape[1:]
    wide = torch.full((len(scene.q), 3 * heads * head_dim), float("nan"))
    wide[:, : heads * head_dim] = scene.q.flatten(1)
    scene.q = wide[:, : heads * head_dim].view(-1, heads, head_dim)
    check(scene)


def test_nan_stays_visible() -> None:
    """A broken model must not give answers that look right."""
    scene = Scene([(90, 1), (30, 1), (40, 3)])
    row = scene.rows[0]
    scene.pool.k[0][int(scene.req_to_token[row, 70])] = float("nan")
    found = scene.run(NumbaPagedBackend(scene.pool, [scene.spec], team=Team()))
    assert found[0].isnan().all() and not found[1:].isnan().any()


def test_large_scores_do_not_overflow() -> None:
    scene = Scene([(90, 1), (200, 3)])
    scene.q *= 1e4
    check(scene)


def test_reused_scratch_does_not_affect_later_steps() -> None:
    """Memory is kept from step to step, and nothing of what was in it."""
    scene = Scene([(600, 1)] * 3)
    one = NumbaPagedBackend(scene.pool, [scene.spec], team=Team())
    first = scene.run(one)
    other = scene.batch()
    one.plan(AttentionBatch(other.req_to_token, other.host_rows[:1], other.prefix_lens[:1], other.extend_lens[:1], 4))
    torch.testing.assert_close(one.run(scene.spec, scene.q[:1]), first[:1])
    assert torch.equal(scene.run(one), first), "pieces are joined in the same order, whichever thread was last"


def test_numba_run_before_plan_raises() -> None:
    scene = Scene([(3, 1)])
    with pytest.raises(RuntimeError, match="call plan"):
        NumbaPagedBackend(scene.pool, [scene.spec], team=Team()).run(scene.spec, scene.q)


def check(scene: Scene) -> None:
    found = scene.run(NumbaPagedBackend(scene.pool, [scene.spec], team=Team()))
    expected = scene.expected()
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5, msg=lambda m: f"{m}\nseed {scene.seed}")


@pytest.mark.parametrize("window", [None, 1, 7, 30])
@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES.keys())
def test_shapes(lengths, window) -> None:
    check(Scene(lengths, window=window))


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 9))
    prefixes = rng.integers(0, 120, count)
    news = np.where(rng.random(count) < 0.5, rng.integers(1, 4, count), rng.integers(1, 60, count))
    window = None if rng.random() < 0.5 else int(rng.integers(1, 100))
    lengths = list(zip(prefixes.tolist(), news.tolist(), strict=True))
    check(Scene(lengths, window=window, seed=seed, page_size=int(rng.choice([1, 4]))))


@pytest.mark.parametrize("window", [None, 1, 20, 64])
@pytest.mark.parametrize("count", [2, 5, 30])
def test_beams_with_shared_prefix_match_reference(count: int, window: int | None) -> None:
    lengths = [(5, 1), *[(66, 1)] * count, (9, 4)]
    check(Scene(lengths, window=window, shared=(SharedPrefix(1, count, 60),)))
