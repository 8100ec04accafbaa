"""How kernels are compiled and kept."""

from __future__ import annotations

import errno
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.errors import TypingError

from baton.attention import processor
from baton.attention.cache_folder import cache_folder
from baton.attention.numba_paged import compiling, kernel, operations, vectors
from baton.attention.numba_paged.compiling import checksum, compiled
from baton.attention.numba_paged.kernel import compile_kernel


def test_kernels_compile_without_writable_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    compiles = compiling.cfunc

    def cfunc(signature: str, cache: bool = False) -> Any:
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return compiles(signature)

    monkeypatch.setattr(compiling, "cfunc", cfunc)
    assert compile_kernel.__wrapped__(16, 2, "float32").address > 0
    assert asked == [True, False]


def test_read_only_package_keeps_kernels_in_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.numba_config, "CACHE_DIR", "")
    compiling.choose_folder()
    assert not compiling.numba_config.CACHE_DIR, "the package's folder can be written here"
    access = os.access
    monkeypatch.setattr(compiling.os, "access", lambda path, mode: path != compiling._PACKAGE and access(path, mode))
    compiling.choose_folder()
    assert str(cache_folder() / "kernels") == compiling.numba_config.CACHE_DIR
    assert compile_kernel.__wrapped__(16, 2, "float32").address > 0
    assert list((cache_folder() / "kernels").glob("*/kernel.*.nbi"))
    monkeypatch.setattr(compiling.numba_config, "CACHE_DIR", "/named/by/the/user")
    compiling.choose_folder()
    assert compiling.numba_config.CACHE_DIR == "/named/by/the/user"


def test_without_any_folder_numba_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(compiling.numba_config, "CACHE_DIR", "")
    monkeypatch.setattr(compiling.os, "access", lambda path, mode: False)
    compiling.choose_folder()
    assert not compiling.numba_config.CACHE_DIR


CALL = """
import sys
from baton.attention import processor
from baton.attention.numba_paged.compiling import compiled
sys.path.insert(0, sys.argv[1])
from module import function
found = compiled(function)
found.ctypes(0)
print(found.cache_hits)
"""


@pytest.mark.skipif(not processor.is_x86(), reason="other processors are not lowered")
def test_processors_that_share_a_folder_share_no_kernels(tmp_path: Path) -> None:
    """As when a home folder goes from machine to machine: code of one might not run on the other."""
    (tmp_path / "module.py").write_text("def function(a):\n    pass\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    environment["NUMBA_CACHE_DIR"] = str(tmp_path / "kernels")
    hits = []
    for level in ("avx2", "", "avx2", ""):
        lowered = environment | {processor.VARIABLE: level}
        call = [sys.executable, "-P", "-c", CALL, str(tmp_path)]
        hits.append(int(subprocess.run(call, env=lowered, check=True, capture_output=True, text=True).stdout))
    assert hits == [0, 0, 1, 1]


def test_truncated_cached_kernel_is_recompiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As after a power cut."""
    function = importlib.import_module(write_module(tmp_path)).function
    for _ in range(2):
        assert compiled(function).address > 0
    kept = list(Path(FunctionCache(function).cache_path).glob("*.nb[ic]"))
    assert len(kept) == 2
    for file in kept:
        file.write_bytes(file.read_bytes()[:-20])
        compiling._warn.cache_clear()
        assert compiled(function).address > 0
        assert "recompiling: " in caplog.text and str(file.parent) in caplog.text
        caplog.clear()
        assert compiled(function).cache_hits == 1 and not caplog.text, "it is kept again"


def test_kernels_compile_when_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function = importlib.import_module(write_module(tmp_path)).function

    def is_full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(IndexDataCacheFile, "_save_data", is_full)
    assert compiled(function).address > 0


def test_a_function_that_cannot_be_compiled_raises_an_error(tmp_path: Path) -> None:
    function = importlib.import_module(write_module(tmp_path, body="a.nothing()")).function
    with pytest.raises(TypingError, match="nothing"):
        compiled(function)


def write_module(folder: Path, body: str = "pass") -> str:
    """A module with one function, in a folder that can be imported from."""
    name = f"module_{folder.name}"
    (folder / f"{name}.py").write_text(f"def function(a):\n    {body}\n")
    sys.path.insert(0, str(folder))
    return name


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    compiling._warn.cache_clear()


def test_kernel_cache_checksum_covers_all_source_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba looks at the kernel's own file only."""
    before = checksum(operations, vectors)
    assert before == checksum(operations, vectors) and before
    monkeypatch.setattr(operations, "__file__", kernel.__file__)
    assert checksum(operations, vectors) != before
