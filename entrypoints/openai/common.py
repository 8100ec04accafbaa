"""Fields that several of OpenAI's endpoints have."""

from __future__ import annotations

from typing import Any

from ...scheduler.outcome import RequestRefused
from ..fields.reading import read_rid, refuse_unserved, shown, typed

OPENAI_SAMPLING = (
    "temperature", "top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias",
)  # fmt: skip

OTHER_SAMPLING = (
    # Not OpenAI's; named as in SGLang and vLLM.
    "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens",
)  # fmt: skip


def include_usage(options: Any, stream: bool) -> bool:
    """Does the last event of the stream say how many tokens there were? options: ``stream_options``."""
    if options is None:
        return False
    if not isinstance(options, dict):
        raise RequestRefused(f"stream_options is {shown(options)}; it takes an object", param="stream_options")
    if not stream:
        raise RequestRefused("stream_options is set without stream; add stream: true", param="stream_options")
    refuse_unserved(options, ("include_usage",), {}, (), where="stream_options.")
    include = options.get("include_usage")
    return typed(False if include is None else include, bool, "stream_options.include_usage")


def read_request_rid(fields: dict[str, Any]) -> Any:
    """The rid, which vLLM calls request_id."""
    rid, request_id = fields.get("rid"), fields.get("request_id")
    if rid is not None and request_id is not None and rid != request_id:
        raise RequestRefused("rid and request_id are both given; they mean the same", param="request_id")
    return read_rid(request_id, "request_id") if rid is None and request_id is not None else rid
