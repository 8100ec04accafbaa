"""Sparse decodes: equal to full attention where all tokens are chosen, else to their definition in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from baton.attention.backend import AttentionBackend, SharedPrefix, without_sequences
from baton.attention.double_sparse import (
    FEW_THREADS,
    DoubleSparseBackend,
    ScoreLabels,
    Sparsity,
    best_tokens,
    score_labels,
)
from baton.attention.torch_native import TorchNativeBackend
from tests.doubles.attention_scene import HEAD_DIM, Scene

STEPS = {
    "decodes": ([(60, 1), (20, 1), (90, 1), (39, 1)], ()),
    "decodes among extends": ([(0, 70), (50, 1), (30, 40), (5, 4), (80, 1), (3, 1)], ()),
    "beams": ([(0, 30), *[(50, 1)] * 5, (45, 1), *[(20, 1)] * 3], (SharedPrefix(1, 5, 44), SharedPrefix(7, 3, 20))),
    "only prompts": ([(0, 70), (80, 2)], ()),
}
THRESHOLD = 40


def orders(scene: Scene) -> torch.Tensor:
    """A channel order for each KV head."""
    generator = torch.Generator().manual_seed(9)
    heads = range(scene.spec.num_kv_heads)
    return torch.stack([torch.randperm(scene.spec.head_dim, generator=generator) for _ in heads])


def attend(scene: Scene, inner: str = "torch", *, channels: int = 3, tokens: int = 10) -> torch.Tensor:
    """Put the keys of the prefixes in order, as earlier steps would have, then run the step."""
    order = orders(scene)
    slots = set()
    for row, prefix in zip(scene.rows, scene.prefix_lens, strict=True):
        slots |= set(scene.req_to_token[row, :prefix].tolist())
    old = torch.tensor(sorted(slots), dtype=torch.long)
    keys = scene.pool.k[0]
    keys[old] = keys[old].gather(2, order.expand(len(old), -1, -1))
    sparsity = Sparsity(channels=channels, tokens=tokens, threshold=THRESHOLD, orders={0: order})
    backend = DoubleSparseBackend(scene.pool, inner_of(inner, scene), sparsity, scores_of(inner))
    backend.plan(replace(scene.batch(), decodes=scene.extend_lens == 1))
    return backend.run(scene.spec, scene.q, scene.sinks)


def inner_of(name: str, scene: Scene) -> AttentionBackend:
    if name == "torch":
        return TorchNativeBackend(scene.pool)
    pytest.importorskip("numba")
    from baton.attention.numba_paged.backend import NumbaPagedBackend
    from baton.attention.numba_paged.team import Team

    return NumbaPagedBackend(scene.pool, [scene.spec], team=Team())


def scores_of(inner: str) -> ScoreLabels | None:
    if inner == "torch":
        return None
    from baton.attention.numba_paged.label_scores import LabelScores
    from baton.attention.numba_paged.team import Team

    return LabelScores(Team())


def expected(scene: Scene, *, channels: int = 3, tokens: int = 10) -> torch.Tensor:
    """Head by head, in float64; the rows of sequences that are attended in full come from the scene."""
    full, spec, order = scene.expected(), scene.spec, orders(scene)
    ends = np.cumsum(scene.extend_lens)
    for at, (prefix, new) in enumerate(zip(scene.prefix_lens.tolist(), scene.extend_lens.tolist(), strict=True)):
        length, token = prefix + new, int(ends[at]) - 1
        if new != 1 or length < THRESHOLD:
            continue
        for head in range(spec.num_heads):
            of = head // spec.group
            k, v, q = scene.k[at][:, of].double(), scene.v[at][:, of].double(), scene.q[token, head].double()
            heavy = order[of, :channels]
            near = k[:, heavy] @ q[heavy]
            near[-1] = float("inf")
            chosen = near.topk(min(tokens, length)).indices
            scores = k[chosen] @ q * spec.scale
            if spec.logit_cap is not None:
                scores = spec.logit_cap * torch.tanh(scores / spec.logit_cap)
            if scene.sinks is not None:
                scores = torch.cat((scores, scene.sinks[head, None].double()))
            full[token, head] = (scores.softmax(0)[: len(chosen)] @ v[chosen]).float()
    return full


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("inner", ["torch", "numba"])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_chosen_tokens_are_attended_exactly(step, inner, page_size):
    lengths, shared = step
    scene = Scene(lengths, shared=shared, page_size=page_size)
    torch.testing.assert_close(attend(scene, inner), expected(scene), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_all_tokens_are_full_attention(step):
    """The order of channels changes no product, and a budget as long as the sequence leaves nothing out."""
    lengths, shared = step
    scene = Scene(lengths, shared=shared)
    torch.testing.assert_close(attend(scene, tokens=200), scene.expected(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("options", [{"logit_cap": 3.0}, {"has_sinks": True}, {"value_dim": 5}, {"layout": "ascending"},
                                     {"kv_heads": 4}, {"kv_heads": 1}], ids=str)  # fmt: skip
def test_specs(options):
    scene = Scene(STEPS["decodes among extends"][0], **options)
    torch.testing.assert_close(attend(scene), expected(scene), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("threads", [1, FEW_THREADS + 1])
def test_best_tokens(threads, monkeypatch):
    """By numpy and by torch, of a view, with infinities, and with NaN, which must not go unseen."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    scores = torch.randn(2, 3, 80, generator=torch.Generator().manual_seed(3))[..., 7:]
    scores[0, 0, 5], scores[0, 1, 6], scores[1, 2, 0] = float("nan"), float("inf"), float("-inf")
    for count in (1, 2, 40, 72, 73):
        found = best_tokens(scores, count)
        assert found.shape == (2, 3, count) and found.dtype == torch.int64
        assert torch.equal(found.sort().values, scores.topk(count).indices.sort().values)


