"""The arithmetic of the processor, by features. Nothing else asks for it, and nothing goes by the name of a product.

For tests, and to see how another machine would behave, BATON_CPU_FEATURES lowers it to a level:

    avx2           256-bit vectors; neither pairs nor conversions of bfloat16, and oneDNN packs none
    avx512         512-bit vectors, without arithmetic for bfloat16, float16 or groups of 8-bit integers
    avx512_vnni    the same with sums of four products of 8-bit integers

Where the processor lacks features of a level, libraries are lowered to the next level below that it does have.

It also sets the variables by which torch, oneDNN, MKL and Numba are lowered, where they are not set yet. These are read
once, at a library's first use: so this is done when the module is imported, which imports none of them.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

VARIABLE = "BATON_CPU_FEATURES"


class CannotPackError(RuntimeError):
    """oneDNN has no kernels for weights of this dtype on this processor."""


class UnknownLevelError(ValueError):
    """BATON_CPU_FEATURES names no level."""


@dataclass(frozen=True, slots=True)
class Level:
    """lacks: beginnings of the names of features that a processor of this level does not have."""

    lacks: tuple[str, ...]
    environment: dict[str, str]
    """Lowers libraries to the same."""

    @property
    def needs(self) -> set[str]:
        """Features, by LLVM's names, that code of this level uses. Neither Numba nor torch checks that they exist."""
        return {name.removeprefix("+") for name in self.environment["NUMBA_CPU_FEATURES"].split(",")}


LEVELS = {
    "avx2": Level(
        lacks=("avx512", "avx10", "avx_", "amx"),
        environment={
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "NUMBA_CPU_NAME": "x86-64-v3",
            "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c",
        },
    ),
    "avx512": Level(
        lacks=("avx512_bf16", "avx512_fp16", "avx512_vnni", "avx10", "avx_", "amx"),
        environment={
            "ATEN_CPU_CAPABILITY": "avx512",
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
            "MKL_ENABLE_INSTRUCTIONS": "AVX512",
            "NUMBA_CPU_NAME": "x86-64-v4",
            "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl",
        },
    ),
    "avx512_vnni": Level(
        lacks=("avx512_bf16", "avx512_fp16", "avx10", "avx_", "amx"),
        environment={
            "ATEN_CPU_CAPABILITY": "avx512",
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI",
            "MKL_ENABLE_INSTRUCTIONS": "AVX512",
            "NUMBA_CPU_NAME": "x86-64-v4",
            "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl,+avx512vnni",
        },
    ),
}
"""From the lowest. Names are those of x86: other processors are not lowered. (Numba's levels are LLVM's for x86-64, not
products.)"""

_PACKS_BFLOAT16 = ({"avx512_bw", "avx512_vl", "avx512_dq"}, {"avx_ne_convert"})
_PACKS_FLOAT16 = ({"avx512_fp16"}, {"avx_ne_convert"})
_MULTIPLIES_BFLOAT16 = ({"avx512_bf16"}, {"amx_bf16"}, {"avx_ne_convert"})
_MULTIPLIES_FLOAT16 = ({"avx512_fp16"}, {"amx_fp16"}, {"avx_ne_convert"})
"""Any of these sets of features is enough. With avx_ne_convert kernels widen as they load, which costs next to
nothing."""


def is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")


def _asked_level() -> Level | None:
    """The level that BATON_CPU_FEATURES names; None if it is not set. Raises UnknownLevelError."""
    name = os.environ.get(VARIABLE, "")
    if not name or not is_x86():
        return None
    if name not in LEVELS:
        raise UnknownLevelError(f"{VARIABLE}={name} is unknown; it takes {' or '.join(LEVELS)}, or is not set")
    return LEVELS[name]


def level() -> Level | None:
    """The level to which libraries are lowered: the one asked for, or the highest below it whose features the processor
    has. None if there is none. Raises UnknownLevelError."""
    asked, found = _asked_level(), _llvm_features()
    if asked is None:
        return None
    levels = list(LEVELS.values())
    reached = [each for each in levels[: levels.index(asked) + 1] if each.needs <= found]
    return reached[-1] if reached else None


