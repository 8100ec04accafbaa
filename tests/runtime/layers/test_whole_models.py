"""Whole models on each implementation of the layer ops: what they overwrite, return strided or alias is used rightly.

Triton's kernels run in its interpreter, sglang-kernel's calls on stand-ins.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.memory_pool.kv_pool import KVLayers
from baton.runtime.config import ModelArgs
from baton.runtime.layers.op_libraries import LIBRARIES
from baton.runtime.layers.ops import TORCH_OPS, Ops
from baton.runtime.runner.device_backends import TORCH_BACKENDS
from baton.runtime.runner.model_runner import ModelRunner
from baton.scheduler.batch import KVCopies
from tests.doubles.fake_sgl_kernel import FakeSglKernel
from tests.doubles.model_driver import ModelDriver
from tests.doubles.tiny_models import MODELS, make_reference

CPU = torch.device("cpu")
NAMES = ("llama", "llama, tied, odd head_dim", "llama 3.1 rope", "mistral, window", "qwen2", "qwen3, bias, tied")
LIBRARY_NAMES = [library.name for library in LIBRARIES]
TRITON = "triton"
INTERPRETED = ("llama, tied, odd head_dim", "qwen3, bias, tied")
"""Between them, these call all ops with all their options. Triton's interpreter takes more than a second for a model:
`make test-slow` has the others."""
PROMPTS = ([5, 9, 2, 77, 31, 8, 90, 14], [64, 3], [100, 41, 41, 12, 7])


@pytest.fixture
def library(request, monkeypatch, interpreter):
    """Ops of one library, torch's where it has none."""
    with FakeSglKernel(monkeypatch):
        (load,) = (library.load for library in LIBRARIES if library.name == request.param)
        yield replace(TORCH_OPS, **load(CPU))


def generate(folder: Path, ops: Ops, steps: int = 4) -> tuple[list[list[int]], torch.Tensor]:
    """Prompts in one step, then greedily; a fork by copied slots at the end. -> ids and the last logits."""
    args = ModelArgs(model_path=str(folder), dtype="float32", device="cpu")
    backends = replace(TORCH_BACKENDS, ops=ops)
    runner = ModelRunner(args, context_length=64, num_rows=4, page_size=4, max_total_tokens=256, backends=backends)
    driver = ModelDriver(runner, page_size=4)
    sequences = [driver.open(prompt) for prompt in PROMPTS]
    driver.generate(sequences, steps)
    parent = sequences[0]
    fork = driver.open(parent.ids)
    own = driver.pool.rows[parent.row, : parent.computed].copy()
    unused = [slot for slot in range(4, 256) if slot not in driver.pool.rows]
    copied = own.copy()
    copied[:] = unused[: len(own)]
    driver.pool.write(fork.row, 0, copied)
    fork.computed = parent.computed
    output = driver.step([(parent, 1), (fork, 1)], logprob_starts=[0, 0], copies=[KVCopies(source=own, target=copied)])
    assert output.logprob_hidden is not None
    torch.testing.assert_close(output.logits[0], output.logits[1], atol=1e-4, rtol=1e-4)
    return [sequence.ids.tolist() for sequence in sequences], output.logits


@pytest.mark.parametrize(
    ("library", "name"),
    [
        pytest.param(library, name, marks=pytest.mark.slow if library == TRITON and name not in INTERPRETED else ())
        for library in LIBRARY_NAMES
        for name in NAMES
    ],
    indirect=["library"],
)
def test_op_libraries_give_same_tokens_as_torch(tmp_path, library, name):
    make_reference(*MODELS[name]).save_pretrained(tmp_path)
    expected_ids, expected = generate(tmp_path, TORCH_OPS)
    ids, logits = generate(tmp_path, library)
    assert ids == expected_ids
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("library", LIBRARY_NAMES, indirect=True)
def test_fork_copies_use_copy_kv_op(tmp_path, library):
    copies: list[int] = []

    def counting(source: KVLayers, target: KVLayers, source_slots: torch.Tensor, target_slots: torch.Tensor) -> None:
        copies.append(len(source_slots))
        library.copy_kv(source, target, source_slots, target_slots)

    make_reference(*MODELS["llama"]).save_pretrained(tmp_path)
    generate(tmp_path, replace(library, copy_kv=counting))
    assert copies == [11]
