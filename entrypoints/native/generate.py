"""Reads a call in the shape of SGLang's ``POST /generate`` and turns it into plain prompts. No HTTP, no model.

Every field is either served, or known and accepted only at a value that means "off" (``UNSUPPORTED``), or unknown and
refused with the nearest name. Nothing is accepted and ignored, but for ``WITHOUT_EFFECT``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import msgspec

from ...runtime.answer import Call
from ...runtime.prompt import Prompt
from ...scheduler.refusal import RequestRefused
from ..fields.continuation import (
    CONTINUATION_FIELDS,
    continuation_batch_size,
    read_continuations,
    read_retain_ns,
    read_retain_ttls,
)
from ..fields.reading import PerPrompt, read_rids, refuse_unserved, shown, typed
from ..fields.sampling import read_sampling_params

FIELDS = (
    "text", "input_ids", "sampling_params", "rid", "stream", "return_logprob", "logprob_start_len", "top_logprobs_num",
    "return_text_in_logprobs", "cache_salt", "extra_key", "no_stop_trim", *CONTINUATION_FIELDS,
)  # fmt: skip

UNSUPPORTED: dict[str, tuple] = {
    # SGLang's other fields -> the values, beside null, that ask for nothing.
    "input_embeds": ([],), "positional_embed_overrides": (), "token_ids_logprob": ([],),
    "image_data": ([],), "video_data": ([],), "audio_data": ([],), "modalities": ([],), "mm_hashes": ([],),
    "mm_content_hashes": ([],), "use_audio_in_video": (False,), "video_config": ({},), "images_config": ({},),
    "max_dynamic_patch": (), "min_dynamic_patch": (), "image_max_dynamic_patch": (), "video_max_dynamic_patch": (),
    "need_wait_for_mm_inputs": (False,), "num_items_assigned": ({},), "encoder_urls": ([],),
    "return_sampling_mask": (False,), "return_flat_raw_top_logprobs": (False,),
    "return_flat_raw_top_logprobs_b64": (False,), "return_hidden_states": (False,), "return_routed_experts": (False,),
    "routed_experts_start_len": (0,), "return_indexer_topk": (False,), "return_bytes": (False,),
    "return_entropy": (False,), "return_prompt_token_ids": (False,), "multi_item_delimiter_indices": ([],),
    "lora_path": ("", []), "lora_id": ("", []), "custom_logit_processor": ("", []),
    "session_id": (), "session_params": ({},), "bootstrap_host": (), "bootstrap_port": (), "bootstrap_room": (),
    "bootstrap_pair_key": (), "decode_tp_size": (), "routed_dp_rank": (0,), "data_parallel_rank": (0,),
    "data_parallel_rank_decode": (0,), "disagg_prefill_dp_rank": (0,), "kv_router_hint": ({},), "http_worker_ipc": (),
    "background": (False,), "require_reasoning": (False,), "max_thinking_tokens": (), "priority": (0,),
    "custom_labels": ({},), "external_trace_header": ({},), "received_time": (), "log_metrics": (True,),
}  # fmt: skip

WITHOUT_EFFECT = ("routing_key", "conversation_id", "no_logs")
"""Labels for routers and logs. Prompts are never logged, so that ``no_logs`` is always kept."""


@dataclass(slots=True, frozen=True)
class GenerateCall:
    """A parsed call. ``is_list``: it is answered with a list (a batch, or n > 1). rid: the caller's name for it."""

    prompts: list[Prompt]
    stream: bool
    is_list: bool
    rid: str


