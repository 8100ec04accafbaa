"""What the processor has, and what it says when it is lowered."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.attention import processor
from tests.doubles.lowered_processor import AVX2, lower_to_avx2

AVX512 = AVX2 | {"avx512_f", "avx512_bw", "avx512_vl", "avx512_dq"}
FULL = AVX512 | {"avx512_vnni", "avx512_bf16", "avx_vnni", "amx_bf16", "amx_tile"}
KINDS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(processor.VARIABLE, raising=False)
    processor.features.cache_clear()
    yield
    monkeypatch.undo()
    processor.features.cache_clear()
    processor._llvm_features.cache_clear()


LLVM_NAMES = {"fma3": "fma", "avx512_f": "avx512f", "avx512_bw": "avx512bw", "avx512_vl": "avx512vl"}
LLVM_NAMES |= {"avx512_dq": "avx512dq", "avx512_vnni": "avx512vnni", "dot": "dotprod"}
ARM = frozenset({"neon", "dot", "bf16", "i8mm", "fp16_arith", "sve", "sve2"})


def has(monkeypatch: pytest.MonkeyPatch, machine: str, features: Any) -> None:
    """A processor with these features, in a process in which nothing has been asked yet."""
    monkeypatch.setattr(platform, "machine", lambda: machine)
    llvm = frozenset({LLVM_NAMES.get(name, name) for name in features} | {"avx512cd"})
    monkeypatch.setattr(processor, "_llvm_features", lambda: llvm)
    monkeypatch.setattr(
        torch.cpu, "get_capabilities", lambda: dict.fromkeys(features, True) | {"architecture": machine}
    )
    processor.features.cache_clear()


@pytest.mark.parametrize(
    ("level", "left"),
    [("", FULL), ("avx512_vnni", AVX512 | {"avx512_vnni"}), ("avx512", AVX512), ("avx2", AVX2)],
)
def test_cpu_level_removes_features(monkeypatch: pytest.MonkeyPatch, level: str, left: frozenset[str]) -> None:
    monkeypatch.setenv(processor.VARIABLE, level)
    has(monkeypatch, "x86_64", FULL)
    assert processor.features() == left
    has(monkeypatch, "x86_64", {"avx"})
    assert processor.features() == {"avx"}, "and adds none"


def test_unknown_cpu_level_error_lists_known_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(processor.VARIABLE, "haswell")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with pytest.raises(processor.UnknownLevelError, match=r"=haswell .* avx2 or avx512 or avx512_vnni"):
        processor.lower_libraries({})


def test_library_variables_are_lowered_unless_already_set(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, "x86_64", FULL)
    environment: dict[str, str] = {"NUMBA_CPU_NAME": "x86-64-v2"}
    processor.lower_libraries(environment)
    assert environment == {"NUMBA_CPU_NAME": "x86-64-v2"}
    monkeypatch.setenv(processor.VARIABLE, "avx2")
    processor.lower_libraries(environment)
    assert environment["NUMBA_CPU_NAME"] == "x86-64-v2" and environment["ATEN_CPU_CAPABILITY"] == "avx2"
    assert environment["ONEDNN_MAX_CPU_ISA"] == "AVX2"


@pytest.mark.parametrize(
    ("features", "asked", "reached"),
    [
        (FULL, "avx512_vnni", "avx512_vnni"),
        (AVX512, "avx512_vnni", "avx512"),
        (AVX2, "avx512_vnni", "avx2"),
        (AVX2 | {"avx_vnni"}, "avx512", "avx2"),
        ({"avx"}, "avx512", None),
    ],
)
def test_a_level_above_the_processor_does_not_raise_libraries(
    monkeypatch: pytest.MonkeyPatch, features: frozenset[str], asked: str, reached: str | None
) -> None:
    monkeypatch.setenv(processor.VARIABLE, asked)
    has(monkeypatch, "x86_64", features)
    environment: dict[str, str] = {}
    processor.lower_libraries(environment)
    assert environment == (processor.LEVELS[reached].environment if reached else {})


def test_llvm_features_are_read_from_cpuinfo_without_llvm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx2 fma avx512f avx512_vnni\n\nflags\t\t: fpu\n")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert processor._llvm_features(cpuinfo) == {"fpu", "avx2", "fma", "avx512f", "avx512vnni"}
    assert not processor._llvm_features(tmp_path / "missing")


def test_features_of_aarch64_are_read_from_cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nFeatures\t: fp asimd crc32 asimdhp asimddp bf16\n\nFeatures\t: fp\n")
    found = processor._llvm_features(cpuinfo)
    assert found == {"fp-armv8", "neon", "fullfp16", "dotprod", "bf16"}
    monkeypatch.setattr(processor, "_llvm_features", lambda: found)
    assert processor.features() == {"neon", "dot", "fp16_arith", "bf16"}


@pytest.mark.skipif(not processor.is_x86(), reason="levels are of x86")
def test_llvm_and_cpuinfo_agree_on_the_features_of_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llvmlite")
    processor._llvm_features.cache_clear()
    found = processor._llvm_features()
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    processor._llvm_features.cache_clear()
    needed = set().union(*(level.needs for level in processor.LEVELS.values() if level.architecture == "x86_64"))
    assert needed & processor._llvm_features() == needed & found


@pytest.mark.parametrize(
    ("features", "packed", "multiplied"),
    [
        (AVX2, {torch.float32}, {torch.float32}),
        (AVX2 | {"avx512_f"}, {torch.float32}, {torch.float32}),
        (FULL - {"avx512_bf16", "amx_bf16"}, {torch.float32, torch.bfloat16}, {torch.float32}),
        (FULL, {torch.float32, torch.bfloat16}, {torch.float32, torch.bfloat16}),
        (FULL | {"avx512_fp16"}, set(KINDS), set(KINDS)),
        (AVX2 | {"avx_ne_convert"}, set(KINDS), set(KINDS)),
    ],
)
def test_packed_and_multiplied_dtypes_follow_features(
    monkeypatch: pytest.MonkeyPatch, features: frozenset[str], packed: set[Any], multiplied: set[Any]
) -> None:
    has(monkeypatch, "x86_64", features)
    for name in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
        monkeypatch.setattr(torch.ops.mkldnn, name, lambda: True)
    assert {kind for kind in KINDS if processor.packs(kind)} == packed
    assert {kind for kind in KINDS if processor.multiplies(kind)} == multiplied
    for name in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
        monkeypatch.setattr(torch.ops.mkldnn, name, lambda: False)
    assert [kind for kind in KINDS if processor.packs(kind)] == [torch.float32], "oneDNN is lowered by itself"


@pytest.mark.parametrize(
    ("asked", "left", "reached"),
    [("neon", {"neon"}, "neon"), ("neon_dotprod", {"neon", "dot"}, "neon_dotprod"), ("avx2", ARM, None)],
)
def test_aarch64_has_levels_of_its_own(
    monkeypatch: pytest.MonkeyPatch, asked: str, left: frozenset[str], reached: str | None
) -> None:
    monkeypatch.setenv(processor.VARIABLE, asked)
    has(monkeypatch, "arm64", ARM | {"fp-armv8"})
    environment: dict[str, str] = {}
    processor.lower_libraries(environment)
    assert environment == (processor.LEVELS[reached].environment if reached else {})
    assert processor.features() - {"fp-armv8"} == left
    has(monkeypatch, "aarch64", {"neon", "fp-armv8"})
    environment.clear()
    processor.lower_libraries(environment)
    assert environment == (processor.LEVELS["neon"].environment if reached else {})


def test_a_level_of_aarch64_changes_nothing_on_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(processor.VARIABLE, "neon")
    has(monkeypatch, "x86_64", FULL)
    environment: dict[str, str] = {}
    processor.lower_libraries(environment)
    processor.name_arm_features(environment)
    assert not environment and processor.features() == FULL


def test_numba_is_told_what_an_aarch64_processor_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for features, named in (({"neon", "dot"}, "+neon,+dotprod"), ({"neon"}, "+neon"), ({"neon", "sve"}, "+neon")):
        has(monkeypatch, "aarch64", features)
        environment: dict[str, str] = {}
        processor.name_arm_features(environment)
        assert environment == {"NUMBA_CPU_FEATURES": named}
    environment = {"NUMBA_CPU_FEATURES": "+sve"}
    processor.name_arm_features(environment)
    assert environment == {"NUMBA_CPU_FEATURES": "+sve"}


def test_a_level_lowers_what_a_parent_process_has_named(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, "aarch64", {"neon", "dot", "fp-armv8"})
    environment: dict[str, str] = {}
    processor.name_arm_features(environment)
    monkeypatch.setenv(processor.VARIABLE, "neon")
    processor.lower_libraries(environment)
    processor.name_arm_features(environment)
    assert environment == processor.LEVELS["neon"].environment


def test_aarch64_multiplies_bfloat16_where_it_can_and_never_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
        monkeypatch.setattr(torch.ops.mkldnn, name, lambda: True)
    has(monkeypatch, "aarch64", ARM)
    expected = [torch.float32, torch.bfloat16]
    assert [kind for kind in KINDS if processor.packs(kind)] == expected
    assert [kind for kind in KINDS if processor.multiplies(kind)] == expected
    has(monkeypatch, "aarch64", ARM - {"bf16"})
    assert [kind for kind in KINDS if processor.packs(kind)] == [torch.float32]
    assert [kind for kind in KINDS if processor.multiplies(kind)] == [torch.float32]


def test_an_unknown_architecture_is_asked_for_no_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(processor.VARIABLE, "avx2")
    has(monkeypatch, "riscv64", {"rvv"})
    environment: dict[str, str] = {}
    processor.lower_libraries(environment)
    processor.name_arm_features(environment)
    assert not environment and processor.features() == {"rvv"}
    assert all(map(processor.multiplies, KINDS)), "a trial finds out"
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert processor.packs(torch.bfloat16)

    def fails() -> bool:
        raise RuntimeError("built without oneDNN")

    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", fails)
    assert not processor.packs(torch.bfloat16)


def test_a_torch_without_a_feature_list_is_asked_for_each_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    for name in ("_is_avx2_supported", "_is_avx512_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert processor.multiplies(torch.bfloat16) and "avx2" in processor.features()


def test_lowered_cpu_packs_no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    lower_to_avx2(monkeypatch)
    assert not processor.packs(torch.bfloat16) and not processor.multiplies(torch.bfloat16)
    assert processor.packs(torch.float32)


@pytest.mark.skipif(not processor.is_x86(), reason="levels are of x86")
def test_cpu_level_applies_to_whole_process() -> None:
    """In one of its own: libraries read their variables once."""
    script = """
import json, torch, torch.nn.functional as F
from baton.attention import processor
F.linear(torch.ones(2, 64), torch.ones(64, 64))
found = {"torch": torch.backends.cpu.get_cpu_capability(), "packs": processor.packs(torch.bfloat16)}
found["oneDNN"] = torch.ops.mkldnn._is_mkldnn_bf16_supported()
try:
    from baton.attention.numba_paged import vectors
    found["pairs"] = vectors.HAS_PAIRS
except ImportError:
    pass
print(json.dumps(found))
"""
    lowered = os.environ | {processor.VARIABLE: "avx2"}
    done = subprocess.run([sys.executable, "-c", script], env=lowered, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("torch") == "AVX2" and not any(found.values()), found
