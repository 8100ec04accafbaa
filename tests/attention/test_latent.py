"""Attention over latents, absorbed and expanded, against keys and values of each head in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from baton.attention import latent
from baton.attention.backend import AttentionBackend, SharedPrefix
from baton.attention.latent import LatentBackend, LatentWeights, attend_absorbed, is_long
from baton.attention.torch_native import TorchNativeBackend
from tests.doubles.attention_scene import Scene

HEADS, PLAIN, ROTATED, LATENT = 6, 10, 4, 20
STEPS = {
    "one prompt": ([(0, 70)], ()),
    "a chunk over a prefix": ([(33, 50)], ()),
    "all at once": ([(0, 70), (25, 1), (30, 40), (5, 4), (6, 1), (0, 2), (3, 90)], ()),
    "prompts between beams": (
        [(0, 60), *[(50, 1)] * 5, (40, 45), *[(20, 1)] * 3],
        (SharedPrefix(1, 5, 44), SharedPrefix(7, 3, 20)),
    ),
    "no prompt": ([(25, 1), (6, 1)], ()),
}


class CountingBackend(TorchNativeBackend):
    """Keeps how many tokens it attended, call by call."""

    def __init__(self, pool) -> None:
        super().__init__(pool)
        self.tokens: list[int] = []

    def run(self, spec, q, sinks=None):
        self.tokens.append(len(q))
        return super().run(spec, q, sinks)


class LatentScene(Scene):
    """Queries as a model makes them, and the weights of a layer."""

    def __init__(self, lengths, *, value: int = 6, dtype=torch.float32, **options) -> None:
        super().__init__(
            lengths,
            heads=HEADS,
            kv_heads=1,
            head_dim=LATENT + ROTATED,
            value_dim=LATENT,
            values_in_keys=True,
            dtype=dtype,
            **options,
        )
        generator = torch.Generator().manual_seed(5)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.weights = LatentWeights(numbers(HEADS, PLAIN, LATENT) * 0.3, numbers(HEADS, LATENT, value))
        self.plain_q = numbers(int(self.extend_lens.sum()), HEADS, PLAIN + ROTATED)

    def attend(self, backend: LatentBackend) -> torch.Tensor:
        backend.plan(self.batch())
        return backend.run_latent(self.spec, self.plain_q, self.weights)

    def expected_heads(self) -> torch.Tensor:
        rows, token = [], 0
        to_latent, to_values = self.weights.to_latent.double(), self.weights.to_values.double()
        for kept, prefix, new in zip(self.k, self.prefix_lens.tolist(), self.extend_lens.tolist(), strict=True):
            latents, rotated = kept[:, 0].double().split((LATENT, ROTATED), dim=1)
            keys = torch.cat(
                (torch.einsum("nr,hpr->nhp", latents, to_latent), rotated[:, None].expand(-1, HEADS, -1)), dim=2
            )
            values = torch.einsum("nr,hrv->nhv", latents, to_values)
            for position in range(prefix, prefix + new):
                seen = slice(position + 1)
                scores = torch.einsum("hd,nhd->hn", self.plain_q[token].double(), keys[seen]) * self.spec.scale
                rows.append(torch.einsum("hn,nhv->hv", scores.softmax(-1), values[seen]))
                token += 1
        return torch.stack(rows).float()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch) -> None:
    """Borders between blocks of queries and groups of heads come up with few tokens."""
    monkeypatch.setattr(latent, "BLOCK", 16)
    monkeypatch.setattr(latent, "EXPANDED", 2 * 80 * 2 * 20)
    monkeypatch.setattr(latent, "SHORT_EXTEND", 8)


def inner_of(name: str, scene: Scene) -> AttentionBackend:
    if name == "torch":
        return TorchNativeBackend(scene.pool)
    pytest.importorskip("numba")
    from baton.attention.numba_paged.backend import NumbaPagedBackend
    from baton.attention.numba_paged.team import Team

    return NumbaPagedBackend(scene.pool, [scene.spec], team=Team())


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("value", [6, 20])
@pytest.mark.parametrize("inner", ["torch", "numba"])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_both_ways_attend_equally(step, inner, value, page_size):
    """Values narrower and wider than keys."""
    lengths, shared = step
    scene = LatentScene(lengths, shared=shared, value=value, page_size=page_size)
    found = scene.attend(LatentBackend(scene.pool, inner_of(inner, scene)))
    torch.testing.assert_close(found, scene.expected_heads(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("layout", ["ascending", "descending"])
def test_slots_in_a_row(layout):
    scene = LatentScene([(0, 70), (33, 50)], layout=layout)
    found = scene.attend(LatentBackend(scene.pool, TorchNativeBackend(scene.pool)))
    torch.testing.assert_close(found, scene.expected_heads(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.15), (torch.float16, 0.02)], ids=str)
def test_half_precision(dtype, tolerance):
    scene = LatentScene([(0, 70), (25, 1), (30, 40)], dtype=dtype)
    found = scene.attend(LatentBackend(scene.pool, TorchNativeBackend(scene.pool)))
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), scene.expected_heads(), atol=tolerance, rtol=tolerance)


def test_long_sequences_alone_are_expanded():
    """The others go to the other backend in one call, layer by layer; a step without prompts goes there as it is."""
    scene = LatentScene(STEPS["all at once"][0])
    inner = CountingBackend(scene.pool)
    backend = LatentBackend(scene.pool, inner)
    first = scene.attend(backend)
    assert torch.equal(first, backend.run_latent(scene.spec, scene.plain_q, scene.weights))
    assert inner.tokens == [1 + 4 + 1 + 2] * 2
    decode = LatentScene(STEPS["no prompt"][0])
    inner = CountingBackend(decode.pool)
    decode.attend(LatentBackend(decode.pool, inner))
    assert inner.tokens == [2]
    alone = LatentScene([(0, 70)])
    inner = CountingBackend(alone.pool)
    alone.attend(LatentBackend(alone.pool, inner))
    assert inner.tokens == []


def test_absorbed_queries_after_expanded_ones_see_the_whole_step():
    scene = LatentScene(STEPS["all at once"][0])
    backend = LatentBackend(scene.pool, TorchNativeBackend(scene.pool))
    expanded = scene.attend(backend)
    absorbed = attend_absorbed(backend.run, scene.spec, scene.plain_q, scene.weights)
    torch.testing.assert_close(absorbed, expanded, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(
        backend.run_latent(scene.spec, scene.plain_q, scene.weights), expanded, atol=2e-5, rtol=1e-4
    )


def test_rule_counts_products():
    """With DeepSeek's sizes: a prompt pays off at once, a suffix of a long prefix from some 170 tokens on."""
    weights = LatentWeights(torch.empty(16, 128, 512, device="meta"), torch.empty(16, 512, 128, device="meta"))
    scene = LatentScene([(0, 9)])
    spec = replace(scene.spec, num_heads=16, head_dim=576, value_dim=512)

    def long(*lengths: tuple[int, int]) -> list[bool]:
        batch = scene.batch()
        batch.prefix_lens, batch.extend_lens = (np.array(each, dtype=np.int32) for each in zip(*lengths, strict=True))
        return is_long(batch, spec, weights).tolist()

    assert long((0, 40), (0, 9), (0, 8), (10, 1), (0, 0)) == [True, True, False, False, False]
    assert long((4000, 100), (4000, 160), (4000, 180), (100_000, 180)) == [False, False, True, True]
    spec = replace(spec, sliding_window=50)
    assert long((0, 40)) == [False]


def test_run_latent_before_plan_raises_an_error():
    scene = LatentScene([(0, 9)])
    with pytest.raises(RuntimeError, match="call plan"):
        LatentBackend(scene.pool, TorchNativeBackend(scene.pool)).run_latent(scene.spec, scene.plain_q, scene.weights)
