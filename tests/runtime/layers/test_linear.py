from __future__ import annotations

import torch
import torch.nn.functional as F

from baton.runtime.layers.linear import Linear

CPU = torch.device("cpu")


def test_fused_parts_are_adjacent_and_filled_by_name():
    layer = Linear(8, {"q_proj": 6, "k_proj": 2}, bias=True, dtype=torch.float32, device=CPU)
    views = {name: view for name, view in layer.checkpoint_views("attn").items() if isinstance(view, torch.Tensor)}
    assert {name: tuple(view.shape) for name, view in views.items()} == {
        "attn.q_proj.weight": (6, 8),
        "attn.q_proj.bias": (6,),
        "attn.k_proj.weight": (2, 8),
        "attn.k_proj.bias": (2,),
    }
    for view in views.values():
        view.copy_(torch.randn_like(view))
    x = torch.randn(3, 8)
    parts = [F.linear(x, views[f"attn.{name}.weight"], views[f"attn.{name}.bias"]) for name in ("q_proj", "k_proj")]
    torch.testing.assert_close(layer(x), torch.cat(parts, dim=1))


def test_linear_without_bias_has_no_bias_view():
    layer = Linear(8, {"o_proj": 4}, bias=False, dtype=torch.float32, device=CPU)
    assert list(layer.checkpoint_views("attn")) == ["attn.o_proj.weight"]
