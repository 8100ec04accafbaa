"""Stand-ins for modules of transformers: used only where they give the same numbers."""

from __future__ import annotations

import copy

import pytest
import torch

from baton.runtime.layers.products import NUMBA, ProductChoice
from baton.runtime.runner.module_standins import EmbeddingStandin, LinearStandin, gated_mlp_standin, norm_standin
from tests.doubles.block_kernel import kernel


class OneRMSNorm(torch.nn.Module):
    """As most models write it, with what is to be changed in it."""

    def __init__(
        self, offset: float = 0.0, eps: float = 1e-6, *, gated: bool = False, adds_to_root: bool = False
    ) -> None:
        """adds_to_root: eps."""
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.1, 2.0, 16))
        self.variance_epsilon, self._offset, self._gated, self._adds_to_root = eps, offset, gated, adds_to_root

    def forward(self, x: torch.Tensor, *gate: torch.Tensor) -> torch.Tensor:
        if self._gated:
            x = x * gate[0]
        square = x.float().pow(2).mean(-1, keepdim=True)
        if self._adds_to_root:
            normed = x.float() / (square.sqrt() + self.variance_epsilon)
        else:
            normed = x.float() * torch.rsqrt(square + self.variance_epsilon)
        return (self.weight + self._offset) * normed.to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_norm_is_replaced_by_one_of_the_same_numbers(dtype):
    norm = OneRMSNorm(eps=0.3).to(dtype)
    standin = norm_standin(norm)
    assert standin is not None
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    allowed = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(standin(x), norm(x), atol=allowed, rtol=allowed)


class Named(OneRMSNorm):
    """Another name: not an RMSNorm to be looked at."""


class BiasedRMSNorm(OneRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(16))


@pytest.mark.parametrize(
    "module",
    [
        OneRMSNorm(offset=1.0),
        OneRMSNorm(gated=True),
        OneRMSNorm(adds_to_root=True),
        Named(),
        BiasedRMSNorm(),
        torch.nn.Linear(4, 4),
    ],
    ids=["offset", "gated", "eps outside of the root", "name", "bias", "linear"],
)
def test_other_modules_are_left_alone(module):
    assert norm_standin(module) is None


def test_embedding_reads_rows_of_another_dtype():
    rows = torch.randn(7, 4, generator=torch.Generator().manual_seed(2)).bfloat16()
    found = EmbeddingStandin(rows, torch.float32)(torch.tensor([[6, 0, 6]]))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, rows[[6, 0, 6]].float()[None], atol=0, rtol=0)


class GatedMLP(torch.nn.Module):
    """As most models write it, its linear layers replaced; with what is to be changed in it."""

    def __init__(
        self,
        activation: torch.nn.Module,
        *,
        bias: bool = False,
        up: float = 0.0,
        limit: float = float("inf"),
        dtype: torch.dtype = torch.float32,
        sizes: tuple[int, int] = (16, 24),
    ) -> None:
        """sizes: of x, and between the products. up: added to what is multiplied. limit: of gate and up."""
        super().__init__()
        self.gate_proj = LinearStandin(torch.nn.Linear(*sizes, bias=bias, dtype=dtype))
        self.up_proj = LinearStandin(torch.nn.Linear(*sizes, bias=bias, dtype=dtype))
        self.down_proj = LinearStandin(torch.nn.Linear(*sizes[::-1], bias=bias, dtype=dtype))
        self.act_fn, self._up, self._limit = activation, up, limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x).clamp(max=self._limit), self.up_proj(x).clamp(-self._limit, self._limit)
        return self.down_proj(self.act_fn(gate) * (up + self._up))


class ClippedGELU(torch.nn.GELU):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).clamp(-10, 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "activation", [torch.nn.SiLU(), torch.nn.GELU(), torch.nn.GELU("tanh")], ids=["silu", "gelu", "tanh"]
)
@torch.no_grad()
def test_gated_mlp_is_replaced_by_one_of_the_same_numbers(activation, bias, dtype):
    torch.manual_seed(0)
    mlp = GatedMLP(activation, bias=bias, dtype=dtype)
    x = torch.randn(2, 5, 16).to(dtype)
    expected = mlp(x)
    standin = gated_mlp_standin(mlp)
    assert standin is not None
    torch.testing.assert_close(standin(x), expected)
    assert standin(x[:, :0]).shape == (2, 0, 16)
    # The layers that it was made of compute the same still, and have no memory of their own.
    torch.testing.assert_close(mlp(x), expected)
    separate, merged = mlp.gate_proj.linear.weight, standin.linear.weight
    assert separate is not None and merged is not None and separate.data_ptr() == merged.data_ptr()


@pytest.mark.parametrize(
    "mlp",
    [
        GatedMLP(torch.nn.Tanh()),
        GatedMLP(ClippedGELU()),
        GatedMLP(torch.nn.SiLU(), up=1.0),
        GatedMLP(torch.nn.SiLU(), limit=10.0),
        GatedMLP(torch.nn.PReLU()),
        torch.nn.Sequential(torch.nn.SiLU()),
    ],
    ids=["activation", "clipped activation", "one added", "limit", "parameters", "other layers"],
)
@torch.no_grad()
def test_other_mlps_are_left_alone(mlp):
    assert gated_mlp_standin(mlp) is None


@torch.no_grad()
def test_rows_whose_numbers_are_apart_are_brought_together():
    """Some modelling transposes what it computes. Numba's products read the numbers of a row side by side."""
    torch.manual_seed(0)
    products = kernel(torch.float32)
    mlp = GatedMLP(torch.nn.SiLU(), sizes=(64, 128))
    x = torch.randn(64, 5).T[None]
    expected = mlp.gate_proj(x), mlp(x)
    standin = gated_mlp_standin(copy.deepcopy(mlp))
    mlp.gate_proj.linear.use_product(ProductChoice.of(NUMBA), products)
    torch.testing.assert_close(mlp.gate_proj(x), expected[0])
    assert standin is not None
    standin.linear.use_product(ProductChoice.of(NUMBA), products)
    torch.testing.assert_close(standin(x), expected[1])