def parse_generate(fields: dict[str, Any], *, rid: str | None = None) -> GenerateCall:
    """Fields of the request body -> prompts. ``rid`` is used where the body brings none. Raises RequestRefused."""
    refuse_unserved(fields, FIELDS, UNSUPPORTED, WITHOUT_EFFECT, where="")
    fields = {name: value for name, value in fields.items() if value is not None}
    texts, id_lists, is_batch, size = _inputs(fields)
    group, rids = read_rids(fields.get("rid", rid), size, is_batch)
    stream = typed(fields.get("stream", False), bool, "stream")
    with_text = typed(fields.get("return_text_in_logprobs", False), bool, "return_text_in_logprobs")

    per_prompt = PerPrompt(fields, size, is_batch)
    continuations = read_continuations(fields, per_prompt)
    samplings = read_sampling_params(fields, per_prompt)
    want = per_prompt.typed("return_logprob", bool, False)
    starts = per_prompt.typed("logprob_start_len", int, -1)
    tops = per_prompt.typed("top_logprobs_num", int, 0)
    salts = per_prompt.typed("cache_salt", str, "")
    extra_keys = per_prompt.typed("extra_key", str, "")
    retain_ttls = read_retain_ttls(per_prompt)
    retain_ns = read_retain_ns(per_prompt)
    prompts = []
    for i in range(size):
        _check_logprob_fields(want[i], starts[i], tops[i])
        prompts.append(
            Prompt(
                rid=rids[i],
                group=group,
                text=None if texts is None else texts[i],
                input_ids=None if id_lists is None else id_lists[i],
                sampling=samplings[i],
                # A salt alone is its own namespace; both together make another one.
                namespace=f"{salts[i]}\0{extra_keys[i]}" if extra_keys[i] else salts[i],
                return_logprob=want[i],
                logprob_start_len=starts[i],
                top_logprobs_num=tops[i],
                return_text_in_logprobs=with_text,
                continuation=continuations[i],
                retain_ttl=retain_ttls[i],
                retain_n=retain_ns[i],
            )
        )
    is_list = is_batch or any(sampling.n > 1 for sampling in samplings)
    return GenerateCall(prompts, stream, is_list, group)


async def stream_events(call: Call, parsed: GenerateCall, *, incremental: bool) -> AsyncGenerator[dict, None]:
    """The events of a streamed call: each the whole output so far, or only what is new where ``incremental``."""
    async for position, output in call.updates(incremental=incremental):
        if parsed.is_list:
            output["index"] = position
        yield output


def _inputs(fields: dict[str, Any]) -> tuple[list[str] | None, list[list[int]] | None, bool, int]:
    """(texts, None, is_batch, number of prompts) or (None, id lists, …); (None, None, …) where only parents are
    continued."""
    if "text" in fields and "input_ids" in fields:
        raise RequestRefused("give the prompt as text or as input_ids; both are given", param="text")
    parents = continuation_batch_size(fields)
    texts, id_lists, is_batch = None, None, parents is not None
    if "text" in fields:
        texts, is_batch = _texts(fields["text"])
    elif "input_ids" in fields:
        id_lists, is_batch = _id_lists(fields["input_ids"])
    elif "continuation_of" not in fields:
        # A continuation that forgot its parent hears of that instead.
        read_continuations(fields, PerPrompt(fields, parents or 1, is_batch))
        raise RequestRefused("give the prompt as text or as input_ids; both are missing", param="text")
    own = texts if texts is not None else id_lists
    if own is None:
        return None, None, is_batch, parents or 1
    name = "text" if texts is not None else "input_ids"
    if parents is not None and (not is_batch or len(own) != parents):
        raise RequestRefused(
            f"the continuation fields list {parents} prompts and {name} holds {len(own)}; give one {name} for each, or "
            "none",
            param=name,
        )
    if "continuation_of" in fields and not all(own):
        raise RequestRefused(f"{name} is empty; leave it out, or give the whole prompt", param=name)
    return texts, id_lists, is_batch, len(own)


def _texts(text: Any) -> tuple[list[str], bool]:
    if isinstance(text, str):
        return [text], False
    if not isinstance(text, list) or not all(isinstance(item, str) for item in text):
        raise RequestRefused("text takes a string, or a list of strings for a batch", param="text")
    if not text:
        raise RequestRefused("text is an empty list; give at least one prompt", param="text")
    return text, True


def _id_lists(ids: Any) -> tuple[list[list[int]], bool]:
    if not isinstance(ids, list):
        raise RequestRefused(f"input_ids is {shown(ids)}; it takes a list of token ids", param="input_ids")
    is_batch = bool(ids) and isinstance(ids[0], list)
    try:
        return msgspec.convert(ids if is_batch else [ids], list[list[int]]), is_batch
    except msgspec.ValidationError:
        raise RequestRefused(
            "input_ids takes a list of whole numbers, or a list of such lists for a batch", param="input_ids"
        ) from None


def _check_logprob_fields(want: bool, start: int, top: int) -> None:
    if start < -1:
        raise RequestRefused(
            f"logprob_start_len is {start}; use a prompt position, or -1 for output tokens only",
            param="logprob_start_len",
        )
    if top < 0:
        raise RequestRefused(f"top_logprobs_num is {top}; use 0 or more", param="top_logprobs_num")
    if not want and (start >= 0 or top > 0):
        name = "logprob_start_len" if start >= 0 else "top_logprobs_num"
        raise RequestRefused(f"{name} is set without return_logprob; add return_logprob: true", param=name)
