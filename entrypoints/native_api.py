"""Reads a call in the shape of SGLang's ``POST /generate`` and turns it into plain prompts. No HTTP, no model.

Every field is either served, or known and accepted only at a value that means "off" (``UNSUPPORTED``), or unknown and
refused with the nearest name. Nothing is accepted and ignored, but for ``WITHOUT_EFFECT``.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import msgspec

from ..runtime.generation import Prompt, RequestRefused
from ..scheduler.sampling_params import SamplingParams

FIELDS = (
    "text", "input_ids", "sampling_params", "rid", "stream", "return_logprob", "logprob_start_len", "top_logprobs_num",
    "return_text_in_logprobs", "cache_salt", "extra_key",
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

SAMPLING_ALIASES = {"sampling_seed": "seed"}

UNSUPPORTED_SAMPLING: dict[str, tuple] = {
    "json_schema": ("",), "regex": ("",), "ebnf": ("",), "structural_tag": ("",), "stop_regex": ("", []),
    "custom_params": ({},), "stream_interval": (1,), "beam_width": (0, 1), "use_beam_search": (False,),
    "length_penalty": (1, 1.0), "early_stopping": (False,),
}  # fmt: skip

_MAX_RID_CHARS = 512
_SAMPLING_FIELDS = SamplingParams.__struct_fields__


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
    texts, id_lists, is_batch = _inputs(fields)
    size = len(texts if texts is not None else id_lists or [])
    group, rids = _rids(fields.get("rid", rid), size, is_batch)
    stream = _typed(fields.get("stream", False), bool, "stream")
    with_text = _typed(fields.get("return_text_in_logprobs", False), bool, "return_text_in_logprobs")

    def per_prompt(name: str, kind: type, default: Any) -> list:
        values = _spread(fields.get(name, default), name, size, is_batch)
        return [_typed(default if value is None else value, kind, name) for value in values]

    samplings = _samplings(fields.get("sampling_params", {}), size, is_batch)
    want = per_prompt("return_logprob", bool, False)
    starts = per_prompt("logprob_start_len", int, -1)
    tops = per_prompt("top_logprobs_num", int, 0)
    salts = per_prompt("cache_salt", str, "")
    extra_keys = per_prompt("extra_key", str, "")
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
            )
        )
    is_list = is_batch or any(sampling.n > 1 for sampling in samplings)
    return GenerateCall(prompts, stream, is_list, group)


def refuse_unserved(
    given: dict[str, Any], served: tuple, unsupported: dict[str, tuple], without_effect: tuple, *, where: str
) -> None:
    """Refuse unknown fields, and unsupported ones that ask for something. ``where``: prefix of names in messages."""
    for name, value in given.items():
        if name in served or name in without_effect:
            continue
        if name not in unsupported:
            near = difflib.get_close_matches(name, [*served, *unsupported, *without_effect], n=1, cutoff=0.5)
            hint = f"; did you mean {where}{near[0]}?" if near else f"; known fields: {', '.join(served)}"
            raise RequestRefused(f"unknown field {where}{name}{hint}", code="unknown_field", param=f"{where}{name}")
        # 0 == False in Python, not for the caller of an API.
        if value is not None and not any(value == off and type(value) is type(off) for off in unsupported[name]):
            off = ", ".join(["null", *(msgspec.json.encode(value).decode() for value in unsupported[name])])
            raise RequestRefused(
                f"{where}{name} is not supported; leave it out (accepted: {off})",
                code="unsupported_field",
                param=f"{where}{name}",
            )


def parse_sampling_params(given: Any, *, where: str = "sampling_params") -> SamplingParams:
    """A JSON object in SGLang's names -> SamplingParams. Raises RequestRefused."""
    if not isinstance(given, dict):
        raise RequestRefused(f"{where} is {_shown(given)}; it takes an object", param=where)
    served = (*_SAMPLING_FIELDS, *SAMPLING_ALIASES)
    refuse_unserved(given, served, UNSUPPORTED_SAMPLING, (), where=f"{where}.")
    # null means the default, except that max_new_tokens: null asks for "up to the context length".
    values = {
        SAMPLING_ALIASES.get(name, name): value
        for name, value in given.items()
        if name in served and (value is not None or name == "max_new_tokens")
    }
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    if isinstance(bias := values.get("logit_bias"), dict):
        values["logit_bias"] = _logit_bias(bias, where)
    try:
        return msgspec.convert(values, SamplingParams)
    except msgspec.ValidationError as error:
        message, param = _readable(str(error))
        raise RequestRefused(f"{where}.{message}", param=f"{where}.{param}" if param else where) from None


