"""Runs a model's largest step: on a GPU to see how much memory it takes besides weights and KV, on a CPU to time it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...attention.backend import AttentionBatch, GraphBackend
from ...attention.graph_shape import GraphShape
from ...memory_pool.kv_pool import MHAKVPool
from ..layers.step_inputs import StepInputs
from ..models.decoder import Decoder
from .device_backends import DeviceBackends
from .forward_batch import padding_only

COPIES = 3
"""Most copies of the logits that a sampler makes, short of sorting the vocabulary: one that biases and penalties
change, the weights of a nucleus, and which of those it keeps."""


def run_largest_step(
    model: Decoder, backends: DeviceBackends, pool: MHAKVPool, *, tokens: int, rows: int, shapes: Sequence[GraphShape]
) -> None:
    """Prefill one sequence of ``tokens`` and compute logits for ``rows`` rows. Then plan for graphs of ``shapes``, so
    that workspaces grow to what those need. pool: holds ``tokens`` tokens."""
    device = pool.device
    slots = np.arange(pool.page_size, pool.page_size + tokens, dtype=np.int32)
    width = max([tokens, *(shape.tokens for shape in shapes)])
    req_to_token = torch.zeros(2, width, dtype=torch.int32, device=device)
    req_to_token[0, :tokens] = torch.from_numpy(slots)
    attention = backends.attention(pool, [layer.self_attn.spec for layer in model.layers])
    attention.plan(
        AttentionBatch(
            req_to_token=req_to_token,
            host_rows=np.zeros(1, dtype=np.int32),
            prefix_lens=np.zeros(1, dtype=np.int32),
            extend_lens=np.full(1, tokens, dtype=np.int32),
            pad_row=1,
        )
    )
    inputs = StepInputs.zeros(tokens, device)
    inputs.positions.copy_(torch.arange(tokens))
    inputs.out_cache_loc.copy_(req_to_token[0, :tokens])
    hidden = model(inputs, pool, attention)
    model.compute_logits(hidden[torch.arange(rows, device=device) % tokens]).repeat(COPIES, 1)
    if isinstance(attention, GraphBackend):
        graphs = [attention.open_graph(shape) for shape in shapes]  # all are open together, as in service
        for graph, shape in zip(graphs, shapes):
            graph.plan(padding_only(req_to_token, shape))
