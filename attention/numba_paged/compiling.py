"""Compiles kernels, functions that a team of threads calls, and keeps their code for later processes.

    a builder and its arguments ─▶ is the code kept? ─▶ llvmlite loads it, in milliseconds
                                         └─ no ─▶ the builder makes a function, Numba compiles it, its code is kept

Where all kernels are kept, Numba is never imported: that saves a process half a second and 65 MB. So modules of
builders do not import it either. What only Numba can use, its intrinsics above all, a builder imports itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import json
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, cast

from ..cache_folder import VARIABLE, cache_folder
from . import target

logger = logging.getLogger(__name__)

P = ParamSpec("P")

KernelFunction = Callable[[Any], None]
"""``void(address of its arguments)``, called by every thread of a team. The arguments are int64."""

SIGNATURE = "void(int64)"

FORMAT = 1
"""Version of the files' layout. It goes into the name of their folder."""

_PACKAGE = Path(__file__).parent.parent.parent
_SOURCES = (
    "attention/processor.py",
    "attention/numba_paged/*.py",
    "memory_pool/kv_rows.py",
    "runtime/layers/numba_ops/*.py",
    "runtime/sampling/mask_ops.py",
    "runtime/sampling/numba_*.py",
)
"""The files that decide what code a kernel has: any change of them gives a folder of its own."""

KEPT_SECONDS = 30 * 24 * 3600
"""Kernels of other sources are deleted when they have not been used for so long."""

RAISING = (
    *("numba_gil_ensure", "numba_gil_release", "numba_unpickle", "numba_do_raise"),
    *("numba_runtime_build_excinfo_struct", "NRT_Free"),
)
"""Functions of Numba's by which compiled code reports an exception. Kernels raise none: they only compute and branch.
But LLVM does not always see that, and then their code names these functions."""


class NumbaMissingError(ImportError):
    """A kernel has to be compiled, and Numba cannot be imported."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled ``void(address of its arguments)`` that needs no GIL. Its code stays in memory for good."""

    address: int
    was_kept: bool
    """True if the code comes from an earlier process."""


@dataclass(frozen=True, slots=True)
class Code:
    """Compiled code, as LLVM writes it: an object file."""

    symbol: str
    """The function in it."""
    needs: tuple[str, ...]
    """Functions and variables outside of it."""
    data: bytes


def kernel_builder(build: Callable[P, KernelFunction]) -> Callable[P, Kernel]:
    """Decorates a builder, a function on module level: calling it gives the compiled kernel.

    A builder returns the function to compile; what that uses of the builder's variables becomes constant. Its arguments
    need a ``repr`` that tells all: numbers, strings, dataclasses of such. The same arguments give the same kernel; the
    first time takes Numba seconds. Calling it raises NumbaMissingError, and whatever compiling raises."""

    @wraps(build)
    def made(*args: P.args, **kwargs: P.kwargs) -> Kernel:
        values = [*map(repr, args), *(f"{name}={value!r}" for name, value in sorted(kwargs.items()))]
        return find_kernel(f"{build.__module__}.{build.__qualname__}", values, lambda: build(*args, **kwargs))

    return cast(Callable[P, Kernel], cache(made))


def find_kernel(name: str, values: list[str], build: Callable[[], KernelFunction]) -> Kernel:
    """Load a kernel, or compile and keep it. name: of the builder; values: its arguments. Raises as what
    `kernel_builder` makes."""
    try:
        key = json.dumps([name, values, target.description()])
    except ImportError as error:  # llvmlite comes with Numba
        raise _missing(error) from error
    digest = hashlib.sha256(key.encode()).hexdigest()[:24]
    file = f"{name.rpartition('.')[2]}-{digest}.kernel"
    for folder in _folders():
        code = _read(folder / file, key)
        if code is not None and all(map(_resolves, code.needs)):
            return Kernel(_load(code), was_kept=True)
    code = _compile(build, digest)
    if (folder := _folder_to_write()) is not None:
        _write(folder / file, key, code)
    return Kernel(_load(code), was_kept=False)


# -- compiling ---------------------------------------------------------------------------------------------------------


def _compile(build: Callable[[], KernelFunction], digest: str) -> Code:
    """digest: of all that the kernel depends on; its function has it in its name, so that no two in a process have the
    same one. Raises NumbaMissingError, and whatever compiling raises."""
    try:
        from numba import cfunc
    except ImportError as error:  # not installed, or not for this numpy
        raise _missing(error) from error
    function = build()
    function.__qualname__ = f"{function.__name__}_{digest}"
    # In Python's model of errors a division would be one that may raise.
    compiled: Any = cfunc(SIGNATURE, error_model="numpy", cache=False)(function)
    library = compiled._library
    needs = re.findall(r'^(?:declare [^@]*|(?=@\S+ = external ))@"?([^"( ]+)', library.get_llvm_str(), re.MULTILINE)
    outside = sorted({name for name in needs if not name.startswith("llvm.")})
    return Code(compiled.native_name, tuple(outside), library._get_compiled_object())


