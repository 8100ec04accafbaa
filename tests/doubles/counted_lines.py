"""Counts the lines of Python that a call runs: its cost, the same on a busy machine and on a quiet one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any


def lines_run(call: Callable[[], object], module: ModuleType) -> int:
    """Lines of this module that the call runs in this thread, each as often as it is run. A comprehension or generator
    counts one for each item; what C code does, numpy's above all, counts nothing."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != module.__file__:
            return None
        count += event in ("line", "call")
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
