"""Operations of `ops.Ops` for a CPU, one kernel each: no copies between, and torch is called for memory only.

For a step of a few tokens it is calls that cost time, not arithmetic: torch takes ten of them to rotate q and k.
"""

from __future__ import annotations

from ctypes import c_float
from typing import Any

import torch

from ....attention.numba_paged.copying import RowCopy
from ....attention.numba_paged.kinds import KINDS
from ....attention.numba_paged.team import Call, Team
from ..ops import OpShape
from .kernels import (
    ANGLES,
    ARGUMENTS,
    COUNT,
    EPS,
    KEYS,
    NEXT,
    OUT,
    POSITIONS,
    RESIDUAL,
    SLOTS,
    VALUES,
    WEIGHT,
    X_STEP,
    X,
    gate_kernel,
    norm_kernel,
    rotate_kernel,
    sum_kernel,
)

ONE_THREAD = 1 << 16
"""Numbers that one thread works through before another is awake."""


def load(shape: OpShape, dtype: torch.dtype, team: Team, kv_dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Name in ops.Ops -> operation, for a model of this shape and dtype. kv_dtype: of the KV pool; None: the same. All
    calls come from one thread at a time. Raises whatever compiling raises."""
    kind, kv_kind = (str(each).removeprefix("torch.") for each in (dtype, kv_dtype or dtype))
    if kind not in KINDS:
        raise TypeError(f"there are no kernels for {kind}")
    return {
        "look_up": LookUp(team, shape.hidden_size, dtype),
        "add": Add(team, shape.hidden_size, kind),
        "rms_norm": RMSNorm(team, shape.hidden_size, kind),
        "add_rms_norm": AddRMSNorm(team, shape.hidden_size, kind),
        "silu_and_mul": SiluAndMul(team, shape.intermediate_size, kind),
        "rotate_and_store": RotateAndStore(team, shape, kind, kv_kind),
    }


class SizedOps:
    """See module_standins.SizedOps. One operation for each size."""

    def __init__(self, team: Team, dtype: torch.dtype) -> None:
        """Raises TypeError for a dtype without kernels."""
        self._team, self._kind = team, str(dtype).removeprefix("torch.")
        if self._kind not in KINDS:
            raise TypeError(f"there are no kernels for {self._kind}")
        self._norms: dict[int, RMSNorm] = {}
        self._gates: dict[int, SiluAndMul] = {}

    def rms_norm(self, size: int) -> RMSNorm:
        if size not in self._norms:
            self._norms[size] = RMSNorm(self._team, size, self._kind)
        return self._norms[size]

    def silu_and_mul(self, size: int) -> SiluAndMul:
        if size not in self._gates:
            self._gates[size] = SiluAndMul(self._team, size, self._kind)
        return self._gates[size]


class _Kernel:
    """A call over rows."""

    def __init__(self, team: Team, compiled: Any) -> None:
        self._team, self._call = team, Call(compiled, ARGUMENTS)
        self.arguments = self._call.arguments
        self._eps = c_float.from_buffer(self.arguments, 8 * EPS)

    def run(self, rows: int, numbers: int, eps: float = 0.0) -> None:
        """numbers: in all rows, to find out how many threads it takes."""
        self._eps.value = eps
        self.arguments[NEXT], self.arguments[COUNT] = 0, rows
        self._team.run(self._call, 1 if numbers <= ONE_THREAD else torch.get_num_threads())


class LookUp:
    """See ops.LookUpOp."""

    def __init__(self, team: Team, size: int, dtype: torch.dtype) -> None:
        self._team, self._size = team, size
        self._copies = {dtype: RowCopy(team, size, dtype, dtype, by_id=True)}

    def __call__(self, ids: torch.Tensor, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if table.dtype not in self._copies:  # a tied model's rows are those of its file
            self._copies[table.dtype] = RowCopy(self._team, self._size, table.dtype, dtype, by_id=True)
        return self._copies[table.dtype](table, ids)


class Add:
    """See ops.AddOp."""

    def __init__(self, team: Team, size: int, kind: str) -> None:
        self._team = team
        self._kernel = _Kernel(team, sum_kernel(size, kind))

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out, a = self._team.empty(x.shape, x.dtype), self._kernel.arguments
        a[X], a[RESIDUAL], a[OUT] = x.data_ptr(), y.data_ptr(), out.data_ptr()
        self._kernel.run(len(x), x.numel())
        return out


class RMSNorm:
    """See ops.RMSNormOp."""

    def __init__(self, team: Team, size: int, kind: str) -> None:
        self._team = team
        self._kernel = _Kernel(team, norm_kernel(size, kind, adds=False))

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x = x.contiguous()
        out, a = self._team.empty(x.shape, x.dtype), self._kernel.arguments
        a[X], a[OUT], a[WEIGHT] = x.data_ptr(), out.data_ptr(), weight.data_ptr()
        self._kernel.run(len(x), x.numel(), eps)
        return out


class AddRMSNorm:
    """See ops.AddRMSNormOp. Both results are where the arguments were."""

    def __init__(self, team: Team, size: int, kind: str) -> None:
        self._kernel = _Kernel(team, norm_kernel(size, kind, adds=True))

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        a = self._kernel.arguments
        a[X] = a[OUT] = x.data_ptr()
        a[RESIDUAL], a[WEIGHT] = residual.data_ptr(), weight.data_ptr()
        self._kernel.run(len(x), x.numel(), eps)
        return x, residual


class SiluAndMul:
    """See ops.SiluAndMulOp."""

    def __init__(self, team: Team, size: int, kind: str) -> None:
        self._team, self._size = team, size
        self._kernel = _Kernel(team, gate_kernel(size, kind))

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        out, a = self._team.empty((len(gate_up), self._size), gate_up.dtype), self._kernel.arguments
        a[X], a[OUT] = gate_up.data_ptr(), out.data_ptr()
        self._kernel.run(len(out), gate_up.numel())
        return out


class RotateAndStore:
    """See ops.RotateAndStoreOp. q stays where it was in qkv."""

    def __init__(self, team: Team, shape: OpShape, kind: str, kv_kind: str) -> None:
        self._team, self._kv_kind = team, kv_kind
        self._heads, self._head_dim = shape.num_heads, shape.head_dim
        self._sizes = shape.head_dim, shape.num_heads, shape.num_kv_heads, kind
        self._kernels: dict[bool, _Kernel] = {}
        self._kernel(norms=shape.qk_norm)

    def _kernel(self, *, norms: bool) -> _Kernel:
        """Layers may differ in this (Llama 4): what they need is compiled when the first of them is computed."""
        if norms not in self._kernels:
            kernel = rotate_kernel(*self._sizes, norms=norms, kv_kind=self._kv_kind)
            self._kernels[norms] = _Kernel(self._team, kernel)
        return self._kernels[norms]

    def __call__(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        rotary_table: torch.Tensor,
        slots: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        norm_weight: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        kernel = self._kernel(norms=norm_weight is not None)
        a = kernel.arguments
        a[X], a[POSITIONS], a[SLOTS] = qkv.data_ptr(), positions.data_ptr(), slots.data_ptr()
        a[X_STEP] = qkv.stride(0) * qkv.element_size()
        a[ANGLES], a[KEYS], a[VALUES] = rotary_table.data_ptr(), k_pool.data_ptr(), v_pool.data_ptr()
        a[WEIGHT] = 0 if norm_weight is None else norm_weight.data_ptr()
        kernel.run(len(qkv), qkv.numel(), eps)
        return qkv[:, : self._heads * self._head_dim].unflatten(1, (self._heads, self._head_dim))
