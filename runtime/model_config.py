"""Sizes and constants of a model, and how its architecture differs from others. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding. linear: positions divided by factor. llama3: low frequencies divided by factor, high ones
    kept, a ramp between (low_freq_factor, high_freq_factor, in turns over original_max_position_embeddings)."""

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, kw_only=True)
class DecoderTraits:
    """How an architecture differs from the others that share `models/decoder.py`.

    qkv_bias, o_bias, mlp_bias: these projections add a bias.
    qk_norm: RMSNorm over each head of q and k, before the rotary embedding.
    layer_windows: per layer, how many tokens a query sees, itself included; None: all.
    """

    layer_windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


@dataclass(frozen=True, kw_only=True)
class ServedConfig:
    """What a server needs to know of a model, whatever computes it. Sizes in elements, lengths in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    dtype: str
    """The checkpoint's: float32, float16 or bfloat16."""
    context_length: int
    """Longest prompt + output that is served; at most max_position_embeddings."""
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Tokens that end an output; empty if the files name none."""
    fingerprint: str = ""
    """Whatever else determines what is computed, as text."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ServedConfig):
    """Shape and constants of a decoder that `models/decoder.py` computes."""

    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    traits: DecoderTraits
    tie_word_embeddings: bool