def _inputs(fields: dict[str, Any]) -> tuple[list[str] | None, list[list[int]] | None, bool]:
    """(texts, None, is_batch) or (None, id lists, is_batch)."""
    if ("text" in fields) == ("input_ids" in fields):
        found = "both are given" if "text" in fields else "both are missing"
        raise RequestRefused(f"give the prompt as text or as input_ids; {found}", param="text")
    if "text" in fields:
        text = fields["text"]
        if isinstance(text, str):
            return [text], None, False
        if not isinstance(text, list) or not all(isinstance(item, str) for item in text):
            raise RequestRefused("text takes a string, or a list of strings for a batch", param="text")
        if not text:
            raise RequestRefused("text is an empty list; give at least one prompt", param="text")
        return text, None, True
    ids = fields["input_ids"]
    if not isinstance(ids, list):
        raise RequestRefused(f"input_ids is {_shown(ids)}; it takes a list of token ids", param="input_ids")
    is_batch = bool(ids) and isinstance(ids[0], list)
    try:
        id_lists = msgspec.convert(ids if is_batch else [ids], list[list[int]])
    except msgspec.ValidationError:
        raise RequestRefused(
            "input_ids takes a list of whole numbers, or a list of such lists for a batch", param="input_ids"
        ) from None
    return None, id_lists, is_batch


def _rids(given: Any, size: int, is_batch: bool) -> tuple[str, list[str]]:
    """(name of the call, one rid per prompt). A batch numbers its prompts after the name it was given."""
    if isinstance(given, list):
        if not is_batch or len(given) != size:
            raise RequestRefused(f"rid lists {len(given)} names for {size} prompts; give one for each", param="rid")
        return uuid4().hex, [_rid(item) for item in given]
    group = uuid4().hex if given is None else _rid(given)
    return group, [f"{group}_{i}" for i in range(size)] if is_batch else [group]


def _rid(given: Any) -> str:
    if not isinstance(given, str) or not 1 <= len(given) <= _MAX_RID_CHARS:
        raise RequestRefused(
            f"rid is {_shown(given)}; it takes a string of 1 to {_MAX_RID_CHARS} characters", param="rid"
        )
    return given


def _samplings(given: Any, size: int, is_batch: bool) -> list[SamplingParams]:
    if isinstance(given, list):
        spread = _spread(given, "sampling_params", size, is_batch)
        return [parse_sampling_params(item or {}, where=f"sampling_params[{i}]") for i, item in enumerate(spread)]
    return [parse_sampling_params(given)] * size


def _spread(value: Any, name: str, size: int, is_batch: bool) -> list:
    """One value per prompt, from one value or a list of them."""
    if not isinstance(value, list):
        return [value] * size
    if not is_batch:
        raise RequestRefused(f"{name} is a list, but the call has a single prompt; give one value", param=name)
    if len(value) != size:
        raise RequestRefused(f"{name} lists {len(value)} values for {size} prompts; give one for each", param=name)
    return value


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


def _logit_bias(given: dict, where: str) -> dict[int, Any]:
    """JSON has string keys only; they are token ids here."""
    try:
        return {int(token_id): value for token_id, value in given.items()}
    except ValueError:
        raise RequestRefused(f"{where}.logit_bias: its keys must be token ids", param=f"{where}.logit_bias") from None


def _typed(value: Any, kind: type, name: str) -> Any:
    if type(value) is not kind:
        raise RequestRefused(f"{name} is {_shown(value)}; it takes {_A_KIND[kind]}", param=name)
    return value


_A_KIND = {bool: "true or false", int: "a whole number", str: "a string"}


def _shown(value: Any) -> str:
    """The value as the caller wrote it, cut to a readable length."""
    try:
        shown = msgspec.json.encode(value).decode()
    except (TypeError, UnicodeEncodeError):
        shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _readable(message: str) -> tuple[str, str | None]:
    """msgspec's "Expected `int`, got `str` - at `$.top_k`" -> ("top_k: expected int, got str", "top_k")."""
    located = re.fullmatch(r"(.*?) - at `\$\.?([^`]*)`", message, flags=re.DOTALL)
    if located is None:
        name = message.split(" ", 1)[0]
        return message, name if name in _SAMPLING_FIELDS else None
    what, path = located.groups()
    name = re.split(r"[.\[]", path)[0]
    if not name:
        # Our own message, which starts with the field's name.
        first = what.split(" ", 1)[0]
        return what, first if first in _SAMPLING_FIELDS else None
    return f"{name}: {what[0].lower() + what[1:]}".replace("`", ""), name
