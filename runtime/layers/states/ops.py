"""The operations of layers with recurrent states, as a table of functions; a device may have faster kernels for them.

As with `ops.Ops`, a model is given one `StateOps` and always calls these. `torch_states.TORCH_STATES` runs on every
device and is the oracle for all other implementations. Tokens are the rows of a tensor; a row's numbers are contiguous,
and rows may be strided, as they are where they are part of a wider projection. Results are contiguous. Arithmetic is
done in float32 whatever the model's dtype, and a result is rounded once.

Every operation reads the states of its rows at ``states``' sources and writes those at its targets. Slot 0 holds zeros,
from which every recurrence here starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from .state_batch import StateBatch


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Sizes of a gated delta rule. Each key head serves value_heads / key_heads value heads next to each other."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    step_scale: float = 1.0
    """β is this × sigmoid: 2 lets the rule flip what it reads (Grazzi et al. 2024)."""

    @property
    def channels(self) -> int:
        """Numbers of a token's q, k and v together."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size


@dataclass(frozen=True, slots=True)
class SsdHeads:
    """Sizes of Mamba 2's scan. Each group's B and C serve heads / groups heads next to each other."""

    heads: int
    head_size: int
    groups: int
    state_size: int
    limits: tuple[float, float] = (0.0, float("inf"))
    """Bounds of a step's length Δ in segments of several tokens; one token alone is not bounded, as in the reference
    implementations."""

    @property
    def width(self) -> int:
        """Numbers of a token's x, and of the result."""
        return self.heads * self.head_size

    @property
    def channels(self) -> int:
        """Numbers of a token's x, B and C together."""
        return self.width + 2 * self.groups * self.state_size


class ShortConvOp(Protocol):
    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        conv: torch.Tensor,
        states: StateBatch,
        /,
        *,
        silu: bool = False,
        before: torch.Tensor | None = None,
        after: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A causal convolution of each channel over the last K tokens.

        x: [tokens, channels]. weight: [K, channels], the last row for the token itself; bias: [channels] or None.
        conv: one layer's states, [slots, K - 1, channels], the last inputs in order, in the dtype of x.
        silu: of the sum. before, after: [tokens, channels]; they multiply the inputs (which is then what the states
        hold) and the result (LFM2's double gate). Returns [tokens, channels].
        """
        ...


class GatedDeltaOp(Protocol):
    def __call__(
        self,
        qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        rate: torch.Tensor,
        dt_bias: torch.Tensor,
        heads: DeltaHeads,
        recurrent: torch.Tensor,
        states: StateBatch,
        /,
    ) -> torch.Tensor:
        """The gated delta rule (Yang et al. 2024), per value head over a state S [key_size, value_size]:

            q̂ = q / (|q| √key_size)    k̂ = k / |k|    β = step_scale · σ(b)    g = −rate · softplus(a + dt_bias)
            S ← e^g S    S ← S + k̂ (β (v − Sᵀk̂))ᵀ    result: Sᵀq̂

        qkv: [tokens, heads.channels], q, k and v. a: [tokens, value_heads], or [tokens, value_heads · key_size] where
        each channel of the keys has a decay of its own (Kimi Linear, 2025); b: [tokens, value_heads].
        rate: float32 [value_heads]; dt_bias: float32, as wide as a. recurrent: float32
        [slots, value_heads, key_size, value_size]. Returns [tokens, value_heads · value_size].
        """
        ...


class SsdOp(Protocol):
    def __call__(
        self,
        xbc: torch.Tensor,
        dt: torch.Tensor,
        rate: torch.Tensor,
        dt_bias: torch.Tensor,
        skip: torch.Tensor,
        heads: SsdHeads,
        recurrent: torch.Tensor,
        states: StateBatch,
        /,
    ) -> torch.Tensor:
        """Mamba 2's recurrence (Dao and Gu 2024), per head over a state S [head_size, state_size]:

            Δ = softplus(dt + dt_bias)    S ← e^(−rate · Δ) S + Δ x Bᵀ    result: S C + skip · x

        xbc: [tokens, heads.channels], x, B and C. dt: [tokens, heads]. rate, dt_bias, skip: float32 [heads].
        recurrent: float32 [slots, heads, head_size, state_size]. Returns [tokens, heads.width].
        """
        ...


class SelectiveScanOp(Protocol):
    def __call__(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        rate: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        skip: torch.Tensor,
        recurrent: torch.Tensor,
        states: StateBatch,
        /,
    ) -> torch.Tensor:
        """Mamba 1's recurrence (Gu and Dao 2023), per channel over a state s [state_size]:

            Δ = softplus(dt)    s ← e^(−rate · Δ) s + Δ x B    result: s · C + skip · x

        x, dt: [tokens, channels]; b, c: [tokens, state_size]. rate: float32 [channels, state_size]; skip: float32
        [channels]. recurrent: float32 [slots, channels, state_size]. Returns [tokens, channels].
        """
        ...


class GatedNormOp(Protocol):
    def __call__(
        self, y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, size: int, /, *, norms_first: bool
    ) -> torch.Tensor:
        """RMSNorm over each ``size`` numbers of a row, and a gate silu(z): norms_first says in which order.

        y, z: [tokens, width]; weight: [width], of the same dtype. Returns [tokens, width].
        """
        ...


class GateOp(Protocol):
    def __call__(self, y: torch.Tensor, z: torch.Tensor, /) -> torch.Tensor:
        """y, z: [tokens, width] -> y × act(z), [tokens, width]."""
        ...


@dataclass(frozen=True, slots=True)
class StateOps:
    """One implementation of each operation. All calls for a model come from one thread."""

    short_conv: ShortConvOp
    gated_delta: GatedDeltaOp
    ssd: SsdOp
    selective_scan: SelectiveScanOp
    gated_norm: GatedNormOp
    silu_gate: GateOp
    sigmoid_gate: GateOp
    is_recordable: bool = False
    """All but `selective_scan` are calls that attention's team can record."""
