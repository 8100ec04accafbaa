"""The arguments of the kernels of state_kernels.py: an array of int64, by index.

NEXT (the unit that is taken next), TABLE (see state_batch.RowTable), then addresses, and steps: bytes from one token,
row or slot to the next. EPS is a float32.
"""

from __future__ import annotations

(
    NEXT, TABLE, COUNT, EPS, X, X_STEP, OUT, STATE, SLOT_STEP, WEIGHT, BIAS, BEFORE, BEFORE_STEP, AFTER, AFTER_STEP,
    A, A_STEP, B, B_STEP, RATE, DT_BIAS, SKIP, Z, Z_STEP,
) = range(24)  # fmt: skip
ARGUMENTS = 24

TOKEN_ENDS, SOURCES, SEGMENT_ENDS, ENDS, TARGETS = range(1, 6)
"""Indices in the table, behind the number of rows."""
