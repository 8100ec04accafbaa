"""The backend against a loop over every query, on ragged batches with scattered slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.attention import torch_native
from baton.attention.backend import SharedPrefix
from baton.attention.torch_native import TorchNativeBackend
from baton.memory_pool.kv_pool import MHAKVPool, uniform_shapes
from tests.doubles.attention_scene import CPU, HEAD_DIM, Scene


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Borders between blocks and tiles come up with few tokens."""
    monkeypatch.setattr(torch_native, "BLOCK_ROWS", 16)
    monkeypatch.setattr(torch_native, "TILE_KEYS", 96)
    monkeypatch.setattr(torch_native, "SCORES", 4 * 3 * 50)
    monkeypatch.setattr(torch_native, "MIN_SAVED_KEYS", 0)


SHAPES = {
    "decode, equal lengths": [(20, 1)] * 5,
    "decode, ragged": [(0, 1), (3, 1), (90, 1), (17, 1), (18, 1), (19, 1)],
    "decode, one sequence": [(40, 1)],
    "one prefill of many blocks": [(0, 61)],
    "prefill of exactly one block": [(0, 8)],
    "one token over a block": [(0, 9)],
    "chunk over a prefix": [(33, 50)],
    "short extends over prefixes": [(40, 3), (41, 2), (38, 3), (7, 1)],
    "all at once": [(0, 70), (25, 1), (100, 30), (5, 4), (6, 4), (0, 2)],
}


@pytest.mark.parametrize("window", [None, 1, 7, 30])
@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES.keys())
def test_shapes(lengths, window):
    Scene(lengths, window=window).check()


KINDS = {"cap": {"logit_cap": 0.7}, "sinks": {"has_sinks": True}, "narrow values": {"value_dim": 4}}
KINDS["all"] = KINDS["cap"] | KINDS["sinks"] | {"value_dim": 12}


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_caps_sinks_and_value_widths(lengths, window, kind):
    Scene(lengths, window=window, heads=6, kv_heads=2, **kind).check()


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("chunk", [1, 8, 20, 64])
@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES.keys())
def test_chunks(lengths, chunk, window):
    """Llama 4: nothing of an earlier chunk is seen."""
    Scene(lengths, chunk=chunk, window=window).check()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES.keys())
def test_values_in_keys(lengths, page_size):
    """Latent attention: all heads read one key, and a part of it as the value."""
    Scene(lengths, heads=6, kv_heads=1, head_dim=12, value_dim=8, values_in_keys=True, page_size=page_size).check()


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (8, 1)])
def test_head_groups(heads, kv_heads):
    Scene(SHAPES["all at once"], heads=heads, kv_heads=kv_heads).check()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("layout", ["scattered", "ascending", "descending"])
def test_slot_layouts(page_size, layout):
    Scene(SHAPES["all at once"], page_size=page_size, layout=layout, window=20).check()


@pytest.mark.parametrize("lengths", [[(12, 1)], [(12, 5)], [(12, 40)]], ids=["decode", "short extend", "long extend"])
@pytest.mark.parametrize("layout", ["ascending", "descending"])
def test_contiguous_slots_are_viewed_only_in_order(lengths, layout):
    """A decode may read a shuffled run as it lies; several queries may not."""
    Scene(lengths, layout=layout).check()


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 9))
    prefixes = rng.integers(0, 120, count)
    news = np.where(rng.random(count) < 0.5, rng.integers(1, 4, count), rng.integers(1, 60, count))
    window = None if rng.random() < 0.5 else int(rng.integers(1, 100))
    lengths = list(zip(prefixes.tolist(), news.tolist(), strict=True))
    Scene(lengths, window=window, seed=seed, page_size=int(rng.choice([1, 4]))).check()


@pytest.fixture
def attended(monkeypatch) -> list[int]:
    """How many sequences each call attended over one prefix."""
    counts = []
    attend = torch_native.attend_shared

    def counting(spec, tile, *args) -> None:
        counts.append(tile.count)
        attend(spec, tile, *args)

    monkeypatch.setattr(torch_native, "attend_shared", counting)
    return counts


@pytest.mark.parametrize("layout", ["scattered", "ascending", "descending"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (8, 1)])
def test_beams_over_one_prefix(attended, heads, kv_heads, layout):
    """Two searches among ordinary sequences; slots that only the others' copies of the prefix had hold NaN."""
    lengths = [(30, 1), *[(50, 1)] * 7, (3, 1), *[(20, 1)] * 2]
    groups = (SharedPrefix(1, 7, 44), SharedPrefix(9, 2, 20))
    Scene(lengths, heads=heads, kv_heads=kv_heads, layout=layout, shared=groups).check()
    assert attended == [7, 2]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_beams_with_caps_sinks_and_value_widths(attended, kind):
    Scene([(50, 1)] * 5, heads=6, kv_heads=2, shared=(SharedPrefix(0, 5, 44),), **kind).check()
    assert attended == [5]


