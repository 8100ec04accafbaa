"""Every implementation of every layer op on a GPU, against the torch twin in float32 on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from baton.memory_pool.kv_pool import MHAKVPool, uniform_shapes
from baton.runtime.layers.op_libraries import LIBRARIES, OP_NAMES, PREFERENCE, SGL, TRITON, Trial, select_ops, tolerance
from baton.runtime.layers.ops import TORCH_OPS, OpShape

pytestmark = pytest.mark.gpu

SHAPES = {
    "8B": OpShape(4096, 14336, num_heads=32, num_kv_heads=8, head_dim=128, qk_norm=False, eps=1e-5),
    "qk_norm": OpShape(1024, 3072, num_heads=16, num_kv_heads=8, head_dim=128, qk_norm=True, eps=1e-6),
    "head 64": OpShape(896, 4864, num_heads=14, num_kv_heads=2, head_dim=64, qk_norm=False, eps=1e-6),
    "70B": OpShape(8192, 28672, num_heads=64, num_kv_heads=8, head_dim=128, qk_norm=False, eps=1e-5),
}
CASES = [*[(shape, torch.bfloat16) for shape in SHAPES], ("8B", torch.float16), ("qk_norm", torch.float16)]
EXACT = ("copy_kv", "transfer_kv")
LIBRARY_NAMES = ("torch", *(library.name for library in LIBRARIES))


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def implementations(gpu) -> Callable[[str, str], Callable[..., Any]]:
    """(library, op) -> function; skips where there is none."""
    loaded: dict[str, Mapping[str, Callable[..., Any]] | Exception] = {
        "torch": {name: getattr(TORCH_OPS, name) for name in OP_NAMES}
    }
    for library in LIBRARIES:
        try:
            loaded[library.name] = library.load(gpu)
        except Exception as error:
            loaded[library.name] = error

    def get(library: str, name: str) -> Callable[..., Any]:
        operations = loaded[library]
        if isinstance(operations, Exception):
            pytest.skip(f"{library}: {type(operations).__name__}: {operations}")
        if name not in operations:
            pytest.skip(f"{library} has no {name}")
        return operations[name]

    return get


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("library", LIBRARY_NAMES)
@pytest.mark.parametrize("name", OP_NAMES)
def test_gpu_ops_match_torch(parity, implementations, gpu, name, library, shape, dtype):
    op = implementations(library, name)
    allowed = 0.0 if name in EXACT else tolerance(dtype)
    for tokens in (1, 3, 64, 300):
        trial = Trial(SHAPES[shape], tokens, dtype, seed=tokens)
        for found, expected in zip(trial.found(name, op, gpu), trial.expected(name), strict=True):
            label = f"{name}, {library}, {str(dtype).removeprefix('torch.')}"
            parity(label, found, expected, atol=allowed, rtol=allowed)


@pytest.mark.parametrize("library", LIBRARY_NAMES)
@pytest.mark.parametrize("name", OP_NAMES)
def test_gpu_ops_accept_zero_tokens(implementations, gpu, name, library):
    trial = Trial(SHAPES["head 64"], 0, torch.bfloat16)
    found = trial.found(name, implementations(library, name), gpu)
    assert [part.shape for part in found] == [part.shape for part in trial.expected(name)]


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "silu_and_mul", "rotate_and_store"])
def test_selected_ops_run_in_a_graph(gpu, name):
    """Captured on one input, replayed on another: nothing waits for the device, nothing is remembered."""
    shape, tokens, dtype = SHAPES["8B"], 16, torch.bfloat16
    op = getattr(select_ops(gpu, dtype, shape), name)
    trial = Trial(shape, tokens, dtype, seed=1)

    def replayed(*arguments: Any) -> Any:
        static = [part.clone() if isinstance(part, torch.Tensor) else part for part in arguments]
        static_tensors = [part for part in static if isinstance(part, torch.Tensor)]
        wanted = [part.clone() for part in arguments if isinstance(part, torch.Tensor)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            op(*static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = op(*static)
        for there, here in zip(static_tensors, wanted, strict=True):
            there.copy_(here)
        graph.replay()
        torch.cuda.synchronize()
        for there, here in zip(static_tensors, [part for part in arguments if isinstance(part, torch.Tensor)]):
            here.copy_(there)  # what the op wrote: the trial looks at its own tensors
        return result

    for found, expected in zip(trial.found(name, replayed, gpu), trial.expected(name), strict=True):
        torch.testing.assert_close(found, expected, atol=tolerance(dtype), rtol=tolerance(dtype))


def test_selection_is_logged_and_takes_first_choices_that_load(gpu, caplog):
    with caplog.at_level(logging.INFO, logger="baton.runtime.layers.op_libraries"):
        select_ops(gpu, torch.bfloat16, SHAPES["8B"])
    infos = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(infos) == 1 and len(warnings) <= 1
    for name, preference in PREFERENCE.items():
        if not any(f"{library} cannot be used" in warning for library in (SGL, TRITON) for warning in warnings):
            assert f"{name} {preference[0]}" in infos[0], (infos, warnings)


def test_pool_copies_use_the_selected_op(gpu):
    shape = SHAPES["head 64"]
    ops = select_ops(gpu, torch.bfloat16, shape)
    pool = MHAKVPool(
        num_tokens=64,
        page_size=16,
        shapes=uniform_shapes(5, shape.num_kv_heads, shape.head_dim),
        dtype=torch.bfloat16,
        device=gpu,
        copy_disjoint=ops.copy_kv,
    )
    for tensor in (*pool.k, *pool.v):
        tensor.normal_()
    source, target = (
        torch.from_numpy(part).to(gpu) for part in np.random.default_rng(0).permutation(80).reshape(2, 40)
    )
    expected = [tensor.clone() for tensor in (*pool.k, *pool.v)]
    for tensor in expected:
        tensor[target] = tensor[source]
    pool.copy(source, target, disjoint=True)
    for tensor, wanted in zip((*pool.k, *pool.v), expected, strict=True):
        assert torch.equal(tensor, wanted)
