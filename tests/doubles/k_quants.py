"""Quantises to K-quants, which the package gguf only reads: plainly, group by group and bit by bit."""

from __future__ import annotations

import numpy as np


def quantise(numbers: np.ndarray, kind: str) -> np.ndarray:
    """float32 [rows, inputs], inputs a multiple of 256 -> uint8 [rows, bytes]. kind: Q4_K, Q5_K or Q6_K."""
    make = _q6_k if kind == "Q6_K" else lambda block: _with_minima(block, 4 if kind == "Q4_K" else 5)
    return np.stack([np.concatenate([make(block) for block in row.reshape(-1, 256)]) for row in numbers])


def _bytes_of(number: np.floating) -> np.ndarray:
    return np.array([number], np.float16).view(np.uint8)


def _with_minima(block: np.ndarray, bits: int) -> np.ndarray:
    """Eight groups of 32: d × scale × code − dmin × minimum, with scales and minima of 6 bits."""
    groups, top = block.reshape(8, 32), (1 << bits) - 1
    low = np.minimum(groups.min(1), 0)
    steps = np.maximum(groups.max(1), 0) / top - low / top
    d, dmin = (np.float16(max(table.max(), 1e-6) / 63) for table in (steps, -low))
    scales, mins = (np.rint(table / np.float32(of)).clip(0, 63).astype(int) for table, of in ((steps, d), (-low, dmin)))
    codes = np.zeros((8, 32), int)
    for group in range(8):
        step = float(d) * scales[group]
        if step:
            codes[group] = np.rint((groups[group] + float(dmin) * mins[group]) / step).clip(0, top)
    packed = np.zeros(12, np.uint8)
    for group in range(4):
        packed[group] = scales[group] | (scales[group + 4] >> 4) << 6
        packed[group + 4] = mins[group] | (mins[group + 4] >> 4) << 6
        packed[group + 8] = scales[group + 4] & 15 | (mins[group + 4] & 15) << 4
    fifth = np.zeros(32, np.uint8)
    for group in range(8):
        fifth |= ((codes[group] >> 4) << group).astype(np.uint8)
    low_bits = [(codes[pair] & 15 | (codes[pair + 1] & 15) << 4).astype(np.uint8) for pair in range(0, 8, 2)]
    return np.concatenate([_bytes_of(d), _bytes_of(dmin), packed, *([fifth] if bits == 5 else []), *low_bits])


def _q6_k(block: np.ndarray) -> np.ndarray:
    """Sixteen groups of 16: d × scale × (code − 32), with scales of 8 bits."""
    groups = block.reshape(16, 16)
    steps = np.abs(groups).max(1) / 31
    d = np.float16(max(steps.max(), 1e-6) / 127)
    scales = np.rint(steps / np.float32(d)).clip(0, 127).astype(int)
    codes = np.full((16, 16), 32)
    for group in range(16):
        if scales[group]:
            codes[group] = np.rint(groups[group] / (float(d) * scales[group])).clip(-32, 31) + 32
    low, high = np.zeros(128, np.uint8), np.zeros(64, np.uint8)
    for place, code in enumerate(codes.reshape(-1)):
        half, quarter, input_ = place // 128, place % 128 // 32, place % 32
        low[half * 64 + quarter % 2 * 32 + input_] |= (code & 15) << 4 * (quarter // 2)
        high[half * 32 + input_] |= (code >> 4) << 2 * quarter
    return np.concatenate([low, high, scales.astype(np.int8).view(np.uint8), _bytes_of(d)])
