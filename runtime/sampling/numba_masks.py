"""`mask_ops.apply_masks_on_host` as a kernel of Numba's: one pass over the rows, whatever the masks look like.

torch's and numpy's loops take a branch for each token, and real masks are hard to predict: with 32 rows of 49,152
tokens this takes 0.3 ms, numpy 0.8 ms and `masked_fill_` up to 10 ms (one core of a Zen 4).
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numba import njit

from ...attention.numba_paged.compiling import compiled
from ...scheduler.constraints.constraint import TokenMasks
from .mask_ops import LARGEST_ALLOWED

SIGNATURE = "void(float32[:, ::1], uint32[:, ::1], int32[::1], int32[::1], boolean)"

LOW, HIGH, BANNED = np.float32(-LARGEST_ALLOWED), np.float32(LARGEST_ALLOWED), np.float32(-np.inf)
NOTHING, BIT = np.uint32(0), np.uint32(1)


def apply_masks(logits: torch.Tensor, masks: TokenMasks, finite: bool) -> None:
    """See `mask_ops.apply_masks_on_host`."""
    rows, mask_of = np.ascontiguousarray(masks.rows), np.ascontiguousarray(masks.mask_of)
    _kernel()(logits.detach().numpy(), np.ascontiguousarray(masks.masks), rows, mask_of, finite)


@cache
def _kernel() -> Any:
    def kernel(logits: Any, masks: Any, rows: Any, mask_of: Any, finite: Any) -> None:
        vocab_size = logits.shape[1]
        for place in range(len(rows)):
            row = logits[rows[place]]
            mask = masks[mask_of[place]]
            covered = min(vocab_size, 32 * len(mask))
            for word in range(covered // 32):
                bits, first = mask[word], 32 * word
                if bits == NOTHING:
                    row[first : first + 32] = BANNED
                elif finite:
                    for bit in range(32):
                        value = row[first + bit]
                        value = value if value > LOW else LOW  # a NaN is not above anything
                        value = value if value < HIGH else HIGH
                        row[first + bit] = value if (bits >> np.uint32(bit)) & BIT else BANNED
                else:
                    for bit in range(32):
                        row[first + bit] = row[first + bit] if (bits >> np.uint32(bit)) & BIT else BANNED
            for token in range(covered // 32 * 32, covered):
                value = row[token]
                if finite:
                    value = value if value > LOW else LOW
                    value = value if value < HIGH else HIGH
                row[token] = value if (mask[token >> 5] >> np.uint32(token & 31)) & BIT else BANNED
            row[covered:] = BANNED

    return compiled(kernel, partial(njit, SIGNATURE, nogil=True, error_model="numpy"))
