"""`mask_ops.apply_masks_on_host` as a kernel of Numba's: one pass over the rows, whatever the masks look like.

torch's and numpy's loops take a branch for each token, and real masks are hard to predict: with 32 rows of 49,152
tokens this takes 0.3 ms, numpy 0.8 ms and `masked_fill_` up to 10 ms (one core of a Zen 4).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...attention.numba_paged.compiling import KernelFunction, kernel_builder
from ...attention.numba_paged.team import Call
from ...scheduler.constraints.constraint import TokenMasks
from .mask_ops import LARGEST_ALLOWED

LOGITS, STEP, VOCAB, MASKS, WORDS, ROWS, MASK_OF, COUNT, FINITE = range(1, 10)
"""Places in the kernel's arguments, an array of int64. STEP: bytes from one row of LOGITS to the next; WORDS: of a
mask; COUNT: of rows that are masked."""
ARGUMENTS = 10

LOW, HIGH, BANNED = np.float32(-LARGEST_ALLOWED), np.float32(LARGEST_ALLOWED), np.float32(-np.inf)
NOTHING, BIT = np.uint32(0), np.uint32(1)


def apply_masks(logits: torch.Tensor, masks: TokenMasks, finite: bool) -> None:
    """See `mask_ops.apply_masks_on_host`."""
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    bits = np.ascontiguousarray(masks.masks)
    rows, mask_of = (np.ascontiguousarray(each, dtype=np.int32) for each in (masks.rows, masks.mask_of))
    call = Call(masks_kernel(), ARGUMENTS)
    a = call.arguments
    a[LOGITS], a[STEP], a[VOCAB] = logits.data_ptr(), 4 * logits.stride(0), logits.shape[1]
    a[MASKS], a[WORDS], a[FINITE] = bits.ctypes.data, bits.shape[1], finite
    a[ROWS], a[MASK_OF], a[COUNT] = rows.ctypes.data, mask_of.ctypes.data, len(rows)
    call.run_here()


@kernel_builder
def masks_kernel() -> KernelFunction:
    """For one thread."""
    from ...attention.numba_paged.operations import peek, peek_float
    from .numba_intrinsics import peek_word, poke_float

    def kernel(a: Any) -> None:
        vocab_size, words, finite = peek(a + 8 * VOCAB), peek(a + 8 * WORDS), peek(a + 8 * FINITE) != 0
        covered = min(vocab_size, 32 * words)
        for place in range(peek(a + 8 * COUNT)):
            row = peek(a + 8 * LOGITS) + peek_word(peek(a + 8 * ROWS) + 4 * place) * peek(a + 8 * STEP)
            mask = peek(a + 8 * MASKS) + peek_word(peek(a + 8 * MASK_OF) + 4 * place) * 4 * words
            for word in range(covered // 32):
                bits, first = peek_word(mask + 4 * word), row + 128 * word
                if bits == NOTHING:
                    for bit in range(32):
                        poke_float(first + 4 * bit, BANNED)
                elif finite:
                    for bit in range(32):
                        value = peek_float(first + 4 * bit)
                        value = value if value > LOW else LOW  # a NaN is not above anything
                        value = value if value < HIGH else HIGH
                        poke_float(first + 4 * bit, value if (bits >> np.uint32(bit)) & BIT else BANNED)
                else:
                    for bit in range(32):
                        value = peek_float(first + 4 * bit)
                        poke_float(first + 4 * bit, value if (bits >> np.uint32(bit)) & BIT else BANNED)
            for token in range(covered // 32 * 32, covered):
                value = peek_float(row + 4 * token)
                if finite:
                    value = value if value > LOW else LOW
                    value = value if value < HIGH else HIGH
                bits = peek_word(mask + 4 * (token >> 5))
                poke_float(row + 4 * token, value if (bits >> np.uint32(token & 31)) & BIT else BANNED)
            for token in range(covered, vocab_size):
                poke_float(row + 4 * token, BANNED)

    return kernel
