"""Runs a model's largest step: on a GPU to see how much memory it takes besides weights and KV, on a CPU to time it.

On a CPU the times decide how many prompt tokens a step computes: the fewest that reach nearly the full speed. They are
taken while a server is idle, and the result holds from its next start on.

Large steps pay on a GPU, where more rows fill the matrix products. A CPU is as fast with some hundred rows as with
thousands, and larger steps only make all other requests wait longer: when 32 short prompts arrive together, half of
them have their first token in a third of the time with 256 tokens per step instead of 2,048, and the last one as early.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence

import numpy as np
import torch

from ...attention.backend import AttentionBatch, GraphBackend, GraphShape
from ...memory_pool.kv_pool import KVPool, WindowedKVPool
from ...memory_pool.state_pool import StatePool
from ..layers.states.state_batch import start_states
from ..layers.step_inputs import StepInputs
from ..models.served_model import ServedModel
from .device_backends import DeviceBackends
from .forward_batch import padding_only

COPIES = 3
"""Most copies of the logits that a sampler makes, short of sorting the vocabulary: one that biases and penalties
change, the weights of a nucleus, and which of those it keeps."""

SMALLEST_CHUNK = 256
WORTH_IT = 0.95
"""Twice as many tokens must take less than this share of twice the time, or they are not worth the wait."""
LONGEST_STEP_S = 0.5
"""Longest step, in seconds, whatever a longer one would gain."""
ROUNDS = 3
"""Runs of each size; the fastest one counts."""
FEW, MOST_GAIN = 8, 0.25
"""A step of an eighth of the smallest size comes first. One of the whole size takes at least a quarter of its time for
each token."""


ID_STEP = 7919
"""From each token's id to the next: a prime, so that ids differ. Equal tokens would all go to the same few experts."""


def run_largest_step(
    model: ServedModel,
    backends: DeviceBackends,
    pool: KVPool,
    *,
    vocab_size: int,
    tokens: int,
    rows: int,
    shapes: Sequence[GraphShape],
    states: StatePool | None = None,
) -> None:
    """Prefill one sequence of ``tokens`` and compute logits for ``rows`` rows. Then plan for graphs of ``shapes``, so
    that workspaces grow to what those need. pool: holds ``tokens`` tokens, in every layer. states: for a model
    that keeps some."""
    device = pool.device
    slots = np.arange(pool.page_size, pool.page_size + tokens, dtype=np.int32)
    width = max([tokens, *(shape.tokens for shape in shapes)])
    req_to_token = torch.zeros(2, width, dtype=torch.int32, device=device)
    req_to_token[0, :tokens] = torch.from_numpy(slots)
    attention = backends.open_attention(pool, model.specs)
    attention.plan(
        AttentionBatch(
            req_to_token=req_to_token,
            host_rows=np.zeros(1, dtype=np.int32),
            prefix_lens=np.zeros(1, dtype=np.int32),
            extend_lens=np.full(1, tokens, dtype=np.int32),
            pad_row=1,
            req_to_window=req_to_token,
        )
    )
    inputs = StepInputs.zeros(tokens, device)
    inputs.input_ids.copy_(torch.arange(tokens) * ID_STEP % vocab_size)
    inputs.positions.copy_(torch.arange(tokens))
    inputs.out_cache_loc.copy_(req_to_token[0, :tokens])
    if isinstance(pool, WindowedKVPool):
        inputs.out_window_loc = inputs.out_cache_loc
    if states is not None:
        inputs.states = start_states(states, [tokens])
    hidden = model(inputs, pool, attention)
    model.compute_logits(hidden[torch.arange(rows, device=device) % tokens]).repeat(COPIES, 1)
    if isinstance(attention, GraphBackend):
        graphs = [attention.open_graph(shape) for shape in shapes]  # all are open together, as in service
        for graph, shape in zip(graphs, shapes):
            graph.plan(padding_only(req_to_token, shape))


def chunk_trial(
    compute: Callable[[int], None], largest: int, clock: Callable[[], float] = time.perf_counter
) -> Generator[None, None, tuple[int, dict[int, float]]]:
    """Finds the prompt tokens that a step should compute. Yields after each step, and returns the number, and the
    seconds of every size that was tried. A few tokens are computed first: where they show that a step of the smallest
    size takes too long for a larger one to be taken, none is computed.

    compute: runs a step of so many prompt tokens. largest: the largest size to try.
    """

    def seconds(tokens: int) -> Generator[None, None, float]:
        times = []
        for _ in range(ROUNDS):
            began = clock()
            compute(tokens)
            times.append(clock() - began)
            yield
        return min(times)

    size = min(SMALLEST_CHUNK, largest)
    few = -(-size // FEW)
    of_few = yield from seconds(few)
    if 2 * MOST_GAIN * of_few * (size / few) > LONGEST_STEP_S:
        return size, {few: of_few}
    tried = {size: (yield from seconds(size))}
    while 2 * size <= largest and 2 * tried[size] <= LONGEST_STEP_S:
        tried[2 * size] = yield from seconds(2 * size)
        if tried[2 * size] >= WORTH_IT * 2 * tried[size]:
            break
        size *= 2
    return size, tried