@pytest.mark.parametrize("layout", ["scattered", "ascending"])
def test_beams_with_values_in_keys(attended, layout):
    latent = {"heads": 6, "kv_heads": 1, "head_dim": 12, "value_dim": 8, "values_in_keys": True}
    Scene([(30, 1), *[(50, 1)] * 5], layout=layout, shared=(SharedPrefix(1, 5, 44),), **latent).check()
    assert attended == [5]


def test_prefix_is_shared_in_batch_with_extends(attended):
    Scene([(0, 33), *[(40, 1)] * 4, (12, 5)], shared=(SharedPrefix(1, 4, 32),)).check()
    assert attended == [4]


@pytest.mark.parametrize(("window", "expected"), [(60, [3]), (51, [3]), (50, []), (7, [])])
def test_window_cutting_prefix_disables_sharing(attended, window, expected):
    Scene([(50, 1)] * 3 + [(9, 1)], window=window, shared=(SharedPrefix(0, 3, 40),)).check()
    assert attended == expected


@pytest.mark.parametrize(("chunk", "expected"), [(51, [3]), (50, []), (32, [])])
def test_chunk_border_in_prefix_disables_sharing(attended, chunk, expected):
    """Position 50 is in the first chunk, or alone in the second."""
    Scene([(50, 1)] * 3 + [(9, 1)], chunk=chunk, shared=(SharedPrefix(0, 3, 40),)).check()
    assert attended == expected


def test_short_prefix_is_not_shared(attended, monkeypatch):
    monkeypatch.setattr(torch_native, "MIN_SAVED_KEYS", 81)
    scene = Scene([(50, 1)] * 3, shared=(SharedPrefix(0, 3, 40),))
    scene.check()
    assert attended == []


@pytest.mark.parametrize("seed", range(20))
def test_random_batches_with_searches(seed):
    rng = np.random.default_rng(seed)
    lengths: list[tuple[int, int]] = []
    groups = []
    for _ in range(int(rng.integers(1, 6))):
        if rng.random() < 0.3:
            lengths.append((int(rng.integers(0, 120)), int(rng.choice([1, 1, 20]))))
            continue
        prefix, count = int(rng.integers(1, 150)), int(rng.integers(2, 12))
        groups.append(SharedPrefix(len(lengths), count, int(rng.integers(1, prefix + 1))))
        lengths += [(prefix, 1)] * count
    kv_heads, group = rng.choice([1, 2, 3], 2).tolist()
    window = None if rng.random() < 0.7 else int(rng.integers(1, 200))
    options = {"heads": kv_heads * group, "kv_heads": kv_heads, "page_size": int(rng.choice([1, 4]))}
    Scene(lengths, seed=seed, window=window, shared=tuple(groups), **options).check()


def test_half_precision_prefix_sharing_is_as_exact_as_plain_path():
    scene = Scene([(300, 1)] * 4, shared=(SharedPrefix(0, 4, 290),))
    expected = scene.expected()
    pool = MHAKVPool(
        num_tokens=scene.pool.num_tokens,
        page_size=1,
        shapes=uniform_shapes(1, 2, HEAD_DIM),
        dtype=torch.bfloat16,
        device=CPU,
    )
    pool.k[0].copy_(scene.pool.k[0])
    pool.v[0].copy_(scene.pool.v[0])
    scene.pool, scene.q = pool, scene.q.bfloat16()
    scene.k, scene.v = [k.bfloat16() for k in scene.k], [v.bfloat16() for v in scene.v]
    shared = scene.run()
    scene.shared = []
    plain = scene.run()
    assert shared.dtype == torch.bfloat16
    assert (shared - expected).abs().max() <= 1.5 * (plain - expected).abs().max()


def test_masks_are_reused_between_steps_and_grow():
    scene = Scene([(0, 40)])
    backend = TorchNativeBackend(scene.pool)
    for lengths in ([(0, 40)], [(500, 40)], [(3, 17), (2, 1)]):
        for window in (None, 5):
            scene = Scene(lengths, window=window)
            backend._pool = scene.pool
            torch.testing.assert_close(scene.run(backend), scene.expected(), atol=2e-6, rtol=1e-5)


def test_long_prefill_masks_are_banded(monkeypatch):
    """No mask is larger than BLOCK_ROWS x n, though there are n x n scores."""
    monkeypatch.setattr(torch_native, "BLOCK_ROWS", 256)
    scene = Scene([(0, 600)])
    backend = TorchNativeBackend(scene.pool)
    scene.run(backend)
    assert {band.shape[0] for band in backend._bands.values()} == {256}


def test_layers_with_different_windows_share_a_step():
    scene = Scene(SHAPES["all at once"])
    backend = TorchNativeBackend(scene.pool)
    full = scene.run(backend)
    narrow = Scene(SHAPES["all at once"], window=6)
    torch.testing.assert_close(backend.run(narrow.spec, scene.q), narrow.expected(), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(backend.run(scene.spec, scene.q), full)


def test_run_before_plan_raises_an_error():
    scene = Scene([(0, 1)])
    with pytest.raises(RuntimeError, match="plan"):
        TorchNativeBackend(scene.pool).run(scene.spec, scene.q)
