"""What a GPU computes with, on a CPU: FlashInfer's backend over a double of the library, graphs that compute again what
a CUDA graph would replay. Everything around the kernels is the real thing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import ClassVar

import torch

from baton.attention.backend import GraphShape
from baton.attention.flashinfer.backend import FlashInferBackend
from baton.attention.flashinfer.library import build_kv_indices
from baton.runtime.layers.ops import TORCH_OPS
from baton.runtime.runner.cuda_graph import GraphRunner
from baton.runtime.runner.device_backends import DeviceBackends
from baton.runtime.runner.model_runner import ModelRunner
from tests.doubles.block_kernel import kernel
from tests.doubles.fake_flashinfer import FakeFlashInfer
from tests.doubles.forced_options import FORCED


class Rerun:
    """A Recorder, the slow twin of CUDA's: computes again what a graph would replay."""

    name: ClassVar[str] = "CUDA graphs"

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """See Recorder.record."""
        output = run().clone()

        def replay() -> None:
            output.copy_(run())

        return output, replay


def graph_backends(*, graphs: bool = True) -> DeviceBackends:
    """Without ``graphs``: FlashInfer's backend alone."""
    library = FakeFlashInfer().library
    return DeviceBackends(
        ops=TORCH_OPS,
        attention=lambda pool, specs: FlashInferBackend(pool, specs, library, build_kv_indices),
        recorder=Rerun if graphs else None,
        products=kernel(torch.float32) if FORCED["linear_backend"] == "numba" else None,
    )


def count_replays(runner: ModelRunner) -> Counter[GraphShape]:
    """How often each graph of the runner is replayed from now on."""
    replays: Counter[GraphShape] = Counter()
    graphs = runner._graphs
    assert isinstance(graphs, GraphRunner)
    replay = graphs.replay

    def count(shape: GraphShape):
        replays[shape] += 1
        return replay(shape)

    graphs.replay = count
    return replays
