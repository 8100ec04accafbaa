"""Layers with soft caps, sinks, and values narrower or wider than keys, against a loop over every query."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from baton.attention.backend import AttentionSpec, GraphKind, GraphShape, SharedPrefix, kv_shapes
from baton.attention.torch_native import TorchNativeBackend
from baton.memory_pool.kv_pool import MHAKVPool
from tests.doubles.attention_scene import CPU, Scene

pytest.importorskip("numba")

from baton.attention.numba_paged import backend, library, pieces
from baton.attention.numba_paged.backend import NumbaPagedBackend
from baton.attention.numba_paged.recording import TeamRecorder
from baton.attention.numba_paged.team import Team

FLOAT, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {FLOAT: 5e-6, BRAIN: 1e-2, HALF: 2e-3}

KINDS: dict[str, dict[str, Any]] = {
    "cap": {"logit_cap": 0.7},
    "sinks": {"has_sinks": True},
    "narrow values": {"value_dim": 4},
    "all": {"logit_cap": 0.7, "has_sinks": True, "value_dim": 12},
}
WIDE: dict[str, Any] = {"logit_cap": 2.0, "has_sinks": True, "heads": 6, "kv_heads": 2}
"""With heads of 64 numbers: whole blocks of keys."""

DECODE = [(0, 1), (63, 1), (64, 1), (600, 1), (18, 1)]
MIXED = [(0, 70), (25, 1), (100, 30), (5, 4), (0, 2), (200, 40)]
BEAMS = [(5, 1), *[(66, 1)] * 5, (9, 4)]


@pytest.fixture(autouse=True, params=[1, 2], ids="threads={}".format)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two, work is cut into many parts that are joined."""
    monkeypatch.setattr(backend, "ONE_THREAD", 0)
    monkeypatch.setattr(backend, "LEAST_SHARED_KEYS", 0)
    monkeypatch.setattr(pieces, "LEAST_WORK", 8)
    monkeypatch.setattr(pieces, "PART_KEYS", 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)


def check(scene: Scene, longest_extend: int = backend.ANY_EXTEND, tolerance: float = 0.0) -> None:
    found = scene.run(NumbaPagedBackend(scene.pool, [scene.spec], team=Team(), longest_extend=longest_extend))
    tolerance = tolerance or TOLERANCE[scene.q.dtype]
    assert found.shape[-1] == scene.spec.value_size and found.dtype == scene.q.dtype and found.is_contiguous()
    torch.testing.assert_close(
        found.float(), scene.expected(), atol=tolerance, rtol=tolerance, msg=lambda text: f"{text}\n{scene.spec}"
    )


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_caps_sinks_and_value_widths(lengths: list[tuple[int, int]], window: int | None, kind: dict[str, Any]) -> None:
    check(Scene(lengths, window=window, heads=6, kv_heads=2, page_size=4, **kind))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_beams_over_one_prefix(kind: dict[str, Any], window: int | None) -> None:
    check(Scene(BEAMS, window=window, heads=6, kv_heads=2, shared=(SharedPrefix(1, 5, 60),), **kind))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_long_extends_by_torch(kind: dict[str, Any]) -> None:
    check(Scene(MIXED, heads=6, kv_heads=2, **kind), longest_extend=3)


@pytest.mark.parametrize(("dtype", "value_dim"), [(FLOAT, 32), (BRAIN, 32), (BRAIN, 72), (HALF, 72)], ids=str)
def test_whole_blocks(dtype: torch.dtype, value_dim: int) -> None:
    """Pairs of bfloat16 are multiplied for values of 32 numbers, where the processor can, and not for 72."""
    for window in (None, 100):
        scene = Scene([(0, 200), (37, 90), (500, 1), (5, 3)], head_dim=64, value_dim=value_dim, dtype=dtype,
                      window=window, **WIDE)  # fmt: skip
        check(scene)
    check(Scene(BEAMS, shared=(SharedPrefix(1, 5, 60),), head_dim=64, value_dim=value_dim, dtype=dtype, **WIDE))


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("chunk", [1, 20, 64, 130])
def test_chunks(chunk: int, window: int | None) -> None:
    """Llama 4: nothing of an earlier chunk is seen."""
    for lengths in (DECODE, MIXED):
        check(Scene(lengths, chunk=chunk, window=window, heads=6, kv_heads=2, page_size=4))
    check(Scene(MIXED, chunk=chunk, window=window, heads=6, kv_heads=2), longest_extend=3)
    check(Scene(BEAMS, chunk=chunk, window=window, heads=6, kv_heads=2, shared=(SharedPrefix(1, 5, 60),)))
    check(Scene([(0, 200), (37, 90)], chunk=chunk, window=window, head_dim=64, heads=6, kv_heads=2))


