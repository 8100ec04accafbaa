"""Modules that take the place of torch's and transformers' in a model that transformers computes, to compute it faster.

    torch.nn.Linear      ─▶ LinearStandin      the fastest product for its shape, and adapters
    a gated MLP          ─▶ GatedMLPStandin    gate and up in one product, and one operation between the products
    an RMSNorm           ─▶ NormStandin        one operation instead of six
    torch.nn.Embedding   ─▶ EmbeddingStandin   rows of the file, where a tied head repacks the matrix

Each is used only where it gives the numbers of the module that it replaces, which a trial finds out: models write the
same layer in many ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from ..layers.activations import GATED
from ..layers.linear import Linear
from ..layers.op_libraries import tolerance
from ..layers.ops import RMSNormOp, SiluAndMulOp, silu_and_mul

SCALES = (1.0, 32.0, 1024.0)
"""Sizes of a trial's rows. Activations may have a limit, which small numbers do not reach."""


class SizedOps(Protocol):
    """Kernels of a device for rows of a size. May raise whatever compiling raises."""

    def rms_norm(self, size: int) -> RMSNormOp: ...

    def silu_and_mul(self, size: int) -> SiluAndMulOp:
        """size: of the gate, half of a row."""
        ...


class LinearStandin(torch.nn.Module):
    """Stands for a linear layer of torch, and computes it as one of Baton's: by the fastest product, with adapters."""

    def __init__(self, original: torch.nn.Linear) -> None:
        super().__init__()
        self.originals = [original]
        """The layer, until it is certain that it is not needed again. A list hides its parameters from torch."""
        self.is_read = False
        """The modelling reads the layer's weight, or another attribute, itself: so the layer is needed."""
        weight = original.weight.detach()
        self.linear = Linear(
            original.in_features,
            {"": original.out_features},
            bias=False,
            dtype=weight.dtype,
            device=weight.device,
            shared=weight,
            shared_bias=None if original.bias is None else original.bias.detach(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, in] -> […, out]"""
        return self.linear(_rows(x, self.linear.in_features)).view(*x.shape[:-1], self.linear.out_features)

    def __getattr__(self, name: str) -> Any:
        """An attribute of the layer, as long as that is there; this is noted."""
        originals = self.__dict__.get("originals")
        if not originals or not hasattr(originals[0], name):
            return super().__getattr__(name)
        self.is_read = True
        return getattr(originals[0], name)


class GatedMLPStandin(torch.nn.Module):
    """Stands for an MLP of three linear layers: down(act(gate(x)) * up(x))."""

    def __init__(self, parts: dict[str, LinearStandin], activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """parts: gate_proj, up_proj and down_proj; the first two become views of one matrix.
        activation: [rows, 2 * size], gate then up -> [rows, size]."""
        super().__init__()
        gate, up = parts["gate_proj"].linear, parts["up_proj"].linear
        assert gate.weight is not None and up.weight is not None
        weight = torch.cat((gate.weight, up.weight))
        bias = None if gate.bias is None or up.bias is None else torch.cat((gate.bias, up.bias))
        sizes = {"gate_proj": gate.out_features, "up_proj": up.out_features}
        self.linear = Linear(
            gate.in_features,
            sizes,
            bias=False,
            dtype=weight.dtype,
            device=weight.device,
            shared=weight,
            shared_bias=bias,
        )
        # The only copy: the layers that it was made of can still take their places again.
        gate.read_from(weight[: gate.out_features])
        up.read_from(weight[gate.out_features :])
        self.down_proj: LinearStandin = parts["down_proj"]
        self._activation = activation
        self._width, self._out_features = gate.out_features, self.down_proj.linear.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, in] -> […, out]"""
        gate_up = self.linear(_rows(x, self.linear.in_features))
        return self.down_proj(self._activation(gate_up)).view(*x.shape[:-1], self._out_features)

    def use_kernels(self, ops: SizedOps) -> None:
        """Compute with the kernels of a device, where they give the same numbers."""
        if self._activation is not silu_and_mul:
            return
        assert self.linear.weight is not None, "to be asked before the product is chosen"
        op, rows = ops.silu_and_mul(self._width), _random_rows(2 * self._width, self.linear.weight, SCALES)
        if _is_close(op(rows), silu_and_mul(rows)):
            self._activation = op


class NormStandin(torch.nn.Module):
    """Stands for an RMSNorm of transformers that multiplies by its weight."""

    def __init__(self, weight: torch.nn.Parameter, eps: float) -> None:
        """weight: [size]"""
        super().__init__()
        self.weight: torch.nn.Parameter = weight
        self._eps, self._shape = eps, weight.shape
        self._op: RMSNormOp | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, size] -> the same shape"""
        if self._op is not None and x.dtype == self.weight.dtype:
            return self._op(x.reshape(-1, *self._shape), self.weight, self._eps).view(x.shape)
        return F.rms_norm(x, self._shape, self.weight, self._eps)

    def use_kernels(self, ops: SizedOps) -> None:
        """Compute with the kernels of a device, where they give the same numbers."""
        op, rows = ops.rms_norm(len(self.weight)), self.trial_rows()
        if _is_close(op(rows, self.weight, self._eps), self(rows)):
            self._op = op

    def trial_rows(self) -> torch.Tensor:
        """[rows, size], some so small that eps decides what becomes of them."""
        return _random_rows(len(self.weight), self.weight, (*SCALES, self._eps**0.5))


class EmbeddingStandin(torch.nn.Module):
    """Stands for an embedding of torch, and looks tokens up in other memory."""

    def __init__(self, rows: torch.Tensor, dtype: torch.dtype) -> None:
        """rows: [vocab, size], of any float dtype; dtype: of what is looked up."""
        super().__init__()
        self._rows, self._dtype = rows, dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 […] -> […, size]"""
        return F.embedding(ids, self._rows).to(self._dtype)


