"""Operations of `ops.StateOps` for a CPU by the kernels of numba_ops/state_kernels.py: calls of attention's team.

They walk through the tokens of a row, also of a long prompt: a head's state stays in a core's first cache, so that this
costs little beside the products of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from ctypes import c_float
from typing import Any

import torch

from ....attention.numba_paged.kinds import KINDS
from ....attention.numba_paged.team import Call, Team
from ..numba_ops import state_arguments as k
from ..numba_ops.state_kernels import conv_kernel, delta_kernel, gate_by_kernel, gated_norm_kernel, ssd_kernel
from .ops import DeltaHeads, SsdHeads, StateOps
from .state_batch import StateBatch
from .torch_states import TORCH_STATES

ONE_THREAD = 1 << 15
"""Numbers that one thread works through before another is awake."""


def load(dtype: torch.dtype, team: Team) -> StateOps:
    """The operations for models of a dtype. Kernels are compiled when they are first called; all calls come from one
    thread at a time. Mamba 1 has no kernel. Raises TypeError for a dtype without kernels."""
    kind = str(dtype).removeprefix("torch.")
    if kind not in KINDS:
        raise TypeError(f"there are no kernels for {kind}")
    kernels = Kernels(team, kind)
    return StateOps(
        short_conv=kernels.short_conv,
        gated_delta=kernels.gated_delta,
        ssd=kernels.ssd,
        selective_scan=TORCH_STATES.selective_scan,
        gated_norm=kernels.gated_norm,
        silu_gate=kernels.silu_gate,
        sigmoid_gate=kernels.sigmoid_gate,
        is_recordable=True,
    )


class Kernels:
    """One call for each shape."""

    def __init__(self, team: Team, kind: str) -> None:
        self._team, self._kind = team, kind
        self._calls: dict[Hashable, tuple[Call, c_float]] = {}

    def _call(self, make: Callable[..., Any], *sizes: Hashable, **switches: Hashable) -> tuple[Call, c_float]:
        """The call, and its epsilon."""
        key = make, sizes, *switches.values()
        if key not in self._calls:
            call = Call(make(*sizes, **switches), k.ARGUMENTS)
            self._calls[key] = call, c_float.from_buffer(call.arguments, 8 * k.EPS)
        return self._calls[key]

    def _run(self, call: Call, numbers: int) -> None:
        """numbers: that the call works through, to find out how many threads it takes."""
        call.arguments[k.NEXT] = 0
        self._team.run(call, 1 if numbers <= ONE_THREAD else torch.get_num_threads())

    def short_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        conv: torch.Tensor,
        states: StateBatch,
        *,
        silu: bool = False,
        before: torch.Tensor | None = None,
        after: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ops.ShortConvOp."""
        taps, channels = weight.shape
        call, _ = self._call(
            conv_kernel,
            channels,
            taps,
            self._kind,
            silu=silu,
            has_bias=bias is not None,
            is_gated=before is not None,
        )
        assert (before is None) == (after is None), "inputs and results are gated, or neither"
        out, a = self._team.empty((len(x), channels), x.dtype), call.arguments
        a[k.TABLE], a[k.X], a[k.X_STEP], a[k.OUT] = states.table.address, x.data_ptr(), _step(x), out.data_ptr()
        a[k.WEIGHT], a[k.BIAS] = weight.data_ptr(), 0 if bias is None else bias.data_ptr()
        a[k.STATE], a[k.SLOT_STEP] = conv.data_ptr(), _step(conv)
        for gate, at, step in ((before, k.BEFORE, k.BEFORE_STEP), (after, k.AFTER, k.AFTER_STEP)):
            if gate is not None:
                a[at], a[step] = gate.data_ptr(), _step(gate)
        self._run(call, out.numel() * taps)
        return out

    def gated_delta(
        self,
        qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        rate: torch.Tensor,
        dt_bias: torch.Tensor,
        heads: DeltaHeads,
        recurrent: torch.Tensor,
        states: StateBatch,
    ) -> torch.Tensor:
        """See ops.GatedDeltaOp."""
        sizes = heads.key_heads, heads.value_heads, heads.key_size, heads.value_size
        by_channel = a.shape[1] != heads.value_heads
        call, _ = self._call(delta_kernel, *sizes, self._kind, by_channel=by_channel, step_scale=heads.step_scale)
        out = self._team.empty((len(qkv), heads.value_heads * heads.value_size), qkv.dtype)
        self._set_scan(call, qkv, out, recurrent, states)
        arguments = call.arguments
        arguments[k.A], arguments[k.A_STEP] = a.data_ptr(), _step(a)
        arguments[k.B], arguments[k.B_STEP] = b.data_ptr(), _step(b)
        arguments[k.RATE], arguments[k.DT_BIAS] = rate.data_ptr(), dt_bias.data_ptr()
        self._run(call, out.numel() * heads.key_size)
        return out

    def ssd(
        self,
        xbc: torch.Tensor,
        dt: torch.Tensor,
        rate: torch.Tensor,
        dt_bias: torch.Tensor,
        skip: torch.Tensor,
        heads: SsdHeads,
        recurrent: torch.Tensor,
        states: StateBatch,
    ) -> torch.Tensor:
        """See ops.SsdOp."""
        sizes = heads.heads, heads.head_size, heads.groups, heads.state_size
        call, _ = self._call(ssd_kernel, *sizes, self._kind, heads.limits)
        out = self._team.empty((len(xbc), heads.width), xbc.dtype)
        self._set_scan(call, xbc, out, recurrent, states)
        arguments = call.arguments
        arguments[k.A], arguments[k.A_STEP] = dt.data_ptr(), _step(dt)
        arguments[k.RATE], arguments[k.DT_BIAS] = rate.data_ptr(), dt_bias.data_ptr()
        arguments[k.SKIP] = skip.data_ptr()
        self._run(call, out.numel() * heads.state_size)
        return out

    @staticmethod
    def _set_scan(call: Call, x: torch.Tensor, out: torch.Tensor, recurrent: torch.Tensor, states: StateBatch) -> None:
        a = call.arguments
        a[k.TABLE], a[k.X], a[k.X_STEP], a[k.OUT] = states.table.address, x.data_ptr(), _step(x), out.data_ptr()
        a[k.STATE], a[k.SLOT_STEP] = recurrent.data_ptr(), _step(recurrent)

    def gated_norm(
        self, y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, size: int, *, norms_first: bool
    ) -> torch.Tensor:
        """See ops.GatedNormOp."""
        call, epsilon = self._call(gated_norm_kernel, y.shape[1], size, self._kind, norms_first=norms_first)
        epsilon.value = eps
        call.arguments[k.WEIGHT] = weight.data_ptr()
        return self._gated(call, y, z)

    def silu_gate(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """See ops.GateOp."""
        return self._gated(self._call(gate_by_kernel, y.shape[1], self._kind, silu=True)[0], y, z)

    def sigmoid_gate(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """See ops.GateOp."""
        return self._gated(self._call(gate_by_kernel, y.shape[1], self._kind, silu=False)[0], y, z)

    def _gated(self, call: Call, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        out, a = self._team.empty(tuple(y.shape), y.dtype), call.arguments
        a[k.COUNT], a[k.X], a[k.X_STEP], a[k.OUT] = len(y), y.data_ptr(), _step(y), out.data_ptr()
        a[k.Z], a[k.Z_STEP] = z.data_ptr(), _step(z)
        self._run(call, 4 * out.numel())
        return out


def _step(rows: torch.Tensor) -> int:
    """Bytes from one row to the next."""
    return rows.stride(0) * rows.element_size()
