"""The processor that kernels are compiled for: this one, unless Numba is lowered to another by its variables."""

from __future__ import annotations

import os
from functools import cache

from .. import processor

CPU_NAME, CPU_FEATURES = "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"
LOWERED = (CPU_NAME, CPU_FEATURES, "NUMBA_ENABLE_AVX", "NUMBA_OPT")
"""Variables that change what Numba makes of a kernel."""


def has(feature: str) -> bool:
    """True if the processor that kernels are compiled for has the feature. feature: as `processor.features` names
    it; on aarch64, where the variable for features is set, as LLVM does."""
    name, listed = os.environ.get(CPU_NAME), os.environ.get(CPU_FEATURES)
    if not name and not listed:
        return feature in processor.features()
    return f"+{feature.replace('_', '')}" in (listed or "").split(",")  # as LLVM names it


HAS_512_BITS = has("avx512_f")


@cache
def description() -> str:
    """The triple, processor, features and variables for which a kernel is compiled. Two processors with equal
    descriptions can run each other's kernels. Raises ImportError without llvmlite."""
    from llvmlite import binding

    own = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    lowered = [f"{name}={os.environ[name]}" for name in LOWERED if name in os.environ]
    return " ".join([binding.get_process_triple(), *own, *lowered, *sorted(processor.features())])
