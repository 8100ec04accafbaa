"""Captures forwards of fixed shapes once and replays them: one launch in place of several hundred.

On a GPU they are CUDA graphs; on a CPU, recorded calls of Numba's kernels (attention/numba_paged/recording.py).

    step ─▶ find a shape ─▶ pad the step to it (forward_batch) ─▶ plan attention, copy the inputs ─▶ replay ─▶ hidden

A graph covers the layers, from token ids to hidden states. Everything around them differs from step to step and stays
outside: changes of req_to_token, KV copies, planning, and the logits of the rows that want them.

A `Recorder` does the capturing, so that everything else here runs, and is tested, on a CPU too.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from tqdm import tqdm

from ...attention.backend import AttentionBackend, AttentionBatch, GraphAttention, GraphBackend, GraphKind, GraphShape
from ...memory_pool.state_pool import StatePool
from ..layers.states.state_batch import start_states
from ..layers.step_inputs import StepInputs
from .forward_batch import ForwardBatch, padding_only

logger = logging.getLogger(__name__)

QUERY_TILE = 64
"""Query rows (queries × heads per KV head) that a kernel should take at a time in short extends. FlashInfer derives its
tile from the longest sequence that a shape allows: tokens - sequences + 1."""

FREE_SEQUENCES = 129
"""A short extend gets up to this many sequences, one of them for padding, even if fewer can run: that keeps its tile
small. Planning them takes the library a quarter of a millisecond."""

WANTED = 32
"""Steps of one shape after which it is captured while requests run, if it has not been captured before. It takes as
long as a few steps."""

MIN_SHARED_ROWS = 64
"""With fewer beams than two searches of 32, reading shared prefixes apart gains nothing."""


def decode_sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, then steps of 8 up to 64, of 16 up to 128, of 32 up to 256, of 64 beyond; the last is ``largest``."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, largest + 1, 64)]
    return [*(size for size in sizes if size < largest), largest] if largest else []


def extend_sizes(largest: int) -> list[int]:
    """8, 16, 24, 32, then steps of 16 up to 64, of 32 up to 192, of 64 beyond; the last is ``largest``."""
    sizes = [8, 16, 24, *range(32, 64, 16), *range(64, 192, 32), *range(192, largest + 1, 64)]
    return [*(size for size in sizes if size < largest), largest] if largest else []


class GraphCatalog:
    """All graph shapes of one model. A step is padded to the next size. Small sizes lie close together; large ones lie
    further apart, as there fewer graphs are worth more than the padding costs."""

    def __init__(self, *, max_sequences: int, max_tokens: int, group: int) -> None:
        """max_sequences: rows of the largest decode step that runs as a graph, 0 for no graphs. max_tokens: new tokens
        of the largest extend, 0 for none. group: query heads per KV head."""
        decode = [GraphShape(GraphKind.DECODE, size, size) for size in decode_sizes(max_sequences)]
        shared = [
            GraphShape(GraphKind.SHARED, shape.tokens, shape.sequences)
            for shape in decode
            if shape.tokens >= MIN_SHARED_ROWS and (shape.tokens % 64 == 0 or shape is decode[-1])
        ]
        longest = max(1, QUERY_TILE // group)
        extend = [
            GraphShape(GraphKind.EXTEND, size, min(max(2, size + 1 - longest), max(max_sequences + 1, FREE_SEQUENCES)))
            for size in extend_sizes(max_tokens if max_sequences else 0)
        ]
        self._of_kind = {GraphKind.DECODE: decode, GraphKind.EXTEND: extend, GraphKind.SHARED: shared}

    @classmethod
    def of_tokens(cls, sizes: Sequence[int]) -> GraphCatalog:
        """Shapes with these numbers of tokens and any kinds of sequences, for backends that plan the sequences in each
        replay."""
        catalog = cls(max_sequences=0, max_tokens=0, group=1)
        catalog._of_kind[GraphKind.DECODE] = [GraphShape(GraphKind.DECODE, size, size) for size in sorted(sizes)]
        return catalog

    @property
    def largest_first(self) -> list[GraphShape]:
        """The order to capture in, so that the memory that all graphs share gets its full size at once. Extends come
        before others of the same size, since their tiles are larger."""
        shapes = [shape for kind in self._of_kind.values() for shape in kind]
        return sorted(shapes, key=lambda shape: (shape.tokens, shape.kind is GraphKind.EXTEND), reverse=True)

    @property
    def largest_of_each_kind(self) -> list[GraphShape]:
        """The largest shape of each kind, in the same order."""
        largest = {kind: shapes[-1] for kind, shapes in self._of_kind.items() if shapes}
        return [shape for shape in self.largest_first if shape is largest[shape.kind]]

    def find_shape(self, kind: GraphKind, tokens: int, sequences: int) -> GraphShape | None:
        """The smallest shape that holds such a step, or None."""
        for shape in self._of_kind[kind]:
            padding = 1 if kind is GraphKind.EXTEND and tokens < shape.tokens else 0
            if tokens <= shape.tokens and sequences + padding <= shape.sequences:
                return shape
        return None


Forward = Callable[[StepInputs, AttentionBackend], torch.Tensor]
"""The layers: hidden states [tokens, hidden_size]."""


class Recorder(Protocol):
    """Captures a computation on tensors that stay where they are."""

    name: ClassVar[str]
    """Name of its graphs, for the log."""

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """-> (the output, a function that recomputes it from the current contents of the inputs)."""
        ...


class CudaRecorder:
    """Records with torch.cuda.CUDAGraph. All graphs share one memory pool, as no two run at the same time. All are
    captured on one stream, as torch keeps a cuBLAS workspace for every stream it has seen (32 MiB on Hopper)."""

    name: ClassVar[str] = "CUDA graphs"

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """See Recorder.record."""
        # Run once first: what is made at first use (cuBLAS workspaces, compiled kernels) must exist before the capture.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process (with the in-process Engine) keep running while this one captures.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = run()
        return output, graph.replay


@dataclass(slots=True)
class _Graph:
    attention: GraphAttention
    inputs: StepInputs
    hidden: torch.Tensor
    replay: Callable[[], None]


class GraphRunner:
    """The captured forwards of one model."""

    def __init__(
        self,
        forward: Forward,
        attention: GraphBackend,
        shapes: GraphCatalog,
        recorder: Recorder,
        req_to_token: torch.Tensor,
        states: StatePool | None = None,
        *,
        windows: bool = False,
        late: bool = False,
    ) -> None:
        """Captures all shapes. req_to_token: the device mirror, its last row all zeros. states: of a model that keeps
        some; only recorded kernels can find those of another step. windows: layers with a window have a pool of their
        own. late: captures the largest and the smallest, which shows that it works; the others when `capture_next` is
        called, or steps want them."""
        self._attention = attention
        self._states = states
        self._shapes = shapes
        self._windows = windows
        self._forward, self._recorder, self._req_to_token = forward, recorder, req_to_token
        self._graphs: dict[GraphShape, _Graph] = {}
        all_shapes = shapes.largest_first
        at_start = list(dict.fromkeys((all_shapes[0], all_shapes[-1]))) if late else all_shapes
        self._wanted = {shape: 0 for shape in all_shapes if shape not in at_start}
        """How many steps have wanted each shape that has not been captured."""
        progress = tqdm(at_start, desc=f"Capturing {recorder.name}", unit="graph", disable=None)
        # No garbage collection during a capture: it might free another graph.
        gc.collect()
        collects = gc.isenabled()
        gc.disable()
        try:
            for shape in progress:
                progress.set_postfix_str(str(shape))
                self._graphs[shape] = self._capture(shape)
        finally:
            if collects:
                gc.enable()

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    def capture_next(self) -> bool:
        """Capture one more shape, the one that most steps have wanted. Not while a step is computed. False if none is
        left."""
        if not self._wanted:
            return False
        self._capture_late(max(self._wanted, key=lambda shape: self._wanted[shape]))
        return True

    def find_shape(self, batch: AttentionBatch) -> GraphShape | None:
        """The captured shape that this step (not padded) runs in, if any."""
        shape = self._fitting_shape(batch)
        if shape in self._wanted:
            self._wanted[shape] += 1
            if self._wanted[shape] >= WANTED:
                self._capture_late(shape)
        return shape if shape in self._graphs else None

    def _capture_late(self, shape: GraphShape) -> None:
        del self._wanted[shape]
        try:
            self._graphs[shape] = self._capture(shape)
        except Exception as error:
            logger.warning(
                "no %s of %d tokens; each kernel is launched separately: %s",
                self._recorder.name,
                shape.tokens,
                error,
                exc_info=error,
            )

    def _fitting_shape(self, batch: AttentionBatch) -> GraphShape | None:
        kind = self._attention.graph_kind(batch)
        # Beams may also run as a plain decode, in which each reads its prefix by itself.
        for possible in (kind, GraphKind.DECODE) if kind is GraphKind.SHARED else (kind,):
            shape = self._shapes.find_shape(possible, int(batch.extend_lens.sum()), len(batch.host_rows))
            if shape is not None and self._attention.fits_graph(batch, shape):
                return shape
        return None

    def plan_replay(self, shape: GraphShape, batch: ForwardBatch) -> None:
        """Prepare a replay for ``batch``, which has been padded to the shape."""
        graph = self._graphs[shape]
        graph.attention.plan(batch.attention)
        graph.inputs.copy_(batch.inputs)

    def replay(self, shape: GraphShape) -> torch.Tensor:
        """Hidden states [shape.tokens, hidden_size] of the planned step; the next replay overwrites them."""
        graph = self._graphs[shape]
        graph.replay()
        return graph.hidden

    def check_graphs(self, forward: Forward, attention: AttentionBackend, req_to_token: torch.Tensor) -> None:
        """Compare the smallest and the largest with ``forward``, on padding. Raises RuntimeError where they differ."""
        shapes = self._shapes.largest_first
        for shape in (shapes[-1], shapes[0]):
            graph, batch = self._graphs[shape], padding_only(req_to_token, shape)
            graph.attention.plan(batch)
            attention.plan(batch)
            expected = forward(graph.inputs, attention)
            found, largest = self.replay(shape), max(1.0, float(expected.abs().max()))
            allowed = 2 * torch.finfo(expected.dtype).eps
            if not torch.allclose(found, expected, atol=allowed * largest, rtol=allowed):
                raise RuntimeError(
                    f"a recorded step of {shape.tokens} tokens gives other numbers than the same step unrecorded"
                )

    def _capture(self, shape: GraphShape) -> _Graph:
        attention, forward = self._attention.open_graph(shape), self._forward
        attention.plan(padding_only(self._req_to_token, shape))
        inputs = StepInputs.zeros(shape.tokens, self._req_to_token.device, windows=self._windows)
        if self._states is not None:
            inputs.states = start_states(self._states, [1] * shape.tokens)
        hidden, replay = self._recorder.record(lambda: forward(inputs, attention))
        attention.freeze()
        return _Graph(attention, inputs, hidden, replay)
