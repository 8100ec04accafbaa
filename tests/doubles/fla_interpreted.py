"""flash-linear-attention's own kernels in Triton's interpreter, against torch's operations; in a process of its own.

    python tests/doubles/fla_interpreted.py short_conv|gated_delta|ssd     prints the number of cases

The interpreter needs two things that are not there without a GPU: a driver, which the search for the fastest of a
kernel's variants asks for a clock, and loops whose counters are Triton's numbers, not Python's.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import builtins
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton.language as tl
from triton.runtime import driver, interpreter

from baton.runtime.layers.states import fla_states
from baton.runtime.layers.states.ops import DeltaHeads
from tests.doubles.state_steps import SCENES
from tests.doubles.state_twins import CONVOLUTIONS, SCANS, check_gated_delta, check_short_conv, check_ssd

FLOAT = torch.float32
ALLOWED = 1e-4
SMALL_DELTAS = [(DeltaHeads(1, 2, 16, 24), True), (DeltaHeads(1, 3, 7, 11, step_scale=2.0), False)]


class Clock:
    """A driver for the search alone: each variant takes as long."""

    def get_benchmarker(self) -> Callable[..., list[float]]:
        return lambda *_, **__: [1.0, 1.0, 1.0]


def count(*bounds: Any) -> Iterator[Any]:
    """`range`, of Triton's numbers."""
    plain = [int(bound.handle.data.item()) if isinstance(bound, tl.tensor) else int(bound) for bound in bounds]
    return (interpreter._implicit_cvt(number) for number in builtins.range(*plain))


def main(name: str) -> None:
    ops = fla_states.load()
    driver.set_active(Clock())  # type: ignore[arg-type]
    for key, module in list(sys.modules.items()):
        if key.startswith(("fla.ops", "fla.modules")):
            module.range = count  # type: ignore[attr-defined]
    cases = 0
    for rows in SCENES.values():
        if name == "short_conv":
            for convolution in CONVOLUTIONS:
                check_short_conv(ops, rows, FLOAT, *convolution, allowed=ALLOWED)
        elif name == "gated_delta":
            for heads, by_channel in SMALL_DELTAS:
                check_gated_delta(ops, rows, FLOAT, heads, by_channel, allowed=ALLOWED)
        else:
            for heads in SCANS[:2]:
                check_ssd(ops, rows, FLOAT, heads, allowed=ALLOWED)
        cases += 1
    print(cases)


if __name__ == "__main__":
    main(sys.argv[1])
