"""Measures every implementation of every layer op alone, in microseconds on the device.

    python -m benchmarks.kernels.layer_ops           # on a GPU: torch, sglang-kernel and Triton side by side
    python -m benchmarks.kernels.layer_ops --device cpu --model qwen3-0.6b --tokens 1 8 --dtype float32

On a GPU a CUDA graph of many calls is replayed, so that launches from the host do not count; data stay in the L2 cache
as far as they fit, as between the operations of a layer. GB/s is the least memory traffic of the fastest
implementation.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch

from baton.runtime.layers.op_libraries import LAYERS, LIBRARIES, OP_NAMES, SPARE_SLOTS, Trial, try_out
from baton.runtime.layers.ops import TORCH_OPS, OpShape

MODELS = {
    "llama-3.1-8b": OpShape(4096, 14336, num_heads=32, num_kv_heads=8, head_dim=128, qk_norm=False, eps=1e-5),
    "qwen3-0.6b": OpShape(1024, 3072, num_heads=16, num_kv_heads=8, head_dim=128, qk_norm=True, eps=1e-6),
}
CALLS = 20
"""In one graph."""


def load(device: torch.device) -> dict[str, Mapping[str, Callable[..., Any]]]:
    """Library -> its operations; says which cannot be loaded."""
    found: dict[str, Mapping[str, Callable[..., Any]]] = {
        "torch": {name: getattr(TORCH_OPS, name) for name in OP_NAMES}
    }
    if device.type == "cuda":
        for library in LIBRARIES:
            try:
                found[library.name] = library.load(device)
            except Exception as error:
                print(f"{library.name} cannot be used: {type(error).__name__}: {error}")
    return found


def arguments_of(name: str, trial: Trial, device: torch.device) -> tuple[Any, ...]:
    """Arguments of a trial's first call of the operation."""
    caught: list[tuple[Any, ...]] = []

    def catch(*arguments: Any) -> Any:
        caught.append(arguments)
        return getattr(TORCH_OPS, name)(*arguments)

    trial.found(name, catch, device)
    return caught[0]


def microseconds(run: Callable[[], object], device: torch.device, repeat: int) -> float:
    """The fastest of some rounds, per call."""
    run()
    if device.type != "cuda":
        times = []
        for _ in range(repeat):
            start = time.process_time()
            run()
            times.append(time.process_time() - start)
        return 1e6 * min(times)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            run()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 1)]
    for event in events[:-1]:
        event.record()
        graph.replay()
    events[-1].record()
    torch.cuda.synchronize()
    return 1e3 * min(first.elapsed_time(second) for first, second in pairwise(events)) / CALLS


def time_libraries(
    libraries: dict[str, Mapping[str, Callable[..., Any]]], name: str, trial: Trial, device: torch.device, repeat: int
) -> dict[str, float]:
    """Microseconds per call of each library that has the operation and passes the trial."""
    arguments = arguments_of(name, trial, device)
    working = {
        library: operations[name]
        for library, operations in libraries.items()
        if name in operations and try_out(name, operations[name], trial, device) is None
    }
    return {library: microseconds(lambda op=op: op(*arguments), device, repeat) for library, op in working.items()}


def bytes_moved(name: str, shape: OpShape, tokens: int, copied: int, itemsize: int) -> int:
    """Read and written at least. copied: slots that a copy copies."""
    qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    numbers = {
        "rms_norm": 2 * shape.hidden_size * tokens,
        "add_rms_norm": 4 * shape.hidden_size * tokens,
        "silu_and_mul": 3 * shape.intermediate_size * tokens,
        "rotate_and_store": 2 * qkv * tokens,
    }
    kv = 2 * 2 * LAYERS * shape.num_kv_heads * shape.head_dim * copied
    return numbers.get(name, kv) * itemsize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=list(MODELS), default="llama-3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 512, 4096])
    parser.add_argument("--repeat", type=int, default=10)
    args = parser.parse_args()
    device, dtype, shape = torch.device(args.device), getattr(torch, args.dtype), MODELS[args.model]
    libraries = load(device)
    name_of_device = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{args.model}, {args.dtype}, {name_of_device}, torch {torch.__version__}; copies are of {LAYERS} layers")
    heading = "".join(f"{library:>15s}" for library in libraries)
    print(f"{'us per call':18s}{'tokens':>8s}{heading}{'GB/s':>8s}")
    with torch.inference_mode():
        for name in OP_NAMES:
            if name == "transfer_kv":  # over the host link, and in torch it waits: no graph of it
                continue
            for tokens in args.tokens:
                trial = Trial(shape, tokens, dtype)
                times = time_libraries(libraries, name, trial, device, args.repeat)
                cells = "".join(f"{times[each]:15.1f}" if each in times else f"{'-':>15s}" for each in libraries)
                # A trial copies half of its slots.
                moved = bytes_moved(name, shape, tokens, (tokens + SPARE_SLOTS) // 2, dtype.itemsize)
                speed = f"{moved / min(times.values()) / 1e3:8.0f}" if times else f"{'-':>8s}"
                print(f"{name:18s}{tokens:8d}{cells}{speed}")


if __name__ == "__main__":
    main()
