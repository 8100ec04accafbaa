"""FlashInfer's backend over a double of the library: every array it plans with, against a loop over the queries."""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np
import pytest
import torch

from baton.attention.backend import AttentionBatch, GraphKind, GraphShape, SharedPrefix
from baton.attention.flashinfer import backend as flashinfer
from baton.attention.flashinfer import kernel
from baton.attention.flashinfer.backend import FlashInferBackend
from baton.attention.flashinfer.library import build_kv_indices
from baton.attention.torch_native import TorchNativeBackend
from tests.doubles.attention_scene import Scene
from tests.doubles.fake_flashinfer import FakeFlashInfer

DECODE = [(5, 1), (64, 1), (0, 1), (130, 1), (33, 1)]
EXTEND = [(5, 3), (64, 1), (0, 17), (130, 9)]
LONG = [(0, 200), (40, 150)]
BEAMS = [(20, 1), *[(70, 1)] * 4, (31, 1), *[(40, 1)] * 3]


def groups(page_size: int) -> tuple[SharedPrefix, ...]:
    """Beams share whole pages."""
    shared = [
        SharedPrefix(first, count, length // page_size * page_size) for first, count, length in ((1, 4, 66), (6, 3, 33))
    ]
    return tuple(group for group in shared if group.length)


@pytest.fixture(autouse=True)
def small_workspaces(monkeypatch):
    monkeypatch.setattr(kernel, "WORKSPACE_BYTES", 1 << 10)
    monkeypatch.setattr(kernel, "INT_WORKSPACE_BYTES", 1 << 10)


def make_backend(scene: Scene, fake: FakeFlashInfer | None = None, **options) -> FlashInferBackend:
    library = (fake or FakeFlashInfer()).library
    return FlashInferBackend(scene.pool, [scene.spec], library, build_kv_indices, max_graph_pages=4096, **options)


def check(found: torch.Tensor, scene: Scene) -> None:
    torch.testing.assert_close(found, scene.expected(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("lengths", [DECODE, EXTEND, LONG], ids=["decode", "extend", "long"])
def test_every_step_reads_the_right_pages(lengths, page_size, window):
    scene = Scene(lengths, page_size=page_size, window=window)
    check(scene.run(make_backend(scene)), scene)


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (8, 1)])
def test_group_sizes(heads, kv_heads):
    scene = Scene(EXTEND, heads=heads, kv_heads=kv_heads)
    check(scene.run(make_backend(scene)), scene)


def test_queries_may_be_strided():
    """They are a part of the fused projection."""
    scene = Scene(EXTEND)
    plain = scene.run(make_backend(scene))
    tokens, heads, head_dim = scene.q.shape
    scene.q = torch.cat([scene.q, torch.randn(tokens, 2, head_dim)], dim=1)[:, :heads]
    assert not scene.q.is_contiguous()
    torch.testing.assert_close(scene.run(make_backend(scene)), plain)


def test_long_extends_use_fa3_when_available():
    for lengths, has_fa3, expected in ((LONG, True, "fa3"), (LONG, False, "fa2"), (EXTEND, True, "fa2")):
        fake = FakeFlashInfer(has_fa3=has_fa3)
        scene = Scene(lengths)
        scene.run(make_backend(scene, fake))
        assert [call[2]["backend"] for call in fake.calls if call[0] == "prefill.__init__"] == [expected]


# -- shared prefixes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 50, 80])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_beams_read_their_prefix_once(page_size, window, monkeypatch):
    """One that a window hides in part is read by each beam."""
    monkeypatch.setattr(flashinfer, "SHARED_KEYS", 1)
    scene = Scene(BEAMS, page_size=page_size, window=window, shared=groups(page_size))
    fake = FakeFlashInfer()
    check(scene.run(make_backend(scene, fake)), scene)
    prefill = next(call for call in fake.calls if call[0] == "prefill.plan")
    # Rows that are in no group stand together.
    every, late = ([1, 4, 4], [9]) if page_size == 64 else ([1, 4, 1, 3], [6, 3])
    assert prefill[1][1].diff().tolist() == (late if window == 50 else every)  # 71 positions do not fit, 41 do


def test_few_beams_are_attended_without_prefix_sharing():
    scene = Scene(BEAMS, shared=groups(1))
    fake = FakeFlashInfer()
    check(scene.run(make_backend(scene, fake)), scene)
    assert not fake.used("merge_state_in_place") and not fake.used("prefill.plan")


# -- graphs ------------------------------------------------------------------------------------------------------------


def pad(batch: AttentionBatch, shape: GraphShape) -> AttentionBatch:
    from baton.runtime.runner.forward_batch import pad_attention

    return pad_attention(batch, shape)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(
    "shape", [GraphShape(GraphKind.DECODE, 8, 8), GraphShape(GraphKind.EXTEND, 48, 12)], ids=["decode", "extend"]
)
def test_graph_replays_any_step_of_its_shape(shape, page_size, window):
    """`run` is what a graph replays: it may look at nothing but what the last plan left in the buffers."""
    is_decode = shape.kind is GraphKind.DECODE
    many = [*DECODE, (7, 1), (200, 1), (1, 1)] if is_decode else EXTEND
    few = DECODE[:2] if is_decode else [(100, 48)]
    scenes = [Scene(lengths, page_size=page_size, window=window) for lengths in (many, few)]
    for scene in scenes:
        fake = FakeFlashInfer()
        backend = make_backend(scene, fake)
        graph = backend.open_graph(shape)
        nothing = np.empty(0, dtype=np.int32)
        batch = scene.batch()
        empty = dataclasses.replace(batch, host_rows=nothing, prefix_lens=nothing, extend_lens=nothing)
        graph.plan(pad(empty, shape))
        assert torch.isfinite(graph.run(scene.spec, torch.zeros(shape.tokens, *scene.q.shape[1:]))).all()
        graph.freeze()
        for _ in range(2):
            graph.plan(pad(batch, shape))
            q = torch.cat([scene.q, torch.zeros(shape.tokens - len(scene.q), *scene.q.shape[1:])])
            found = graph.run(scene.spec, q)
            check(found[: len(scene.q)], scene)
            assert torch.isfinite(found).all(), "padding computes nothing wild"
        if is_decode:
            assert fake.used("decode.plan") == 1 and fake.used("fast_decode_plan") == 2


@pytest.mark.parametrize("page_size", [1, 16])
def test_graph_of_beams_with_shared_prefixes(page_size, monkeypatch):
    monkeypatch.setattr(flashinfer, "SHARED_KEYS", 1)
    scene = Scene(BEAMS, page_size=page_size, shared=groups(page_size))
    backend, batch = make_backend(scene), scene.batch()
    shape = GraphShape(GraphKind.SHARED, 32, 32)
    assert backend.graph_kind(batch) is GraphKind.SHARED and backend.fits_graph(batch, shape)
    graph = backend.open_graph(shape)
    graph.plan(pad(dataclasses.replace(batch, shared=[]), shape))
    graph.freeze()
    graph.plan(pad(batch, shape))
    q = torch.cat([scene.q, torch.zeros(32 - len(scene.q), *scene.q.shape[1:])])
    check(graph.run(scene.spec, q)[: len(scene.q)], scene)


def test_steps_that_fit_a_graph():
    scene = Scene(BEAMS, shared=groups(1))
    backend, batch = make_backend(scene), scene.batch()
    assert backend.graph_kind(batch) is GraphKind.DECODE
    assert backend.graph_kind(Scene(EXTEND).batch()) is GraphKind.EXTEND
    # 2 groups, the rows before and between them, and padding: 5 sequences
    assert not backend.fits_graph(batch, GraphShape(GraphKind.SHARED, 16, 16))
    assert backend.fits_graph(batch, GraphShape(GraphKind.SHARED, 24, 24))
    batch.prefix_lens = np.full(len(BEAMS), 4096 // len(BEAMS), dtype=np.int32)
    assert not backend.fits_graph(batch, GraphShape(GraphKind.DECODE, 16, 16)), "too many pages"


# -- workspaces --------------------------------------------------------------------------------------------------------


def test_workspace_grows_until_plan_fits():
    scene = Scene(LONG)
    backend = make_backend(scene, FakeFlashInfer(workspace_per_row=20))
    check(scene.run(backend), scene)
    small = Scene(EXTEND)
    check(small.run(make_backend(small, FakeFlashInfer(workspace_per_row=20))), small)


def test_other_plan_errors_are_raised():
    scene = Scene(DECODE)
    backend = make_backend(scene)
    scene.prefix_lens = scene.prefix_lens.copy()
    scene.prefix_lens[0] = -7
    with pytest.raises((AssertionError, RuntimeError)):
        scene.run(backend)


def test_layers_with_different_windows_have_separate_plans():
    scene = Scene(EXTEND, window=20)
    whole = dataclasses.replace(scene.spec, sliding_window=None)
    backend = FlashInferBackend(scene.pool, [scene.spec, whole], FakeFlashInfer().library, build_kv_indices)
    backend.plan(scene.batch())
    native = TorchNativeBackend(scene.pool)
    native.plan(scene.batch())
    for spec in (scene.spec, whole, scene.spec):
        torch.testing.assert_close(backend.run(spec, scene.q), native.run(spec, scene.q), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("lengths", [DECODE, EXTEND, LONG], ids=["decode", "extend", "long"])
def test_soft_caps(lengths):
    scene = Scene(lengths, window=20, logit_cap=0.7)
    check(scene.run(make_backend(scene)), scene)


def test_soft_cap_of_beams(monkeypatch):
    monkeypatch.setattr(flashinfer, "SHARED_KEYS", 1)
    scene = Scene(BEAMS, shared=groups(1), logit_cap=0.7)
    check(scene.run(make_backend(scene)), scene)


def test_layers_of_different_kinds_have_separate_plans():
    scene = Scene(EXTEND)
    specs = [dataclasses.replace(scene.spec, **change) for change in ({}, {"scale": 0.1}, {"logit_cap": 0.7})]
    specs.append(dataclasses.replace(scene.spec, num_heads=2))
    backend = FlashInferBackend(scene.pool, specs, FakeFlashInfer().library, build_kv_indices)
    native = TorchNativeBackend(scene.pool)
    for one in (backend, native):
        one.plan(scene.batch())
    for spec in specs:
        q = scene.q[:, : spec.num_heads]
        torch.testing.assert_close(backend.run(spec, q), native.run(spec, q), atol=2e-6, rtol=1e-5)


def test_calls_bind_to_real_flashinfer_signatures(monkeypatch):
    """Every call the tests above make binds to the real signature (0.6.12)."""
    real = pytest.importorskip("flashinfer")
    fast_decode_plan = pytest.importorskip("flashinfer.decode").fast_decode_plan
    monkeypatch.setattr(flashinfer, "SHARED_KEYS", 1)
    fake = FakeFlashInfer()
    for lengths, shared in ((DECODE, ()), (EXTEND, ()), (LONG, ()), (BEAMS, groups(1))):
        scene = Scene(lengths, shared=shared)
        backend = make_backend(scene, fake)
        scene.run(backend)
        if lengths is DECODE:
            shape = GraphShape(GraphKind.DECODE, 8, 8)
            graph = backend.open_graph(shape)
            for _ in range(2):
                graph.plan(pad(scene.batch(), shape))
    targets = {
        "prefill": real.BatchPrefillWithPagedKVCacheWrapper,
        "decode": real.BatchDecodeWithPagedKVCacheWrapper,
        "fast_decode_plan": fast_decode_plan,
        "merge_state_in_place": real.merge_state_in_place,
    }
    seen = set()
    for name, args, kwargs in fake.calls:
        owner, _, method = name.partition(".")
        target = getattr(targets[owner], method) if method else targets[owner]
        bound = (None, *args) if method == "__init__" else args
        inspect.signature(inspect.unwrap(target)).bind(*bound, **kwargs)
        seen.add(name)
    assert len(seen) == 10, seen
