"""How weights in few bits lie in memory, and by which instructions they are multiplied.

A processor's instructions for sums of products multiply groups of four bytes, and are asked for by feature (`DOT`):

    vnni      vpdpbusd: unsigned × signed, added to 32 bits. Weights are stored unsigned, with their offset; as many
              times the sum of the inputs is subtracted
    pairs     vpmaddubsw (AVX2): unsigned × signed, pairs added to 16 bits. It would overflow with weights up to 255,
              so 8 bits are stored signed, and the sign passes to the input
    sdot      aarch64: signed × signed
    plain     whatever LLVM makes of a multiplication

Weights lie in blocks of `WIDTH` outputs. A line of a block holds, output by output, four inputs in a word; with 4 bits
eight: the first four in the lower halves of the bytes.
"""

from __future__ import annotations

from ....attention.numba_paged.target import has

WIDTH = 32
"""Outputs of a block."""
SPAN = 32
"""Inputs with a scale of their own; 16 where a weight's scales are for so few."""
SIDE = 8
"""Bytes beside each span of a row: its scale, a float32, and what its sums start from (see `quantize_row`)."""


def _dot() -> tuple[str, int]:
    """The instructions to use, and the outputs that one of them adds to."""
    if has("avx512_vnni") and has("avx512_f"):
        return "vnni", 16
    if has("avx_vnni") or (has("avx512_vnni") and has("avx512_vl")):
        return "vnni", 8
    if has("avx2"):
        return "pairs", 8
    return ("sdot", 4) if has("dotprod") else ("plain", 8)


DOT, DOT_LANES = _dot()

MXFP4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers of MXFP4, by code."""
MXFP4_OFFSET = 12
"""Added to them, so that none is negative."""


def stores_signed(bits: int) -> bool:
    """True if weights of so many bits are stored less their offset."""
    return bits == 8 and DOT != "vnni"