@pytest.mark.parametrize("heads", [1, 6, 7, 16, 128])
@pytest.mark.parametrize("case", ["decode", "mixed", "beams"])
def test_values_in_keys(case: str, heads: int) -> None:
    """Latent attention: many heads read one key, a few of them at a time."""
    lengths, shared = {"decode": (DECODE, ()), "mixed": (MIXED, ()), "beams": (BEAMS, (SharedPrefix(1, 5, 60),))}[case]
    latent = {"heads": heads, "kv_heads": 1, "head_dim": 12, "value_dim": 8, "values_in_keys": True}
    check(Scene(lengths, page_size=4, shared=shared, **latent))
    check(Scene(lengths, shared=shared, **latent), longest_extend=3)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "value_dim"),
    [
        (FLOAT, 96, 64),
        (BRAIN, 160, 144),
        (BRAIN, 200, 136),
        (HALF, 200, 136),
        pytest.param(FLOAT, 160, 144, marks=pytest.mark.slow),
        pytest.param(FLOAT, 200, 136, marks=pytest.mark.slow),
        pytest.param(BRAIN, 96, 64, marks=pytest.mark.slow),
        pytest.param(HALF, 96, 64, marks=pytest.mark.slow),
        pytest.param(HALF, 160, 144, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_blocks_of_latents(head_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    """Whole blocks of keys, and values that do not fit in registers at once. 200 numbers are no whole vectors."""
    latent = {"heads": 16, "kv_heads": 1, "head_dim": head_dim, "value_dim": value_dim, "values_in_keys": True}
    check(Scene([(0, 90), (500, 1), (64, 1), (63, 2)], dtype=dtype, **latent))
    check(Scene(BEAMS, shared=(SharedPrefix(1, 5, 60),), dtype=dtype, **latent))


@pytest.mark.parametrize("kind", [{"has_sinks": True}, {"logit_cap": 0.7}], ids=str)
def test_latents_with_caps_and_sinks(kind: dict[str, Any]) -> None:
    """The kernel finds sinks by the KV head, so that all heads are rows at once."""
    check(Scene(MIXED, heads=6, kv_heads=1, head_dim=12, value_dim=8, values_in_keys=True, **kind))


def test_strided_queries_over_latents() -> None:
    """A view that holds more than the queries is copied; a recorded step, which cannot copy, refuses it."""
    scene = Scene(MIXED, heads=6, kv_heads=1, head_dim=12, value_dim=8, values_in_keys=True)
    wide = torch.full((len(scene.q), 7, 12), float("nan"))
    wide[:, :6] = scene.q
    scene.q = wide[:, :6]
    check(scene)
    with pytest.raises(ValueError, match=r"queries over latents: strides \(84, 12, 1\); pass a contiguous"):
        backend._in_parts(scene.spec, scene.q)


@pytest.mark.parametrize("sink", [-1e4, -60.0, 60.0, 1e4])
def test_extreme_sinks(sink: float) -> None:
    """One that takes nothing, and one that takes all."""
    scene = Scene(MIXED, heads=6, kv_heads=2, has_sinks=True)
    assert scene.sinks is not None
    scene.sinks.fill_(sink)
    check(scene)
    if sink > 0:
        assert scene.run(NumbaPagedBackend(scene.pool, [scene.spec], team=Team())).abs().max() < 1e-20


def test_scores_far_above_the_cap() -> None:
    scene = Scene(MIXED, heads=6, kv_heads=2, logit_cap=0.7)
    scene.q *= 1e4
    check(scene, tolerance=1e-3)  # a float32 of 10⁴ is right to 0.0005


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_nan_stays_visible(kind: dict[str, Any]) -> None:
    scene = Scene([(90, 1), (30, 1), (40, 3)], heads=6, kv_heads=2, **kind)
    scene.pool.k[0][int(scene.req_to_token[scene.rows[0], 70])] = float("nan")
    found = scene.run(NumbaPagedBackend(scene.pool, [scene.spec], team=Team()))
    assert found[0].isnan().all() and not found[1:].isnan().any()


@pytest.mark.parametrize("sinks", [None, torch.zeros(5), torch.zeros(6, dtype=HALF), torch.zeros(12)[::2]])
def test_unreadable_sinks_are_refused(sinks: torch.Tensor | None) -> None:
    scene = Scene([(9, 1)], heads=6, kv_heads=2, has_sinks=True)
    scene.sinks = sinks
    with pytest.raises(ValueError, match=r"sinks of layer 0.*float32 \(6,\)"):
        scene.run(NumbaPagedBackend(scene.pool, [scene.spec], team=Team()))


def different_layers() -> tuple[list[AttentionSpec], MHAKVPool, list[torch.Tensor], list[torch.Tensor | None]]:
    """Layers of all kinds, two of which have a cap of their own only, and one that reads another's K and V."""
    plain = AttentionSpec(0, 6, 2, 8, 0.3)
    capped = replace(plain, layer_id=1, logit_cap=0.7, sliding_window=9)
    wide = AttentionSpec(4, 4, 4, 8, 0.2, None, 12, 0.7, True)
    specs = [
        plain,
        capped,
        replace(capped, layer_id=2, logit_cap=3.0, scale=0.6),
        replace(plain, layer_id=3, has_sinks=True),
        wide,
        wide,
        replace(capped, sliding_window=None),
    ]
    pool = MHAKVPool(num_tokens=1000, page_size=1, shapes=kv_shapes(specs), dtype=FLOAT, device=CPU)
    generator = torch.Generator().manual_seed(1)
    for tensor in (*pool.k, *pool.v):
        tensor.normal_(generator=generator)
    queries = [torch.randn(5, spec.num_heads, spec.head_dim, generator=generator) for spec in specs]
    sinks = [torch.randn(spec.num_heads, generator=generator) if spec.has_sinks else None for spec in specs]
    return specs, pool, queries, sinks


def test_layers_that_differ_share_a_step() -> None:
    specs, pool, queries, sinks = different_layers()
    batch = Scene([(20, 1), (90, 1), (0, 1), (300, 1), (7, 1)]).batch()
    own, oracle = NumbaPagedBackend(pool, specs, team=Team()), TorchNativeBackend(pool)
    own.plan(batch)
    oracle.plan(batch)
    for layer in zip(specs, queries, sinks, strict=True):
        torch.testing.assert_close(own.run(*layer), oracle.run(*layer), atol=5e-6, rtol=1e-5)


def test_recorded_steps_equal_unrecorded_ones() -> None:
    """Layers with equal specs (they share K and V) keep their own queries."""
    specs, pool, queries, sinks = different_layers()
    team = Team()
    own = NumbaPagedBackend(pool, specs, team=team)
    recorded = own.open_graph(GraphShape(GraphKind.DECODE, 5, 5))

    outputs: list[torch.Tensor] = []

    def all_layers() -> torch.Tensor:
        outputs.extend(recorded.run(*layer) for layer in zip(specs, queries, sinks, strict=True))
        return outputs[-1]

    _, replay = TeamRecorder(team).record(all_layers)
    for seed, lengths in product(range(2), ([20, 90, 0, 300, 7], [1, 2, 3, 4, 500])):
        batch = Scene([(length, 1) for length in lengths], seed=seed).batch()
        batch.req_to_token.clamp_(max=999)
        for number, q in enumerate(queries):
            q.normal_(generator=torch.Generator().manual_seed(100 * seed + number))
        recorded.plan(batch)
        replay()
        own.plan(batch)
        for found, spec, q, its_sinks in zip(outputs, specs, queries, sinks, strict=True):
            assert np.array_equal(found.numpy(), own.run(spec, q, its_sinks).numpy())


@pytest.mark.parametrize("heads", [1, 6, 7, 10, 16, 20, 22, 128])
def test_probe_of_many_heads_is_of_the_same_kernel(heads: int) -> None:
    spec = Scene([(5, 1)], heads=heads, kv_heads=1, head_dim=12, value_dim=8, values_in_keys=True).spec
    few = library.probed(spec)
    assert few.num_heads <= min(heads, 10) and backend.kernel_rows(few) == backend.kernel_rows(spec)
    plain = replace(spec, values_in_keys=False)
    assert library.probed(plain) is plain