@cache
def _llvm_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The processor's features by LLVM's names. Imports no library that is lowered. Empty if they cannot be found."""
    try:
        from llvmlite import binding

        return frozenset(name for name, has in binding.get_host_cpu_features().items() if has)
    except (ImportError, RuntimeError):  # without Numba
        pass
    try:
        found = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return frozenset()
    return frozenset(name.replace("avx512_", "avx512") for name in found[1].split()) if found else frozenset()


@cache
def features() -> frozenset[str]:
    """The features of the processor, as torch's `cpu.get_capabilities` names them ("avx2", "avx512_bf16", "neon", …),
    less those that its level lacks. The same in all threads for as long as the process lives."""
    asked = _asked_level()
    lacks = asked.lacks if asked is not None else ()
    return frozenset(name for name in _of_the_processor() if not name.startswith(lacks))


@cache
def fingerprint() -> str:
    """A checksum of what decides which kernel is the fastest here: features, generation, sizes of caches, number of
    cores, and what lowers them. Equal on equal machines."""
    parts = [platform.machine(), *sorted(features()), *_generation(), *_cache_sizes(), f"cores {_num_cores()}"]
    names = sorted({name for lowered in LEVELS.values() for name in lowered.environment})
    parts += [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _generation(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Numbers by which makers tell generations apart, of the first core."""
    names = ("cpu family", "model", "stepping", "CPU implementer", "CPU architecture", "CPU variant", "CPU part")
    try:
        lines = cpuinfo.read_text().split("\n\n")[0].splitlines()
    except (OSError, ValueError):
        return []
    fields = (line.partition(":") for line in lines)
    return [f"{name.strip()} {value.strip()}" for name, _, value in fields if name.strip() in names]


def _cache_sizes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> list[str]:
    found = []
    for index in sorted(folder.glob("index*")):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        except (OSError, ValueError):
            continue
        found.append(f"{level} {kind} {size}")
    return found


def packs(dtype: torch.dtype) -> bool:
    """True if oneDNN has kernels for packed weights of this dtype. Where features do not tell, torch's own answer."""
    kind = str(dtype).removeprefix("torch.")
    if kind not in ("bfloat16", "float16"):
        return True
    if is_x86() and not _has_any(_PACKS_BFLOAT16 if kind == "bfloat16" else _PACKS_FLOAT16):
        return False
    import torch

    name = "_is_mkldnn_bf16_supported" if kind == "bfloat16" else "_is_mkldnn_fp16_supported"
    try:  # a library may be lowered by itself, or not be there
        return bool(getattr(torch.ops.mkldnn, name)())
    except (AttributeError, RuntimeError):
        return False


def multiplies(dtype: torch.dtype) -> bool:
    """True if matrix products of this dtype are worth computing as they are; otherwise they take several times as long
    as in float32. True where features do not tell."""
    kind = str(dtype).removeprefix("torch.")
    if kind not in ("bfloat16", "float16") or not is_x86():
        return True
    return _has_any(_MULTIPLIES_BFLOAT16 if kind == "bfloat16" else _MULTIPLIES_FLOAT16)


def _has_any(sets: Iterable[set[str]]) -> bool:
    found = features()
    return any(needed <= found for needed in sets)


def _of_the_processor() -> set[str]:
    import torch

    read = getattr(torch.cpu, "get_capabilities", None)
    if read is not None:
        return {name for name, value in read().items() if value is True}
    found = set()
    if torch.cpu._is_avx2_supported():
        found |= {"avx2", "fma3", "f16c"}
    if torch.cpu._is_avx512_supported() and torch.backends.cpu.get_cpu_capability() == "AVX512":
        found |= {"avx512_f", "avx512_bw", "avx512_dq", "avx512_vl"}  # torch's kernels need all of these
    if getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)():
        found.add("avx512_bf16")
    return found


def lower_libraries(environment: MutableMapping[str, str]) -> None:
    """Set the variables of the level that is asked for. Raises UnknownLevelError."""
    lowered = level()
    for name, value in lowered.environment.items() if lowered is not None else ():
        environment.setdefault(name, value)


lower_libraries(os.environ)