def test_the_log_names_the_least_length():
    """Sequences within the budget are attended in full, whatever the threshold."""
    assert "at least 257 tokens" in Sparsity(channels=3, tokens=256, threshold=40, orders={}).describe()
    assert "at least 300 tokens" in Sparsity(channels=3, tokens=256, threshold=300, orders={}).describe()


@pytest.mark.parametrize("tokens", [1, 39, 40, 41])
@pytest.mark.parametrize("channels", [1, HEAD_DIM])
def test_budgets(tokens, channels):
    """The newest token alone, and budgets around the length."""
    scene = Scene([(39, 1), (40, 1), (60, 1)])
    found = attend(scene, tokens=tokens, channels=channels)
    torch.testing.assert_close(found, expected(scene, tokens=tokens, channels=channels), atol=2e-6, rtol=1e-5)


def test_layers_with_a_window_are_left_alone():
    """Their keys have no order, between layers that do, in one step."""
    scene = Scene([(60, 1), (0, 50), (20, 1)], window=8)
    sparsity = Sparsity(channels=3, tokens=10, threshold=THRESHOLD, orders={})
    torch.testing.assert_close(
        scene.run(DoubleSparseBackend(scene.pool, TorchNativeBackend(scene.pool), sparsity)),
        scene.expected(),
        atol=2e-6,
        rtol=1e-5,
    )


def test_shared_keys_are_ordered_once():
    """Layers that share their keys run twice in a step."""
    scene = Scene(STEPS["decodes among extends"][0])
    order = orders(scene)
    sparsity = Sparsity(channels=3, tokens=10, threshold=1000, orders={0: order})
    backend = DoubleSparseBackend(scene.pool, TorchNativeBackend(scene.pool), sparsity)
    backend.plan(scene.batch())
    before = scene.pool.k[0].clone()
    for _ in range(2):
        backend.run(scene.spec, scene.q)
    new = scene.req_to_token[scene.rows[1], 50]
    assert torch.equal(scene.pool.k[0][new], before[new].gather(1, order))
    old = scene.req_to_token[scene.rows[1], 49]
    assert torch.equal(scene.pool.k[0][old], before[old])


