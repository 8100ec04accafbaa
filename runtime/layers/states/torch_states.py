"""The recurrences over states in torch: the oracle of all kernels, and what runs where there are none.

Segments of one length are computed together. Longer ones are cut into chunks, within which the delta rule and Mamba 2's
scan are matrix products; from chunk to chunk only the state goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from .ops import DeltaHeads, SsdHeads, StateOps
from .state_batch import StateBatch

CHUNK = 64
"""Tokens that are computed as matrix products."""

NORM_EPS = 1e-6
"""Added to the square of |q| and |k|."""


class Segments(NamedTuple):
    """Segments of one length, which do not depend on each other."""

    tokens: torch.Tensor
    """int64 [n, length], on the device."""
    sources: torch.Tensor
    """int64 [n]: slots to start from."""
    targets: torch.Tensor
    """int64 [n]: slots to write."""

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """[tokens, …] -> [n, length, …]"""
        return rows[self.tokens]


def segments(states: StateBatch) -> Iterator[Segments]:
    """All segments of a step, each after the one that it continues."""
    for wave in states.waves:
        lengths = wave.stops - wave.starts
        for length in np.unique(lengths):
            picked = np.flatnonzero(lengths == length)
            tokens = wave.starts[picked, None] + np.arange(length)
            of_length = torch.from_numpy(picked).to(wave.sources.device)
            yield Segments(
                torch.from_numpy(tokens).to(wave.sources.device),
                wave.sources.index_select(0, of_length),
                wave.targets.index_select(0, of_length),
            )


def short_conv(
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
    taps = weight.float()
    for part in segments(states):
        window = torch.cat((conv.index_select(0, part.sources), part.of(inputs)), dim=1)
        length = part.tokens.shape[1]
        total = sum(taps[tap] * window[:, tap : tap + length].float() for tap in range(len(taps)))
        assert isinstance(total, torch.Tensor)
        if bias is not None:
            total = total + bias.float()
        if silu:
            total = F.silu(total)
        out[part.tokens] = total.to(x.dtype)
        conv.index_copy_(0, part.targets, window[:, length:])
    return out if after is None else out.mul_(after)


def gated_delta(
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
    by_channel = a.shape[1] != heads.value_heads
    out = torch.empty(len(qkv), values, dtype=qkv.dtype, device=qkv.device)
    beta = b.float().sigmoid() * heads.step_scale
    decay = F.softplus(a.float() + dt_bias).unflatten(1, (heads.value_heads, -1)) * -rate[:, None]
    for part in segments(states):
        q, k, v = part.of(qkv).float().split((keys, keys, values), dim=-1)
        repeats = heads.value_heads // heads.key_heads
        q, k = (_unit(each.unflatten(-1, (heads.key_heads, -1))).repeat_interleave(repeats, 2) for each in (q, k))
        q = q * heads.key_size**-0.5
        v = v.unflatten(-1, (heads.value_heads, -1))
        state = recurrent.index_select(0, part.sources)
        walk = _delta_steps if by_channel or part.tokens.shape[1] == 1 else _delta_chunks
        q, k, v, own_decay, step = (
            each.transpose(1, 2) for each in (q, k, v, part.of(decay), part.of(beta)[..., None])
        )
        found, state = walk(q, k, v, own_decay, step, state)
        out[part.tokens] = found.transpose(1, 2).flatten(2).to(qkv.dtype)
        recurrent.index_copy_(0, part.targets, state)
    return out


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + NORM_EPS)


def _delta_steps(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k [n, heads, length, key_size]; v [n, heads, length, value_size]; decay [n, heads, length, 1 or key_size];
    beta [n, heads, length, 1]; state [n, heads, key_size, value_size] -> (result [n, heads, length, value_size],
    state), token by token."""
    found = torch.empty_like(v)
    for token in range(v.shape[2]):
        key, query = k[:, :, token, :, None], q[:, :, token, None, :]
        state = state * decay[:, :, token, :, None].exp()
        change = (v[:, :, token, None, :] - key.transpose(-1, -2) @ state) * beta[:, :, token, None]
        state = state + key * change
        found[:, :, token] = (query @ state).squeeze(-2)
    return found, state