def _missing(error: ImportError) -> NumbaMissingError:
    return NumbaMissingError(f"Numba cannot be imported ({error}); pip install 'baton-serve[cpu]'")


# -- loading -----------------------------------------------------------------------------------------------------------

_LOADING = threading.Lock()
_LOADED: dict[str, int] = {}
"""Addresses of functions, by symbol."""


@cache
def _engine() -> Any:
    """LLVM's linker of code in memory, for as long as the process lives."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine()
    return binding.create_mcjit_compiler(binding.parse_assembly(""), machine)


def _load(code: Code) -> int:
    """The address of its function."""
    from llvmlite import binding

    with _LOADING:
        engine = _engine()
        if code.symbol in _LOADED:  # by another thread
            return _LOADED[code.symbol]
        if not all(map(_resolves, code.needs)):  # LLVM would end the process
            missing = [name for name in code.needs if not _resolves(name)]
            raise RuntimeError(f"a kernel needs {', '.join(missing)}, which this process does not have")
        engine.add_object_file(binding.ObjectFileRef.from_data(code.data))
        engine.finalize_object()
        _LOADED[code.symbol] = address = engine.get_function_address(code.symbol)
        assert address, f"{code.symbol} is not in the code that was compiled as such"
        return address


def _resolves(name: str) -> bool:
    """True if LLVM finds the function in this process. Those that report an exception become C's ``abort``, unless
    Numba has defined them."""
    from llvmlite import binding

    if binding.address_of_symbol(name) is not None:
        return True
    process = ctypes.CDLL(None)
    function = getattr(process, "abort" if name in RAISING else name, None)
    if function is None:
        return False
    binding.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)
    return True


# -- keeping -----------------------------------------------------------------------------------------------------------


def _parents() -> Iterator[Path]:
    """Where kernels may be kept: beside their source, as Python keeps its own compiled code, else in the cache
    folder."""
    yield Path(__file__).parent / "__pycache__"
    with contextlib.suppress(OSError):
        yield cache_folder()


def _folders() -> Iterator[Path]:
    """The folders in which these sources' kernels are looked for. An image may bring some that cannot be written to."""
    for parent in _parents():
        folder = parent / "kernels" / _sources()
        if folder not in _USED:
            _USED.add(folder)
            with contextlib.suppress(OSError):  # it need not exist
                os.utime(folder)  # it is in use, see `_delete_old`
        yield folder


_USED: set[Path] = set()


def _folder_to_write() -> Path | None:
    """The first folder that can be written to; None, with a warning, if there is none."""
    for folder in _folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                continue
        except OSError:
            continue
        _delete_old(folder)
        return folder
    _warn(f"compiled kernels cannot be kept; every start compiles them. Set {VARIABLE} to a folder that can be written")
    return None


def _delete_old(folder: Path) -> None:
    """Delete the folders beside this one that no process has used for long."""
    with contextlib.suppress(OSError):
        for other in folder.parent.iterdir():
            if other != folder and other.stat().st_mtime < time.time() - KEPT_SECONDS:
                shutil.rmtree(other, ignore_errors=True)


@cache
def _sources() -> str:
    """A checksum of the sources of kernels, and of what compiles them."""
    found = hashlib.sha256(f"{FORMAT} {[_version(name) for name in ('numba', 'llvmlite')]}".encode())
    for pattern in _SOURCES:
        for path in sorted(_PACKAGE.glob(pattern)):
            found.update(path.read_bytes())
    return found.hexdigest()[:24]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read(path: Path, key: str) -> Code | None:
    """The code in the file; None if there is no file, or it is damaged or another kernel's, which is logged."""
    try:
        whole = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        _warn(f"cannot read a compiled kernel; compiling it again: {error}")
        return None
    checksum, _, rest = whole.partition(b"\n")
    if checksum.decode(errors="replace") == hashlib.sha256(rest).hexdigest():
        head, _, data = rest.partition(b"\n")
        found = json.loads(head)
        if found["key"] == key:
            return Code(found["symbol"], tuple(found["needs"]), data)
    _warn(f"the compiled kernel in {path} is damaged or another's; compiling it again")
    return None


def _write(path: Path, key: str, code: Code) -> None:
    """Keep the code, as a whole or not at all."""
    head = {"key": key, "symbol": code.symbol, "needs": code.needs}
    rest = json.dumps(head).encode() + b"\n" + code.data
    unfinished = None
    try:
        descriptor, unfinished = tempfile.mkstemp(dir=path.parent, prefix=".unfinished-")
        os.fchmod(descriptor, 0o644)  # an image's kernels are compiled by another user than the server's
        with os.fdopen(descriptor, "wb") as file:
            file.write(hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)
        os.replace(unfinished, path)
    except OSError as error:
        if unfinished is not None:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
        _warn(f"a compiled kernel cannot be kept: {error}")


@cache
def _warn(message: str) -> None:
    """Once for each message."""
    logger.warning("%s", message)
