"""The arguments of the kernel of kernel.py: an array of int64, by index.

Addresses, but for NEXT (the piece that is taken next), TICKET (threads that have begun), COUNT (of pieces), the steps,
which are bytes from one row to the next, and two float32: SCALE makes the scores (softened, where there is a cap)
powers of two, and INNER scales scores before they are softened.
"""

from __future__ import annotations

(
    NEXT, TICKET, COUNT, PIECES, ROWS, BEGINS, ENDS, GROUPS, LEFT, TABLE, TABLE_STEP, QUERIES, QUERY_STEP,
    KEYS, VALUES, SLOT_STEP, OUT, OUT_STEP, SUMS, LARGEST, TOTALS, SCRATCH, SCRATCH_STEP, SCALE,
    VALUE_STEP, INNER, SINKS,
) = range(27)  # fmt: skip
ARGUMENTS = 27

# A piece, and a group of pieces that are joined: see pieces.py.
PIECE_FIELDS, GROUP_FIELDS = 8, 4
