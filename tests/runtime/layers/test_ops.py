"""TORCH_OPS against the definitions, one row and head at a time, in float64."""

from __future__ import annotations

import pytest
import torch

from baton.runtime.layers.ops import TORCH_OPS
from baton.runtime.layers.rotary import RotaryEmbedding
from baton.runtime.model_config import RopeConfig

CPU = torch.device("cpu")
EPS = 1e-5


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return (x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight).float()


def test_norms():
    x, residual, weight = seeded(5, 12), seeded(5, 12, seed=1), seeded(12, seed=2)
    total = x + residual
    torch.testing.assert_close(TORCH_OPS.rms_norm(x, weight, EPS), exact_norm(x, weight))
    normed, found = TORCH_OPS.add_rms_norm(x.clone(), residual.clone(), weight, EPS)
    assert torch.equal(found, total)
    torch.testing.assert_close(normed, exact_norm(total, weight))


def test_silu_and_mul():
    gate_up = seeded(3, 10)
    gate, up = gate_up[:, :5].double(), gate_up[:, 5:].double()
    torch.testing.assert_close(TORCH_OPS.silu_and_mul(gate_up.clone()), (gate / (1 + (-gate).exp()) * up).float())


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (1, 1), (6, 3)])
def test_q_and_k_are_normed_rotated_and_stored(heads, kv_heads, with_norm):
    head_dim, tokens = 8, 5
    rotary = RotaryEmbedding(RopeConfig(theta=100.0), head_dim, 64, dtype=torch.float32, device=CPU)
    qkv = seeded(tokens, (heads + 2 * kv_heads) * head_dim)
    weight = seeded(heads + kv_heads, head_dim, seed=1) if with_norm else None
    positions, slots = torch.tensor([3, 4, 0, 63, 17]), torch.tensor([9, 2, 7, 1, 5])
    k_pool, v_pool = torch.full((10, kv_heads, head_dim), 7.0), torch.full((10, kv_heads, head_dim), 8.0)

    per_head = qkv.view(tokens, -1, head_dim).clone()
    expected = per_head[:, : heads + kv_heads].clone()
    if weight is not None:
        expected = exact_norm(expected, weight)
    cos, sin = rotary.table[positions].unsqueeze(1).chunk(2, dim=-1)
    left, right = expected.chunk(2, dim=-1)
    expected = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

    q = TORCH_OPS.rotate_and_store(qkv, positions, rotary.table, slots, k_pool, v_pool, weight, EPS)
    torch.testing.assert_close(q, expected[:, :heads])
    assert q.stride()[1:] == (head_dim, 1)
    torch.testing.assert_close(k_pool[slots], expected[:, heads:])
    assert torch.equal(v_pool[slots], per_head[:, heads + kv_heads :])
    others = [0, 3, 4, 6, 8]
    assert bool((k_pool[others] == 7).all()) and bool((v_pool[others] == 8).all())
