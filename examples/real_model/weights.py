"""The tensors of a Llama in a GGUF file, as a Hugging Face checkpoint has them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .gguf_file import GGUFError, GGUFFile

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
HEAD = "output.weight"
"""Absent where the head is tied to the embedding."""


def checkpoint_names(gguf: GGUFFile) -> dict[str, str]:
    """Name in the file -> name in the checkpoint, in the file's order. Raises GGUFError unless the file holds exactly
    the tensors of a Llama."""
    names = {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in _OUTSIDE.items()}
    for layer in range(gguf["llama.block_count"]):
        for theirs, ours in _LAYER.items():
            names[f"blk.{layer}.{theirs}.weight"] = f"model.layers.{layer}.{ours}.weight"
    if HEAD in gguf.tensor_names:
        names[HEAD] = "lm_head.weight"
    found = set(gguf.tensor_names)
    if found != names.keys():
        missing, unknown = sorted(names.keys() - found), sorted(found - names.keys())
        raise GGUFError(f"not the tensors of a Llama: missing {missing[:8]}, unknown {unknown[:8]}")
    return {name: names[name] for name in gguf.tensor_names}


def checkpoint_tensors(gguf: GGUFFile) -> Iterator[tuple[str, np.ndarray]]:
    """Name in the checkpoint and values, float32, one after the other."""
    names = checkpoint_names(gguf)
    heads = {"attn_q": gguf["llama.attention.head_count"], "attn_k": gguf["llama.attention.head_count_kv"]}
    for name, values in gguf.tensors():
        if num_heads := heads.get(name.split(".")[-2]):
            values = undo_rotary_order(values, num_heads)
        yield names[name], values


def undo_rotary_order(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a q or k projection, from llama.cpp's order back to the checkpoint's. weight: [heads * dim, hidden].

    The rotary embedding turns pairs of dimensions. A Hugging Face checkpoint keeps the first halves of a head's pairs
    together and then the second halves; llama.cpp keeps each pair together, and reorders the rows to that end.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, hidden)