def norm_standin(module: torch.nn.Module) -> NormStandin | None:
    """The stand-in for an RMSNorm; None for any other module, also for the norms of Gemma, which multiply by
    1 + weight."""
    weights, eps = dict(module.named_parameters()), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(eps, float):
        return None
    if set(weights) != {"weight"} or weights["weight"].dim() != 1 or any(True for _ in module.buffers()):
        return None
    standin = NormStandin(weights["weight"], eps)
    return standin if _computes_the_same(standin, module, standin.trial_rows()) else None


def gated_mlp_standin(module: torch.nn.Module) -> GatedMLPStandin | None:
    """The stand-in for a gated MLP, whose linear layers have stand-ins; None for any other module."""
    parts = {name: child for name, child in module.named_children() if isinstance(child, LinearStandin)}
    others = [child for name, child in module.named_children() if name not in parts]
    if (
        set(parts) != {"gate_proj", "up_proj", "down_proj"}
        or len(others) != 1
        or any(True for _ in module.parameters())
    ):
        return None
    gate, up = parts["gate_proj"].linear, parts["up_proj"].linear
    if gate.weight is None or up.weight is None or gate.weight.shape != up.weight.shape:
        return None
    if (gate.bias is None) != (up.bias is None):
        return None
    activation = _gated_by(others[0])
    if activation is None:
        return None
    rows = _random_rows(gate.in_features, gate.weight, SCALES)
    is_same = _computes_the_same(_SeparateMLP(parts, activation), module, rows)
    return GatedMLPStandin(parts, activation) if is_same else None


def _gated_by(activation: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The gated form of an activation. In float32: GELU and its approximation differ by less than bfloat16 rounds."""
    gate = torch.linspace(-6.0, 6.0, 101)[None]
    gate = torch.cat([scale * gate for scale in SCALES], dim=-1)
    for gated in dict.fromkeys(GATED.values()):
        wanted = gated(torch.cat((gate, torch.ones_like(gate)), dim=-1))
        try:
            if torch.allclose(activation(gate), wanted, atol=1e-6):
                return gated
        except Exception:  # it takes other arguments
            return None
    return None


class _SeparateMLP(torch.nn.Module):
    """What a stand-in would compute, before anything is copied."""

    def __init__(self, parts: dict[str, LinearStandin], activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._parts, self._activation = parts, activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = torch.cat((self._parts["gate_proj"](x), self._parts["up_proj"](x)), dim=-1)
        return self._parts["down_proj"](self._activation(gate_up))


def _rows(x: torch.Tensor, size: int) -> torch.Tensor:
    """[…, size] -> [rows, size], the numbers of a row side by side: Numba's products read no others."""
    rows = x.reshape(-1, size)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _random_rows(size: int, like: torch.Tensor, scales: Sequence[float]) -> torch.Tensor:
    """[scales, size], a row of each scale, of the dtype and on the device of ``like``."""
    rows = torch.randn(len(scales), size, generator=torch.Generator().manual_seed(0))
    return (rows * torch.tensor(scales)[:, None]).to(like.device, like.dtype)


def _computes_the_same(standin: torch.nn.Module, module: torch.nn.Module, rows: torch.Tensor) -> bool:
    try:
        expected = module(rows)
        return isinstance(expected, torch.Tensor) and _is_close(standin(rows), expected)
    except Exception:  # it takes other arguments
        return False


def _is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within rounding, which is judged by the largest number of a row. Rows that overflow do not count, but the first
    must not."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    allowed, is_finite = tolerance(expected.dtype), expected.isfinite().all(dim=-1)
    found, expected = found[is_finite].float(), expected[is_finite].float()
    sizes = expected.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30)
    return bool(is_finite[0]) and torch.allclose(found / sizes, expected / sizes, atol=allowed, rtol=allowed)
