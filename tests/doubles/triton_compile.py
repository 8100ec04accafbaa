"""Compile Triton kernels for GPUs that are not there: to the machine code a launch with these arguments would run.

    with compiling_for(90) as compiled:
        rms_norm(torch.zeros(3, 64), ...)      # a wrapper that launches a kernel, called with CPU tensors
    compiled                                   # names of the kernels; nothing ran

Triton brings its own assembler, so that no GPU and no CUDA is needed. Needs a process in which the interpreter is off
(TRITON_INTERPRET unset when triton is first imported).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint64: "u64",
    torch.uint8: "u8",
    torch.bool: "i1",
}
LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas")


@contextmanager
def compiling_for(capability: int) -> Iterator[list[str]]:
    """capability: of the GPU, e.g. 90. Yields the names of the kernels compiled so far."""
    compiled: list[str] = []

    def run(kernel: Any, *positional: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = {name: named.pop(name) for name in LAUNCH_OPTIONS if name in named}
        arguments = dict(zip(kernel.arg_names, positional)) | named
        assert list(arguments) == kernel.arg_names, "arguments in another order than the kernel has them"
        source = ASTSource(kernel, *_specialized(kernel, arguments))
        result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert result.asm["cubin"]
        compiled.append(kernel.fn.__name__)

    with mock.patch.object(JITFunction, "run", run):
        yield compiled


def _is_one(parameter: Any, value: Any) -> bool:
    """An integer that Triton takes for a constant."""
    return isinstance(value, int) and value == 1 and not parameter.do_not_specialize


def _specialized(kernel: Any, arguments: dict[str, Any]) -> tuple[dict[str, str], dict[Any, Any], dict[Any, Any]]:
    """-> signature, constants, attributes: what Triton's launcher makes of the arguments."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name, value = parameter.name, arguments[parameter.name]
        if parameter.is_constexpr or value is None or _is_one(parameter, value):
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
            if value.data_ptr() % 16 == 0 and not parameter.do_not_specialize_on_alignment:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment):
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    return signature, constants, attributes
