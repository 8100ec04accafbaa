"""The structs that vLLM 0.33 and SGLang 0.5.23 publish KV cache events with, field by field, written down from their
documentation: whatever Baton sends must be what they would have sent."""

from __future__ import annotations

from typing import Any

import msgspec


class _VLLMEvent(msgspec.Struct, omit_defaults=True, tag=True, forbid_unknown_fields=True):
    pass


class VLLMBlockStored(_VLLMEvent, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class VLLMBlockRemoved(_VLLMEvent, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class VLLMAllBlocksCleared(_VLLMEvent, tag="AllBlocksCleared"):
    pass


class VLLMBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[VLLMBlockStored | VLLMBlockRemoved | VLLMAllBlocksCleared]
    data_parallel_rank: int | None = None


class _SGLangEvent(msgspec.Struct, omit_defaults=True, tag=True):
    """Unknown fields are passed over: SGLang has no extra keys, its followers take vLLM's events, too."""


class SGLangBlockStored(_SGLangEvent, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


class SGLangBlockRemoved(_SGLangEvent, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = None


class SGLangAllBlocksCleared(_SGLangEvent, tag="AllBlocksCleared"):
    pass


class SGLangBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[SGLangBlockStored | SGLangBlockRemoved | SGLangAllBlocksCleared]
    attn_dp_rank: int | None = None
