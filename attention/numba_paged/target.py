"""The processor that kernels are compiled for: this one, unless Numba is lowered to another by its variables."""

from __future__ import annotations

import os
from functools import cache

from .. import processor

CPU_NAME, CPU_FEATURES = "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"


def has(feature: str) -> bool:
    """True if the processor that kernels are compiled for has the feature. feature: as `processor.features` names
    it."""
    name, listed = os.environ.get(CPU_NAME), os.environ.get(CPU_FEATURES)
    if not name and not listed:
        return feature in processor.features()
    return f"+{feature.replace('_', '')}" in (listed or "").split(",")  # as LLVM names it


HAS_512_BITS = has("avx512_f")


@cache
def description() -> str:
    """What decides which instructions a kernel may have: equal on processors that can run each other's kernels."""
    from llvmlite import binding

    name, listed = os.environ.get(CPU_NAME), os.environ.get(CPU_FEATURES)
    own = not name and not listed
    return " ".join(
        [
            binding.get_process_triple(),
            name or (binding.get_host_cpu_name() if own else "generic"),
            listed or (binding.get_host_cpu_features().flatten() if own else ""),
            *sorted(processor.features()),
        ]
    )
