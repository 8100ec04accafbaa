"""How kernels are compiled and kept."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

from numba.core.errors import TypingError

from baton.attention import processor
from baton.attention.cache_folder import cache_folder
from baton.attention.numba_paged import compiling
from baton.attention.numba_paged.compiling import Kernel, KernelFunction, NumbaMissingError, kernel_builder
from baton.attention.numba_paged.kernel import attention_kernel

ENGINES: list[Any] = []


@dataclass(frozen=True)
class Form:
    """As builders take them."""

    number: int


@kernel_builder
def writes(form: Form, *, doubled: bool = False) -> KernelFunction:
    """Write a number to the second argument."""
    from baton.attention.numba_paged.operations import fetch_add

    number = form.number * (2 if doubled else 1)

    def kernel(a: Any) -> None:
        fetch_add(a + 8, number)

    return kernel


@kernel_builder
def divides() -> KernelFunction:
    """Divide the first argument by the second one, into the third."""
    from baton.attention.numba_paged.operations import fetch_add, peek

    def kernel(a: Any) -> None:
        fetch_add(a + 16, peek(a) // peek(a + 8))

    return kernel


@kernel_builder
def is_wrong() -> KernelFunction:
    def kernel(a: Any) -> None:
        a.nothing()

    return kernel


def written(kernel: Kernel, *arguments: int) -> list[int]:
    memory = (ctypes.c_int64 * 3)(*arguments)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel.address)(ctypes.addressof(memory))
    return list(memory)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Kernels are kept in a folder of the test's."""
    folder = tmp_path / "kept"
    monkeypatch.setattr(compiling, "_parents", lambda: iter([folder]))
    forget()
    return folder


def forget() -> None:
    """Of what this process has found so far, forget what a new one would not know."""
    for build in (writes, divides, is_wrong, attention_kernel):
        build.cache_clear()  # type: ignore[attr-defined]
    compiling._USED.clear()
    compiling._warn.cache_clear()


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("kernels/*/*.kernel"))


def test_kept_kernel_is_the_same_function(own_folder: Path) -> None:
    first = writes(Form(7))
    assert not first.was_kept and written(first, 0, 5) == [0, 12, 0]
    (file,) = kept(own_folder)
    assert file.stat().st_mode & 0o777 == 0o644, "other users may load it"
    forget()
    again = writes(Form(7))
    assert again.was_kept and written(again, 0, 5) == [0, 12, 0]
    assert kept(own_folder) == [file]


def test_arguments_tell_kernels_apart(own_folder: Path) -> None:
    for expected, kernel in ((7, writes(Form(7))), (8, writes(Form(8))), (14, writes(Form(7), doubled=True))):
        assert written(kernel) == [0, expected, 0]
    assert len(kept(own_folder)) == 3
    assert writes(Form(7)) is writes(Form(7))


FRESH = """
import sys
from baton.attention.numba_paged.kernel import attention_kernel
from baton.attention.numba_paged.recording import program_kernel
found = [attention_kernel(16, 2, "float32").was_kept, program_kernel().was_kept]
print(found, "numba" in sys.modules)
"""


def test_process_with_kept_kernels_does_not_import_numba(tmp_path: Path) -> None:
    """Not even for kernels that LLVM takes for ones that may raise, whose code names functions of Numba's."""
    seen = []
    for _ in range(2):
        call = [sys.executable, "-P", "-c", FRESH]
        seen.append(subprocess.run(call, check=True, capture_output=True, text=True).stdout.split("]")[1].strip())
    assert seen[1] == "False"


CALL = """
from baton.attention.numba_paged import compiling
from pathlib import Path
import sys
compiling._parents = lambda: iter([Path(sys.argv[1])])
from baton.attention.numba_paged.recording import program_kernel
print(program_kernel().was_kept)
"""


@pytest.mark.skipif(not processor.is_x86(), reason="other processors are not lowered")
def test_processors_that_share_a_folder_share_no_kernels(tmp_path: Path) -> None:
    """As when a home folder goes from machine to machine: code of one might not run on the other."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    hits = []
    for level in ("avx2", "", "avx2", ""):
        lowered = environment | {processor.VARIABLE: level}
        call = [sys.executable, "-P", "-c", CALL, str(tmp_path)]
        hits.append(subprocess.run(call, env=lowered, check=True, capture_output=True, text=True).stdout.strip())
    assert hits == ["False", "False", "True", "True"]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda whole: whole[:-20], id="cut off"),
        pytest.param(lambda whole: b"", id="empty"),
        pytest.param(lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]), id="a bit of the code"),
        pytest.param(lambda whole: whole.replace(b'"symbol": "cfunc', b'"symbol": "dfunc'), id="the symbol"),
        pytest.param(lambda whole: b"\xff" + whole[1:], id="the checksum"),
    ],
)
def test_damaged_kernel_is_compiled_again(
    own_folder: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """As after a power cut."""
    writes(Form(7))
    (file,) = kept(own_folder)
    whole = file.read_bytes()
    assert damage(whole) != whole
    file.write_bytes(damage(whole))
    forget()
    again = writes(Form(7))
    assert not again.was_kept and written(again) == [0, 7, 0]
    assert "is damaged or another's" in caplog.text and str(file) in caplog.text
    caplog.clear()
    forget()
    assert writes(Form(7)).was_kept and not caplog.text, "it is kept again"


def test_another_kernels_file_is_not_loaded(own_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    writes(Form(7))
    (seven,) = kept(own_folder)
    writes(Form(8))
    (eight,) = set(kept(own_folder)) - {seven}
    eight.write_bytes(seven.read_bytes())
    forget()
    assert written(writes(Form(8))) == [0, 8, 0]
    assert "is damaged or another's" in caplog.text


def test_kernel_of_missing_functions_is_compiled_again(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM ends a process that loads code whose functions it does not find."""
    compiles = compiling._compile
    monkeypatch.setattr(
        compiling,
        "_compile",
        lambda build, digest: compiling.Code(
            (code := compiles(build, digest)).symbol, ("no_such_function",), code.data
        ),
    )
    with pytest.raises(RuntimeError, match="needs no_such_function, which this process does not have"):
        writes(Form(21))
    monkeypatch.setattr(compiling, "_compile", compiles)
    forget()
    kernel = writes(Form(21))
    assert not kernel.was_kept and written(kernel) == [0, 21, 0]


