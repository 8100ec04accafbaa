"""The copy of scattered pages, compiled by Numba. Numba is optional: without it importing this file still works.

A page of one layer may be as small as 512 bytes, and no function of numpy or torch reads and writes such pieces at two
lists of places: they gather into a buffer first and then scatter. Here each piece goes once, and in stores that do not
read the line they replace ("non-temporal"), as no thread looks at these bytes soon.

The kernels know addresses only. They check nothing: the caller has checked that all pages are inside.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

Kernel = Callable[..., None]
"""(source addresses, source steps, source pages, target addresses, target steps, target pages, bytes of a piece):
int64 [planes] twice, int64 [n]; twice; int. Releases the GIL, runs on the caller's thread."""

LINE = 64

SIGNATURE = "void(int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64)"


@cache
def compile_copy() -> tuple[Kernel, Kernel]:
    """Two kernels that copy the same: the first for pieces and targets in whole lines of 64 bytes, the second for any.
    Takes about a second. Raises ImportError without Numba."""
    numba = import_module("numba")
    stream_line, fence, copy_bytes = _intrinsics()

    @numba.njit(SIGNATURE, nogil=True)
    def stream(source, source_steps, source_pages, target, target_steps, target_pages, size):
        for i in range(len(source_pages)):
            for plane in range(len(source)):
                read = source[plane] + source_pages[i] * source_steps[plane]
                write = target[plane] + target_pages[i] * target_steps[plane]
                for offset in range(0, size, LINE):
                    stream_line(write + offset, read + offset)
        fence()  # other threads see what was streamed before they see that we are done

    @numba.njit(SIGNATURE, nogil=True)
    def copy(source, source_steps, source_pages, target, target_steps, target_pages, size):
        for i in range(len(source_pages)):
            for plane in range(len(source)):
                read = source[plane] + source_pages[i] * source_steps[plane]
                copy_bytes(target[plane] + target_pages[i] * target_steps[plane], read, size)

    return stream, copy


def _intrinsics() -> tuple[Any, Any, Any]:
    """Operations that Python lacks: storing a line of 64 bytes past the caches, the fence after such lines, and
    memcpy."""
    numba, ir = import_module("numba"), import_module("llvmlite.ir")
    cgutils, extending = import_module("numba.core.cgutils"), import_module("numba.extending")
    address, void = numba.types.int64, numba.types.void
    line = ir.VectorType(ir.IntType(64), LINE // 8)

    @extending.intrinsic
    def stream_line(_context, _target, _source):
        def generate(context, builder, _signature, arguments):
            target, source = (builder.inttoptr(argument, line.as_pointer()) for argument in arguments)
            store = builder.store(builder.load(source, align=1), target, align=LINE)
            store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
            return context.get_dummy_value()

        return void(address, address), generate

    @extending.intrinsic
    def fence(_context):
        def generate(context, builder, _signature, _arguments):
            builder.fence("seq_cst")
            return context.get_dummy_value()

        return void(), generate

    @extending.intrinsic
    def copy_bytes(_context, _target, _source, _size):
        def generate(context, builder, _signature, arguments):
            target, source = (builder.inttoptr(argument, cgutils.voidptr_t) for argument in arguments[:2])
            cgutils.raw_memcpy(builder, target, source, arguments[2], 1)
            return context.get_dummy_value()

        return void(address, address, address), generate

    return stream_line, fence, copy_bytes
