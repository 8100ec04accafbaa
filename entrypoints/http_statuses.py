"""The HTTP status of each refusal, by its code. The only table of statuses: no other layer knows them.

It lies beside `http/` because APIs and programs need it too, which `http/` imports.
"""

from __future__ import annotations

from ..runtime.messages import RequestError
from ..scheduler.outcome import RequestRefused

STATUSES = {
    "chat_template_error": 400,
    "context_length_exceeded": 400,
    "http_error": 400,
    "adapter_mismatch": 400,
    "invalid_adapter": 400,
    "invalid_grammar": 400,
    "invalid_http": 400,
    "invalid_item_trie": 400,
    "invalid_json": 400,
    "invalid_request": 400,
    "kv_pool_exceeded": 400,
    "no_chat_template": 400,
    "no_tool_call_parser": 400,
    "no_tools_in_template": 400,
    "response_not_in_background": 400,
    "thread_unsupported_request": 400,
    "unknown_field": 400,
    "unsupported_by_model": 400,
    "unsupported_content": 400,
    "unsupported_field": 400,
    "unsupported_item": 400,
    "unsupported_tool": 400,
    "invalid_api_key": 401,
    "admin_key_required": 403,
    "foreign_origin": 403,
    "adapter_not_found": 404,
    "client_not_found": 404,
    "item_trie_not_found": 404,
    "job_not_found": 404,
    "model_not_found": 404,
    "not_found": 404,
    "not_implemented": 404,
    "parent_not_found": 404,
    "response_not_found": 404,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "busy": 409,
    "duplicate_rid": 409,
    "not_profiling": 409,
    "parent_failed": 409,
    "parent_not_started": 409,
    "parent_undecided": 409,
    "profiling": 409,
    "response_in_progress": 409,
    "parent_forgotten": 410,
    "snapshot_gone": 410,
    "body_too_large": 413,
    "unsupported_media_type": 415,
    "unknown_host": 421,
    "queue_full": 429,
    "head_too_large": 431,
    "aborted": 499,
    "detokenizer_failed": 500,
    "forward_failed": 500,
    "internal_error": 500,
    "kv_cache_damaged": 500,
    "kv_load_failed": 500,
    "logits_not_finite": 500,
    "request_failed": 500,
    "stop_check_failed": 500,
    "token_not_allowed": 500,
    "worker_error": 500,
    "engine_failed": 503,
    "not_ready": 503,
    "overloaded": 503,
    "paused": 503,
    "server_failed": 503,
    "shutting_down": 503,
    "too_many_streams": 503,
    "unhealthy": 503,
    "timeout": 504,
}


def status_of(error: RequestRefused | RequestError) -> int:
    """The HTTP status of an error; 500 for a code that is not in the table."""
    return STATUSES.get(error.code, 500)
