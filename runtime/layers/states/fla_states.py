"""The recurrences on a GPU, by the kernels of flash-linear-attention and causal-conv1d.

flash-linear-attention computes segments of any lengths at once, one after the other in one tensor, with their bounds
beside them; causal-conv1d shifts one token into each window. Mamba 2's scan is linear attention with one decay for each
head (Dao and Gu 2024): B are its keys, Δx its values, C its queries.

Only public functions are called: `fla.ops`, `fla.modules` and `causal_conv1d`. `load` imports them, so nothing of them
is imported on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from .ops import DeltaHeads, SsdHeads, StateOps
from .state_batch import PackedWave, StateBatch
from .torch_states import TORCH_STATES


@dataclass(frozen=True, slots=True)
class _Walk:
    """A recurrence over packed segments: token by token, and in chunks as matrix products."""

    steps: Callable[..., Any]
    chunks: Callable[..., Any]

    def __call__(
        self, part: PackedWave, recurrent: torch.Tensor, tensors: dict[str, torch.Tensor], **options: Any
    ) -> torch.Tensor:
        """tensors: [tokens, heads, …]. Returns [tokens, heads, value_size], and writes the states of the segments."""
        packed = {name: tensor[None] for name, tensor in tensors.items()}
        options |= {"initial_state": recurrent.index_select(0, part.sources), "output_final_state": True}
        if part.is_single:
            found, states = self.steps(**packed, cu_seqlens=part.bounds, **options)
        else:
            found, states = self.chunks(**packed, cu_seqlens=part.bounds, cu_seqlens_cpu=part.host_bounds, **options)
        recurrent.index_copy_(0, part.targets, states)
        return found[0]


@dataclass(frozen=True, slots=True)
class FlaStates:
    """convolve: fla's `causal_conv1d`. update: causal-conv1d's `causal_conv1d_update`; None without that package."""

    convolve: Callable[..., Any]
    update: Callable[..., Any] | None
    delta: _Walk
    delta_by_channel: _Walk
    attend: _Walk

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
        inputs = x if before is None else x * before
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        by_channel = weight.t().contiguous()
        activation = "silu" if silu else None
        for part in states.packed:
            windows = conv.index_select(0, part.sources).transpose(1, 2)
            if part.is_single and self.update is not None:
                found = self.update(part.of(inputs), windows, by_channel, bias, activation)
            else:
                # fla's states are as wide as the filter; the oldest input is of no use to the next token.
                found, windows = self.convolve(
                    part.of(inputs)[None], by_channel, bias, initial_state=F.pad(windows, (1, 0)),
                    output_final_state=True, activation=activation, cu_seqlens=part.bounds,
                    cu_seqlens_cpu=part.host_bounds,
                )  # fmt: skip
                found, windows = found[0], windows[..., 1:]
            part.put(out, found)
            conv.index_copy_(0, part.targets, windows.transpose(1, 2).to(conv.dtype))
        return out if after is None else out.mul_(after)

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
        keys, values = heads.key_heads * heads.key_size, heads.value_heads * heads.value_size
        out = torch.empty(len(qkv), values, dtype=qkv.dtype, device=qkv.device)
        beta = b.float().sigmoid() * heads.step_scale
        decay = F.softplus(a.float() + dt_bias).unflatten(1, (heads.value_heads, -1)) * -rate[:, None]
        walk = self.delta_by_channel
        if a.shape[1] == heads.value_heads:
            walk, decay = self.delta, decay[:, :, 0]
        for part in states.packed:
            q, k, v = part.of(qkv).split((keys, keys, values), dim=1)
            tensors = {
                "q": q.unflatten(1, (heads.key_heads, -1)),
                "k": k.unflatten(1, (heads.key_heads, -1)),
                "v": v.unflatten(1, (heads.value_heads, -1)),
                "g": part.of(decay),
                "beta": part.of(beta),
            }
            scale = heads.key_size**-0.5
            found = walk(part, recurrent, tensors, scale=scale, use_qk_l2norm_in_kernel=True)
            part.put(out, found.flatten(1))
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
        sizes = heads.width, heads.groups * heads.state_size, heads.groups * heads.state_size
        out = torch.empty(len(xbc), heads.width, dtype=xbc.dtype, device=xbc.device)
        step = F.softplus(dt.float() + dt_bias)
        bounded = step.clamp(*heads.limits)
        for part in states.packed:
            x, b, c = part.of(xbc).split(sizes, dim=1)
            x = x.unflatten(1, (heads.heads, -1))
            delta = torch.where(part.alone[:, None], part.of(step), part.of(bounded))
            tensors = {
                "q": self._of_heads(c, heads),
                "k": self._of_heads(b, heads),
                "v": (x * delta[..., None]).to(xbc.dtype),
                "g": -rate * delta,
            }
            found = self.attend(part, recurrent, tensors, scale=1.0, state_v_first=True)
            part.put(out, (found + skip[:, None] * x).flatten(1).to(xbc.dtype))
        return out

    def _of_heads(self, each: torch.Tensor, heads: SsdHeads) -> torch.Tensor:
        """[tokens, groups · state_size] -> [tokens, heads, state_size]"""
        return each.unflatten(1, (heads.groups, -1)).repeat_interleave(heads.heads // heads.groups, 1)


def load() -> StateOps:
    """What flash-linear-attention computes; all else is torch's. Raises ImportError without that package, and whatever
    importing compiled code may raise."""
    from fla.modules.causal_conv1d import causal_conv1d  # pyright: ignore[reportMissingImports]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule  # pyright: ignore[reportMissingImports]
    from fla.ops.kda import chunk_kda, fused_recurrent_kda  # pyright: ignore[reportMissingImports]
    from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla  # pyright: ignore[reportMissingImports]

    try:  # by name: it is compiled on the spot, so no extra brings it
        update = import_module("causal_conv1d").causal_conv1d_update
    except ImportError:
        update = None
    states = FlaStates(
        convolve=causal_conv1d,
        update=update,
        delta=_Walk(fused_recurrent_gated_delta_rule, chunk_gated_delta_rule),
        delta_by_channel=_Walk(fused_recurrent_kda, chunk_kda),
        attend=_Walk(fused_recurrent_simple_gla, chunk_simple_gla),
    )
    return replace(TORCH_STATES, short_conv=states.short_conv, gated_delta=states.gated_delta, ssd=states.ssd)