def _delta_chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with one decay for each head, chunk by chunk (the WY form of Yang et al. 2024): with D[i, j] the decay
    from token j to token i, the changes U of a chunk are those of

        (I + strictly lower part of β (K Kᵀ ∘ D)) U = β (V − D₀ K S)
    """
    found = torch.empty_like(v)
    for begin in range(0, v.shape[2], CHUNK):
        own = slice(begin, begin + CHUNK)
        query, key, value, step = q[:, :, own], k[:, :, own], v[:, :, own], beta[:, :, own]
        total = decay[:, :, own].cumsum(dim=2)
        between = (total - total.transpose(-1, -2)).tril().exp().tril()
        system = step * (key @ key.transpose(-1, -2)) * between
        wanted = step * (value - (key * total.exp()) @ state)
        changes = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        within = (query @ key.transpose(-1, -2)) * between
        found[:, :, own] = (query * total.exp()) @ state + within @ changes
        last = total[:, :, -1:]
        state = state * last.exp() + (key * (last - total).exp()).transpose(-1, -2) @ changes
    return found, state


def ssd(
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
    for part in segments(states):
        x, b, c = part.of(xbc).float().split(sizes, dim=-1)
        x = x.unflatten(-1, (heads.heads, -1)).transpose(1, 2)
        repeats = heads.heads // heads.groups
        b, c = (each.unflatten(-1, (heads.groups, -1)).repeat_interleave(repeats, 2).transpose(1, 2) for each in (b, c))
        delta = part.of(step).transpose(1, 2)[..., None]
        if part.tokens.shape[1] > 1:
            delta = delta.clamp(*heads.limits)
        found, state = _ssd_chunks(
            x * delta, -rate[:, None, None] * delta, b, c, recurrent.index_select(0, part.sources)
        )
        out[part.tokens] = (found + skip[:, None, None] * x).transpose(1, 2).flatten(2).to(xbc.dtype)
        recurrent.index_copy_(0, part.targets, state)
    return out


def _ssd_chunks(
    x: torch.Tensor, decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n, heads, length, head_size], steps included; decay [n, heads, length, 1]; b, c [n, heads, length,
    state_size]; state [n, heads, head_size, state_size] -> (result, as x; state), chunk by chunk: within one, results
    are products as in attention (Dao and Gu 2024)."""
    found = torch.empty_like(x)
    for begin in range(0, x.shape[2], CHUNK):
        own = slice(begin, begin + CHUNK)
        inputs, key, query = x[:, :, own], b[:, :, own], c[:, :, own]
        total = decay[:, :, own].cumsum(dim=2)
        between = (total - total.transpose(-1, -2)).tril().exp().tril()
        within = (query @ key.transpose(-1, -2)) * between
        found[:, :, own] = within @ inputs + (query * total.exp()) @ state.transpose(-1, -2)
        last = total[:, :, -1:]
        state = state * last.exp() + inputs.transpose(-1, -2) @ (key * (last - total).exp())
    return found, state


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    rate: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    skip: torch.Tensor,
    recurrent: torch.Tensor,
    states: StateBatch,
) -> torch.Tensor:
    """See ops.SelectiveScanOp."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    step = F.softplus(dt.float())
    for part in segments(states):
        inputs, delta = part.of(x).float(), part.of(step)
        keys, queries = part.of(b).float(), part.of(c).float()
        state, found = recurrent.index_select(0, part.sources), torch.empty_like(inputs)
        for token in range(inputs.shape[1]):
            decay = (-rate * delta[:, token, :, None]).exp()
            state = decay * state + (delta[:, token] * inputs[:, token])[..., None] * keys[:, token, None, :]
            found[:, token] = (state @ queries[:, token, :, None]).squeeze(-1)
        out[part.tokens] = (found + skip * inputs).to(x.dtype)
        recurrent.index_copy_(0, part.targets, state)
    return out


def gated_norm(
    y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, size: int, *, norms_first: bool
) -> torch.Tensor:
    """See ops.GatedNormOp."""
    found, gate = y.float(), F.silu(z.float())
    if not norms_first:
        found = found * gate
    found = F.rms_norm(found.unflatten(-1, (-1, size)), (size,), None, eps).flatten(-2) * weight.float()
    return (found * gate if norms_first else found).to(y.dtype)


def silu_gate(y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """See ops.GateOp."""
    return (y.float() * F.silu(z.float())).to(y.dtype)


def sigmoid_gate(y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """See ops.GateOp."""
    return (y.float() * z.float().sigmoid()).to(y.dtype)


TORCH_STATES = StateOps(
    short_conv=short_conv,
    gated_delta=gated_delta,
    ssd=ssd,
    selective_scan=selective_scan,
    gated_norm=gated_norm,
    silu_gate=silu_gate,
    sigmoid_gate=sigmoid_gate,
)
