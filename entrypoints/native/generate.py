"""Reads a request in the shape of SGLang's ``POST /generate`` and turns it into plain prompts. No HTTP, no model.

A field is either served; or known but accepted only at a value that means "off" (``UNSUPPORTED``); or unknown, and
refused with a hint at the nearest name. Only the fields in ``WITHOUT_EFFECT`` are accepted and ignored.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...scheduler.outcome import RequestRefused
from ..description.json_schema import taken
from ..fields.prompts import LogprobFields, PromptBatch, PromptTokens, read_prompts, read_tokens
from ..fields.reading import PerPrompt, refuse_unserved, spread, typed
from ..fields.sampling_schema import SAMPLING
from ..fields.stream_options import include_usage
from .generate_schema import PROPERTIES

UNSUPPORTED: dict[str, tuple] = {
    # SGLang's other fields -> the values, besides null, that ask for nothing.
    "input_embeds": ([],), "positional_embed_overrides": (),
    "image_data": ([],), "video_data": ([],), "audio_data": ([],), "modalities": ([],), "mm_hashes": ([],),
    "mm_content_hashes": ([],), "use_audio_in_video": (False,), "video_config": ({},), "images_config": ({},),
    "max_dynamic_patch": (), "min_dynamic_patch": (), "image_max_dynamic_patch": (), "video_max_dynamic_patch": (),
    "need_wait_for_mm_inputs": (False,), "num_items_assigned": ({},), "encoder_urls": ([],),
    "return_sampling_mask": (False,), "return_flat_raw_top_logprobs": (False,),
    "return_flat_raw_top_logprobs_b64": (False,), "return_hidden_states": (False,), "return_routed_experts": (False,),
    "routed_experts_start_len": (0,), "return_indexer_topk": (False,), "return_bytes": (False,),
    "return_entropy": (False,), "multi_item_delimiter_indices": ([],),
    "lora_path": ("", []), "lora_id": ("", []), "custom_logit_processor": ("", []),
    "session_id": (), "session_params": ({},), "bootstrap_host": (), "bootstrap_port": (), "bootstrap_room": (),
    "bootstrap_pair_key": (), "decode_tp_size": (), "routed_dp_rank": (0,), "data_parallel_rank": (0,),
    "data_parallel_rank_decode": (0,), "disagg_prefill_dp_rank": (0,), "kv_router_hint": ({},), "http_worker_ipc": (),
    "background": (False,), "require_reasoning": (False,), "max_thinking_tokens": (),
    "custom_labels": ({},), "external_trace_header": ({},), "received_time": (), "log_metrics": (True,),
}  # fmt: skip

WITHOUT_EFFECT = ("routing_key", "conversation_id", "no_logs")
"""Labels for routers and logs. Prompts are never logged, so ``no_logs`` always holds."""

_INSTEAD = {
    "prompt": "text", "messages": "/v1/chat/completions", "max_tokens": "sampling_params.max_new_tokens",
    **{name: f"sampling_params.{name}" for name in SAMPLING if name not in PROPERTIES},
}  # fmt: skip
"""Fields of other APIs, and those that are one level too high."""

BODY = taken(PROPERTIES, title="GenerateBody", unsupported=UNSUPPORTED, without_effect=WITHOUT_EFFECT)


def parse_generate(fields: dict[str, Any], *, rid: str | None = None, max_prompts: int | None = None) -> PromptBatch:
    """Fields of the request body -> prompts. ``rid`` is used if the body has none; max_prompts: None for no limit.
    Raises RequestRefused."""
    refuse_unserved(fields, PROPERTIES, UNSUPPORTED, WITHOUT_EFFECT, where="", instead=_INSTEAD)
    fields = {name: value for name, value in fields.items() if value is not None}
    # Every event has the counts, so there is nothing to be included.
    include_usage(fields.get("stream_options"), typed(fields.get("stream", False), bool, "stream"))
    tokens = read_tokens(fields, max_prompts)
    logprobs = _logprobs(fields, tokens)
    returns_prompt = typed(fields.get("return_prompt_token_ids", False), bool, "return_prompt_token_ids")
    return read_prompts(
        fields,
        tokens,
        fields.get("sampling_params"),
        logprobs,
        rid=fields.get("rid", rid),
        returns_prompt=returns_prompt,
    )


def _logprobs(fields: dict[str, Any], tokens: PromptTokens) -> list[LogprobFields]:
    """One per prompt; token texts are returned for all prompts or for none."""
    with_text = typed(fields.get("return_text_in_logprobs", False), bool, "return_text_in_logprobs")
    per_prompt = PerPrompt(fields, tokens.size, tokens.is_batch)
    wanted = per_prompt.typed("return_logprob", bool, False)
    starts = per_prompt.typed("logprob_start_len", int, -1)
    tops = per_prompt.typed("top_logprobs_num", int, 0)
    named = _token_ids(fields.get("token_ids_logprob") or [], tokens)
    each = zip(wanted, starts, tops, named, strict=True)
    return [LogprobFields(wants, start, top, with_text, token_ids=ids) for wants, start, top, ids in each]


def _token_ids(given: Any, tokens: PromptTokens) -> list[tuple[int, ...]]:
    """One tuple per prompt, from a list of ids for all of them, or a list of such lists."""
    name = "token_ids_logprob"
    is_nested = isinstance(given, list) and any(ids is None or isinstance(ids, list) for ids in given)
    lists = spread(given, name, tokens.size, tokens.is_batch) if is_nested else [given] * tokens.size
    try:
        return [() if ids is None else msgspec.convert(ids, tuple[int, ...]) for ids in lists]
    except msgspec.ValidationError:
        raise RequestRefused(f"{name} takes a list of token ids, or one list for each prompt", param=name) from None
