"""Blocks of GGUF files, compared with the dequantisation of the package gguf."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="gguf is in the extra [dev]")

import gguf

from baton.runtime.checkpoint.gguf_blocks import QUANTISED, unpack_blocks
from baton.runtime.checkpoint.gguf_header import BLOCK_TYPES, PLAIN_TYPES, QUANTISED_TYPES

OUT, INTO = 48, 512
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2],
    "Q6_K": [208], "MXFP4": [],
}  # fmt: skip
"""Bytes of a block at which a float16 begins."""
ROUNDED = ("Q4_K", "Q5_K", "Q6_K")
"""Types whose scales are products, which are rounded to float16."""


def random_blocks(kind: str, seed: int) -> np.ndarray:
    """uint8 [OUT, bytes]: all bits are random but those of the scales."""
    rng = np.random.default_rng(seed)
    block = next(block for block in BLOCK_TYPES.values() if block.name == kind)
    blocks = rng.integers(0, 256, (OUT * INTO // block.numbers, block.num_bytes), dtype=np.uint8)
    for start in HALVES[kind]:
        scales = (rng.standard_normal(len(blocks)) * 0.01).astype(np.float16)
        blocks[:, start : start + 2] = scales.view(np.uint8).reshape(-1, 2)
    if kind == "MXFP4":
        blocks[:, 0] = rng.integers(110, 130, len(blocks))
    return blocks.reshape(OUT, -1)


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("seed", range(3))
def test_numbers_are_those_of_the_package(kind, seed):
    blocks = random_blocks(kind, seed)
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind]).copy())
    block = next(block for block in BLOCK_TYPES.values() if block.name == kind)
    weight = unpack_blocks(kind, torch.from_numpy(blocks).view(-1, block.num_bytes), OUT)
    assert weight.shape == (OUT, INTO) and str(weight.form).startswith(("int4", "int8", "mxfp4"))
    found = weight.dequantized()
    if kind not in ROUNDED:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        return
    # The products of two scales, and the numbers between which they span, lose what a float16 rounds.
    assert weight.scales is not None
    spans = [table.float().abs() for table in (weight.scales, weight.mins) if table is not None]
    span = sum((each * top for each, top in zip(spans, (32, 1), strict=False)), torch.zeros(()))
    span = (span * weight.rows[:, None]).repeat_interleave(weight.form.group, 1)
    assert bool(((found - expected).abs() <= span * 2**-11).all())
    assert float((found - expected).abs().mean()) < 2e-4 * float(expected.abs().mean())


def test_scales_of_k_quants_keep_their_range():
    """Products of large scales leave the range of float16."""
    blocks = random_blocks("Q4_K", 5).reshape(-1, 144)
    blocks[:, :4] = np.full((len(blocks), 2), 3e4, np.float16).view(np.uint8)
    expected = gguf.quants.dequantize(blocks.reshape(OUT, -1), gguf.GGMLQuantizationType.Q4_K)
    weight = unpack_blocks("Q4_K", torch.from_numpy(blocks), OUT)
    error = (weight.dequantized() - torch.from_numpy(expected.copy())).abs().max()
    assert float(weight.rows.max()) > 1 and float(error) < 2**-10 * float(np.abs(expected).max())


def test_table_of_types_is_that_of_the_package():
    for number, block in BLOCK_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, *gguf.GGML_QUANT_SIZES[kind]) == (block.name, block.numbers, block.num_bytes)
    assert {int(kind) for kind in gguf.GGMLQuantizationType} <= set(BLOCK_TYPES)
    assert set(QUANTISED) == set(QUANTISED_TYPES) and not set(QUANTISED) & set(PLAIN_TYPES)
