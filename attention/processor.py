"""The arithmetic of the processor, by features. Nothing else asks for it, and nothing goes by the name of a product.

For tests, and to see how another machine would behave, BATON_CPU_FEATURES lowers it to a level:

    avx2           256-bit vectors; neither pairs nor conversions of bfloat16, and oneDNN packs none
    avx512         512-bit vectors, without arithmetic for bfloat16, float16 or groups of 8-bit integers
    avx512_vnni    the same with sums of four products of 8-bit integers

and on aarch64, where torch and oneDNN cannot be lowered, kernels alone:

    neon           128-bit vectors, without arithmetic for bfloat16, float16 or groups of 8-bit integers
    neon_dotprod   the same with sums of four products of 8-bit integers

A level of the other architecture changes nothing. Where the processor lacks features of a level, libraries are lowered
to the next level below that it does have.

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

    architecture: str
    """The architecture of processors that can be lowered to this level, as `architecture` names it."""
    lacks: tuple[str, ...]
    environment: dict[str, str]
    """Lowers libraries to the same."""

    @property
    def needs(self) -> set[str]:
        """Features, by LLVM's names, that code of this level uses. Neither Numba nor torch checks that they exist."""
        return {name.removeprefix("+") for name in self.environment["NUMBA_CPU_FEATURES"].split(",")}


LEVELS = {
    "avx2": Level(
        architecture="x86_64",
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
        architecture="x86_64",
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
        architecture="x86_64",
        lacks=("avx512_bf16", "avx512_fp16", "avx10", "avx_", "amx"),
        environment={
            "ATEN_CPU_CAPABILITY": "avx512",
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI",
            "MKL_ENABLE_INSTRUCTIONS": "AVX512",
            "NUMBA_CPU_NAME": "x86-64-v4",
            "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl,+avx512vnni",
        },
    ),
    "neon": Level(
        architecture="aarch64",
        lacks=("dot", "bf16", "i8mm", "fp16_arith", "fhm", "sve", "sme"),
        environment={"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "+neon,+fp-armv8"},
    ),
    "neon_dotprod": Level(
        architecture="aarch64",
        lacks=("bf16", "i8mm", "fp16_arith", "fhm", "sve", "sme"),
        environment={"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "+neon,+fp-armv8,+dotprod"},
    ),
}
"""From the lowest of each architecture. (Numba's levels are LLVM's for any processor of the architecture, not
products.)"""

_PACKS_BFLOAT16 = ({"avx512_bw", "avx512_vl", "avx512_dq"}, {"avx_ne_convert"}, {"bf16"})
_PACKS_FLOAT16 = ({"avx512_fp16"}, {"avx_ne_convert"})
_MULTIPLIES_BFLOAT16 = ({"avx512_bf16"}, {"amx_bf16"}, {"avx_ne_convert"}, {"bf16"})
_MULTIPLIES_FLOAT16 = ({"avx512_fp16"}, {"amx_fp16"}, {"avx_ne_convert"})
"""Any of these sets of features is enough. With avx_ne_convert kernels widen as they load, which costs next to
nothing. aarch64's products of float16 add up in float16, so they are not used."""

_ARM_NAMES = {
    "fp": ("fp-armv8", ""),
    "asimd": ("neon", "neon"),
    "asimddp": ("dotprod", "dot"),
    "asimdhp": ("fullfp16", "fp16_arith"),
    "bf16": ("bf16", "bf16"),
    "i8mm": ("i8mm", "i8mm"),
    "sve": ("sve", "sve"),
}
"""LLVM's and torch's names of features that Linux reports for aarch64."""


def architecture() -> str:
    """ "x86_64" or "aarch64", of any width; otherwise what the platform calls it."""
    machine = platform.machine().lower()
    if machine in ("amd64", "i386", "i686"):
        return "x86_64"
    return "aarch64" if machine == "arm64" else machine


def is_x86() -> bool:
    return architecture() == "x86_64"


def _asked_level() -> Level | None:
    """The level that BATON_CPU_FEATURES names; None if it is not set, or to one of another architecture. Raises
    UnknownLevelError."""
    name = os.environ.get(VARIABLE, "")
    if not name:
        return None
    if name not in LEVELS:
        raise UnknownLevelError(f"{VARIABLE}={name} is unknown; it takes {' or '.join(LEVELS)}, or is not set")
    return LEVELS[name] if LEVELS[name].architecture == architecture() else None


def level() -> Level | None:
    """The level to which libraries are lowered: the one asked for, or the highest below it whose features the processor
    has. None if there is none. Raises UnknownLevelError."""
    asked, found = _asked_level(), _llvm_features()
    if asked is None:
        return None
    levels = [each for each in LEVELS.values() if each.architecture == asked.architecture]
    reached = [each for each in levels[: levels.index(asked) + 1] if each.needs <= found]
    return reached[-1] if reached else None


@cache
def _llvm_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The processor's features by LLVM's names. Imports no library that is lowered. Empty if they cannot be found."""
    if architecture() == "aarch64":  # LLVM finds few by itself
        return frozenset(_ARM_NAMES[name][0] for name in _listed_features(cpuinfo) if name in _ARM_NAMES)
    try:
        from llvmlite import binding

        return frozenset(name for name, has in binding.get_host_cpu_features().items() if has)
    except (ImportError, RuntimeError):  # without Numba
        return frozenset(name.replace("avx512_", "avx512") for name in _listed_features(cpuinfo))


def _listed_features(cpuinfo: Path) -> list[str]:
    """By Linux's names."""
    try:
        found = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return []
    return found[1].split() if found else []


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
    if _is_known() and not _has_any(_PACKS_BFLOAT16 if kind == "bfloat16" else _PACKS_FLOAT16):
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
    if kind not in ("bfloat16", "float16") or not _is_known():
        return True
    return _has_any(_MULTIPLIES_BFLOAT16 if kind == "bfloat16" else _MULTIPLIES_FLOAT16)


def _is_known() -> bool:
    """True if the names of features tell what the processor does well."""
    return architecture() in ("x86_64", "aarch64")


def _has_any(sets: Iterable[set[str]]) -> bool:
    found = features()
    return any(needed <= found for needed in sets)


def _of_the_processor() -> set[str]:
    import torch

    read = getattr(torch.cpu, "get_capabilities", None)
    if read is not None:
        return {name for name, value in read().items() if value is True}
    if architecture() == "aarch64":
        return {
            torch_name for llvm_name, torch_name in _ARM_NAMES.values() if torch_name and llvm_name in _llvm_features()
        }
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
    if lowered is None:
        return
    if environment.get("NUMBA_CPU_FEATURES", "") == _arm_features():  # the process that started this one named them
        del environment["NUMBA_CPU_FEATURES"]
    for name, value in lowered.environment.items():
        environment.setdefault(name, value)


def name_arm_features(environment: MutableMapping[str, str]) -> None:
    """Have Numba compile for instructions that an aarch64 processor has. LLVM knows most from the product's name, and
    would end the process at an instruction that it thinks is missing."""
    if (named := _arm_features()) is not None:
        environment.setdefault("NUMBA_CPU_FEATURES", named)


def _arm_features() -> str | None:
    """The features that kernels use, as a list for LLVM. None on another architecture, or if they cannot be found."""
    if architecture() != "aarch64" or not (found := _llvm_features()):
        return None
    return ",".join(f"+{name}" for name in ("neon", "fp-armv8", "dotprod") if name in found)


lower_libraries(os.environ)
name_arm_features(os.environ)