def test_cache_folder_is_used_where_the_package_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    beside, cache = compiling._parents()
    assert beside == Path(compiling.__file__).parent / "__pycache__" and cache == cache_folder()
    access = os.access
    monkeypatch.setenv("BATON_CACHE_DIR", str(cache))
    monkeypatch.setattr(compiling.os, "access", lambda path, mode: beside not in path.parents and access(path, mode))
    forget()
    assert written(writes(Form(7))) == [0, 7, 0]
    assert len(kept(cache)) == 1
    forget()


def test_kernels_compile_without_writable_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(compiling, "_parents", lambda: iter([tmp_path / "file"]))
    assert written(writes(Form(7))) == [0, 7, 0]
    assert "compiled kernels cannot be kept" in caplog.text and "BATON_CACHE_DIR" in caplog.text


def test_kernels_of_a_folder_that_cannot_be_written_are_used(
    own_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an image whose kernels were compiled when it was built."""
    writes(Form(7))
    access, other = os.access, tmp_path / "other"
    monkeypatch.setattr(compiling, "_parents", lambda: iter([own_folder, other]))
    monkeypatch.setattr(
        compiling.os, "access", lambda path, mode: own_folder not in Path(path).parents and access(path, mode)
    )
    forget()
    assert writes(Form(7)).was_kept and not kept(other)
    assert not writes(Form(8)).was_kept and len(kept(other)) == 1


def test_variables_that_lower_numba_belong_to_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = compiling.target.description.__wrapped__()
    for name in compiling.target.LOWERED:
        monkeypatch.setenv(name, "changed")
        assert compiling.target.description.__wrapped__() != before
        before = compiling.target.description.__wrapped__()


def test_kernels_compile_when_disk_is_full(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def is_full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(compiling.os, "replace", is_full)
    assert written(writes(Form(7))) == [0, 7, 0]
    assert "a compiled kernel cannot be kept" in caplog.text
    assert not list(own_folder.glob("kernels/*/.*")), "nothing unfinished stays"


def test_folder_is_of_all_sources_and_versions(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = compiling._sources()
    names = {path.name for pattern in compiling._SOURCES for path in compiling._PACKAGE.glob(pattern)}
    assert {
        "operations.py",
        "vectors.py",
        "quant_tiles.py",
        "kv_rows.py",
        "numba_intrinsics.py",
        "mask_ops.py",
    } <= names
    monkeypatch.setattr(compiling, "_version", lambda name: "another")
    versions = compiling._sources.__wrapped__()
    assert versions != before
    package = tmp_path / "attention/numba_paged"
    package.mkdir(parents=True)
    (package / "operations.py").write_text("changed")
    monkeypatch.setattr(compiling, "_PACKAGE", tmp_path)
    assert compiling._sources.__wrapped__() not in (before, versions)


def test_kernels_of_other_sources_are_deleted_after_a_month(own_folder: Path) -> None:
    old, recent = own_folder / "kernels/old", own_folder / "kernels/recent"
    for folder in (old, recent):
        folder.mkdir(parents=True)
        (folder / "a.kernel").touch()
    month_ago = time.time() - 31 * 24 * 3600
    os.utime(old, (month_ago, month_ago))
    writes(Form(7))
    assert not old.exists() and recent.exists()
    assert len(kept(own_folder)) == 2


def test_division_by_zero_does_not_end_the_process() -> None:
    kernel = divides()
    assert written(kernel, 7, 2, 0) == [7, 2, 3]
    assert written(kernel, 7, 0, 0)[:2] == [7, 0]


def test_function_that_cannot_be_compiled_raises_an_error(own_folder: Path) -> None:
    with pytest.raises(TypingError, match="nothing"):
        is_wrong()
    assert not kept(own_folder)


@pytest.mark.parametrize("module", ["numba", "llvmlite"])
def test_missing_numba_is_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiling.target.description.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(NumbaMissingError, match=r"pip install 'baton-serve\[cpu\]'"):
        writes(Form(9))


def test_threads_may_ask_for_the_same_kernel() -> None:
    """Also for the first one, which makes the linker."""
    ENGINES.append(compiling._engine())  # its kernels stay in use
    compiling._engine.cache_clear()
    found: list[Kernel] = []
    threads = [threading.Thread(target=lambda: found.append(writes(Form(11)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [written(kernel)[1] for kernel in found] == [11] * 4
