"""A Llama of random weights and a tokenizer of a few merges, as a GGUF file of the kind that llama.cpp's converter
writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers

from tests.doubles.tiny_models import make_reference

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "l l", "h e", "he ll", "hell o", "Ġ hello", "1 2", "Ġ 1", "' s"]
"""Two of them never apply: digits stand by themselves."""
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]

SHAPE: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": SHAPE["num_hidden_layers"],
    "llama.context_length": SHAPE["max_position_embeddings"],
    "llama.embedding_length": SHAPE["hidden_size"],
    "llama.feed_forward_length": SHAPE["intermediate_size"],
    "llama.attention.head_count": SHAPE["num_attention_heads"],
    "llama.attention.head_count_kv": SHAPE["num_key_value_heads"],
    "llama.attention.layer_norm_rms_epsilon": SHAPE["rms_norm_eps"],
    "llama.rope.freq_base": SHAPE["rope_parameters"]["rope_theta"],
    "llama.rope.dimension_count": SHAPE["hidden_size"] // SHAPE["num_attention_heads"],
    "llama.vocab_size": SHAPE["vocab_size"],
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.add_space_prefix": False,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.chat_template": TEMPLATE,
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_llama(*, tied: bool) -> Any:
    """A transformers model in float32."""
    return make_reference("Llama", SHAPE | {"tie_word_embeddings": tied})


def write_gguf(path: Path, model: Any, *, quantised: bool = False, changed: dict[str, Any] | None = None) -> None:
    """quantised: matrices as Q4_1, the embedding as Q8_0. changed: metadata; None leaves a key out."""
    gguf = pytest.importorskip("gguf", reason="gguf is in the extra [dev]")
    metadata = _METADATA | (changed or {})
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture"))
    for key, value in metadata.items():
        if value is not None:
            writer.add_key_value(key, *_typed(gguf, value))
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values, kind = _in_rotary_order(name, tensor).numpy(), gguf.GGMLQuantizationType.F32
        if quantised and values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0 if "embed" in name else gguf.GGMLQuantizationType.Q4_1
        writer.add_tensor(_their_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _typed(gguf: Any, value: Any) -> tuple[Any, ...]:
    kinds = gguf.GGUFValueType
    if isinstance(value, list):
        return value, kinds.ARRAY, kinds.STRING if isinstance(value[0], str) else kinds.INT32
    by_type = {str: kinds.STRING, bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32}
    return value, by_type[type(value)]


def _their_name(name: str) -> str:
    parts = name.removesuffix(".weight").split(".")
    if parts[:2] == ["model", "layers"]:
        return f"blk.{parts[2]}.{_NAMES['.'.join(parts[3:])]}.weight"
    return f"{_NAMES['.'.join(parts)]}.weight"


def _in_rotary_order(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Rows of q and k as llama.cpp wants them: dimension d of a head beside dimension d + half, which it turns with."""
    heads = {"q_proj": SHAPE["num_attention_heads"], "k_proj": SHAPE["num_key_value_heads"]}
    num_heads = heads.get(name.split(".")[-2])
    if num_heads is None:
        return tensor
    dim = len(tensor) // num_heads
    in_head = [half * dim // 2 + pair for pair in range(dim // 2) for half in (0, 1)]
    return tensor[[head * dim + row for head in range(num_heads) for row in in_head]]
