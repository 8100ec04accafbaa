"""The weights before training: random, except for one circuit that copies.

Both languages depend on copying from the context. Transformers copy with a pair of attention heads in two layers, an
induction head (Olsson et al., 2022). Gradient descent finds it only after a long plateau; from a start near it, it
takes seconds (README.md has the figures), and everything else is learned as usual. Starting a layer in the form of
trained ones is called mimetic initialization (Trockman & Kolter, 2023).

    tokens            ... lemon 4 7 ... lemon        the model reads "lemon" again
    layer 0, head 0   each position looks one back and notes that token: "4" notes "came after lemon"
    layer 1, head 0   "lemon" looks for a note that says "lemon", finds "4", and copies it to the output
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM  # importing it takes seconds

POSITION_GAIN = 0.6
"""Sharpness of looking one back: enough for nine tenths of the attention."""
NOTE_GAIN = 0.2
"""Strength of the note beside the token's own embedding."""
MATCH_QUERY_GAIN, MATCH_KEY_GAIN = 1.7, 3.4
"""Sharpness of finding the note."""
COPY_GAIN = 0.08
"""How loudly the found token is written to the output."""


@torch.no_grad()
def prepare(model: LlamaForCausalLM) -> None:
    """Silences all blocks, then lays the copying circuit into the first key/value head of layers 0 and 1.

    Expects transformers' random initialization; draws from torch's global generator. With silent output projections
    the residual stream starts as the embedding alone, which is what the circuit reads.
    """
    config: Any = model.config
    layers: Any = model.model.layers
    hidden, width = config.hidden_size, config.hidden_size // config.num_attention_heads
    query_heads = config.num_attention_heads // config.num_key_value_heads
    for layer in layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()

    # Orthonormal directions: one that all embeddings share, subspaces for the token itself and for the note.
    basis = torch.linalg.qr(torch.randn(hidden, hidden))[0].T
    shared, token, note = basis[0], basis[1 : 1 + width], basis[1 + width : 1 + 2 * width]
    embedding = model.model.embed_tokens.weight
    embedding -= (embedding @ shared)[:, None] * shared
    embedding += config.initializer_range * hidden**0.5 * shared

    # Queries and keys made of the shared direction see positions only: a query rotated by one looks one back.
    first = layers[0].self_attn
    frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(0, width, 2) / width)
    key = torch.cat([torch.ones(width // 2), torch.zeros(width // 2)])
    query = torch.cat([torch.cos(frequencies), -torch.sin(frequencies)])
    first.k_proj.weight[:width] = POSITION_GAIN * torch.outer(key, shared)
    first.v_proj.weight[:width] = token

    second = layers[1].self_attn
    second.k_proj.weight[:width] = MATCH_KEY_GAIN * note
    second.v_proj.weight[:width] = token

    for head in range(query_heads):
        rows = slice(head * width, (head + 1) * width)
        first.q_proj.weight[rows] = POSITION_GAIN * torch.outer(query, shared)
        first.o_proj.weight[:, rows] = NOTE_GAIN * note.T
        second.q_proj.weight[rows] = MATCH_QUERY_GAIN * token
        second.o_proj.weight[:, rows] = COPY_GAIN * token.T
