"""A kernel that writes down the noise that the draws race with. Imported where Triton is."""

from __future__ import annotations

import triton
import triton.language as tl

from baton.runtime.sampling.triton_ops import _hash, _noise


@triton.jit
def write_noise(tokens, keys, bits, noise, count: tl.constexpr):
    """tokens int32 [count], keys int32 [2] -> bits int32 [count], noise float32 [count]."""
    place = tl.arange(0, count)
    token = tl.load(tokens + place)
    multiplier, offset = tl.load(keys), tl.load(keys + 1)
    tl.store(bits + place, _hash(token, multiplier, offset))
    tl.store(noise + place, _noise(token, multiplier, offset))