def test_a_prompt_of_one_token_is_attended_in_full():
    """Otherwise answers would depend on how much of a prompt was cached."""
    scene = Scene([(60, 1), (50, 1)])
    order = orders(scene)
    slots = torch.from_numpy(np.concatenate([scene.req_to_token[r, :p] for r, p in zip(scene.rows, (60, 50))])).long()
    scene.pool.k[0][slots] = scene.pool.k[0][slots].gather(2, order.expand(len(slots), -1, -1))
    sparsity = Sparsity(channels=3, tokens=10, threshold=THRESHOLD, orders={0: order})
    backend = DoubleSparseBackend(scene.pool, TorchNativeBackend(scene.pool), sparsity)
    backend.plan(replace(scene.batch(), decodes=np.array([False, True])))
    found = backend.run(scene.spec, scene.q)
    torch.testing.assert_close(found[0], scene.expected()[0], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(found[1], expected(scene)[1], atol=2e-6, rtol=1e-5)


def test_groups_shrink_with_their_sequences():
    scene = Scene(
        [(0, 3), *[(50, 1)] * 4, (9, 1), *[(20, 1)] * 2], shared=(SharedPrefix(1, 4, 44), SharedPrefix(6, 2, 9))
    )
    gone = np.array([1, 0, 1, 0, 0, 0, 1, 1], dtype=bool)
    rest = without_sequences(scene.batch(), gone)
    assert rest.shared == [SharedPrefix(0, 3, 44)]
    assert rest.prefix_lens.tolist() == [50, 50, 50, 9]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)], ids=str)
def test_half_precision(dtype, tolerance):
    """With all channels, so that rounding flips few choices; with all tokens, none."""
    scene = Scene([(60, 1), (90, 1)], dtype=dtype)
    found = attend(scene, tokens=200)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), scene.expected(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("size", [1, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scores_are_not_rounded(dtype, size):
    """Equal scores are chosen between by chance: those that overflow float16 (Qwen2 has such keys), the newest token's
    among them, or that are one number in bfloat16."""
    generator, slots = torch.Generator().manual_seed(2), torch.arange(50).int()
    k = (size * torch.randn(50, 2, HEAD_DIM, generator=generator)).to(dtype)
    queries = (size * torch.randn(2, 3, HEAD_DIM, generator=generator)).to(dtype)
    exact = torch.einsum("hgc,nhc->hgn", queries[..., :4].double(), k[..., :4].double())
    assert size == 1 or exact.max() > torch.finfo(torch.float16).max
    found = score_labels(queries, k, slots, 4)
    torch.testing.assert_close(found, exact.float(), atol=1e-5 * size**2, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("channels", "head_dim", "group"), [(1, 5, 1), (16, 16, 4), (20, 64, 3), (33, 128, 8)])
def test_scores_of_the_kernel_are_torchs(channels, head_dim, group, dtype):
    """Lengths around blocks of 64, with what no sequence owns left NaN."""
    pytest.importorskip("numba")
    scores, generator = scores_of("numba"), torch.Generator().manual_seed(1)
    assert scores is not None
    for length in (1, 63, 64, 65, 128, 300, 1000):
        k = torch.full((length + 40, 2, head_dim), float("nan"), dtype=dtype)
        slots = torch.randperm(length + 40, generator=generator)[:length].int()
        k[slots.long()] = torch.randn(length, 2, head_dim, generator=generator).to(dtype)
        queries = torch.randn(2, group, head_dim, generator=generator).to(dtype)
        found = scores(queries, k, slots, channels)
        assert found.shape == (2, group, length)
        expected = score_labels(queries.float(), k.float(), slots, channels)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_kernel_that_computes_wrongly_is_not_used(is_wrong, monkeypatch, caplog):
    """It is compiled and compared at start; otherwise the first long request would wait for it, or fail."""
    pytest.importorskip("numba")
    from baton.attention.numba_paged.label_scores import LabelScores
    from baton.attention.numba_paged.team import Team
    from baton.runtime.runner.device_backends import _label_scores

    if is_wrong:
        monkeypatch.setattr(
            LabelScores, "__call__", lambda self, queries, k, slots, channels: torch.zeros(2, 2, len(slots))
        )
    found = _label_scores(Team(), [Scene([(1, 1)]).spec], 3, torch.float32)
    assert (found is None) == is_wrong
    assert ("torch scores the labels" in caplog.text) == is_wrong
