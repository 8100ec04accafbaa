"""Counter-based noise: a pure function of (seed, output position, token id), with no generator and no state.

So a request draws the same tokens alone, in any batch, after a retraction and on every tensor-parallel rank. The idea
is that of counter-based generators (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011); the mixing
functions are the finalisers of SplitMix64 (Steele et al., 2014) on the host and MurmurHash3 (Appleby) on the device.

Sampling: with E[v] ~ Exp(1) independent, argmax_v p[v] / E[v] is v with probability p[v] (the Gumbel-max trick without
its logarithms). p needs no normalisation, and a token's noise does not depend on which other tokens are candidates.
"""

from __future__ import annotations

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _splitmix64(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """int32 [n, 2]: the key of each draw, from seeds uint64 [n] and output positions [n] (0 is the first token)."""
    stream = _splitmix64(seeds.astype(np.uint64) + _GOLDEN)
    return _splitmix64(stream + positions.astype(np.uint64) * _GOLDEN).view(np.int32).reshape(-1, 2)


def exponential_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """float32 [n, m] of Exp(1) noise > 0, for keys int32 [n, 2] and token ids int32 [n, m] or [m]."""
    # An odd multiplier and an offset per draw, so that two draws see unrelated orders of the same ids. int32 wraps.
    h = token_ids * (keys[:, :1] | 1)
    h += keys[:, 1:]
    shifted = torch.empty_like(h)  # in place: fresh memory costs more than the arithmetic
    for shift, factor in ((16, -2048144789), (13, -1028477387), (16, None)):  # 0x85ebca6b, 0xc2b2ae35
        torch.bitwise_right_shift(h, shift, out=shifted)
        h ^= shifted.bitwise_and_((1 << (32 - shift)) - 1)  # makes the arithmetic shift a logical one
        if factor is not None:
            h *= factor
    # A uniform of 31 bits in (0, 1); small values keep full float precision, and those decide the draw.
    uniform = h.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()
