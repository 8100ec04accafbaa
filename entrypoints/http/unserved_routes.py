"""Endpoints of other servers that this one lacks. The 404 says why, and what to use instead.

Not 501: clients try again after every 5xx.
"""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from ...scheduler.outcome import RequestRefused
from ..anthropic.errors import error_body as anthropic_error_body
from .route import ANY_MEDIA, PROBE, Route
from .wire.answers import ErrorBody, error_body

_TEXT_ONLY = "this server takes text alone, and answers with text, vectors and scores"
_OTHER_EMBEDDINGS = "use /v1/embeddings, in OpenAI's form, or SGLang's /encode"
_ONE_MODEL = "the weights stay as they were loaded; start another server with --model-path"
_NO_SESSIONS = "there are no sessions; use continuation_of, or send the whole conversation: its beginning is cached"
_NO_STORE = "this server keeps no files, batches or threads; send each request by itself"
_OLLAMA = "Ollama's API is not served; use /v1/chat/completions, /v1/completions and /v1/models"
_LLAMA_CPP = "llama.cpp's own API is not served; use /v1/completions, /model_info, /tokenize and /cache/leases"

UNSERVED = {
    _TEXT_ONLY: (
        "/v1/moderations", "/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations",
        "/v1/images/generations", "/v1/images/edits", "/v1/images/variations", "/v1/videos", "/v1/realtime", "/infill",
    ),
    _OTHER_EMBEDDINGS: ("/v1/embed", "/v2/embed", "/embed", "/embeddings", "/embedding"),
    "use /v1/rerank": ("/reranking",),
    "use /v1/score with label_token_ids": ("/generative_scoring",),
    _ONE_MODEL: (
        "/update_weights_from_disk", "/update_weights_from_tensor", "/update_weights_from_distributed",
        "/update_weights_from_ipc", "/init_weights_update_group", "/destroy_weights_update_group",
        "/get_weights_by_name", "/release_memory_occupation", "/resume_memory_occupation",
        "/sleep", "/wake_up", "/is_sleeping", "/v1/fine_tuning",
    ),
    "use /lora_adapters, /load_lora_adapter and lora_path": ("/lora-adapters",),
    _NO_SESSIONS: ("/open_session", "/close_session", "/v1/conversations"),
    _NO_STORE: (
        "/v1/files", "/v1/batches", "/v1/uploads", "/v1/vector_stores", "/v1/containers", "/v1/assistants",
        "/v1/threads", "/v1/evals", "/v1/prompts", "/v1/messages/batches",
    ),
    "use /v1/messages": ("/v1/complete",),
    "use POST /flush_cache": ("/reset_prefix_cache",),
    "use the answers of /v1/chat/completions, which are parsed already": (
        "/parse_function_call", "/separate_reasoning",
    ),
    _OLLAMA: (
        "/api/chat", "/api/generate", "/api/tags", "/api/show", "/api/ps", "/api/version", "/api/embed",
        "/api/embeddings", "/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete",
    ),
    _LLAMA_CPP: ("/completion", "/completions", "/chat/completions", "/props", "/slots", "/apply-template"),
}  # fmt: skip
"""Why -> paths; what is below them is not served either."""

_WRITING = ("POST", "PUT", "PATCH", "DELETE")


class UnservedRoutes:
    """Answers every method, and reads no body."""

    def __init__(self) -> None:
        self._reasons = {path: reason for reason, paths in UNSERVED.items() for path in paths}
        self.routes = [
            Route(where, self.refuse, methods, media=ANY_MEDIA, error_body=_error_body(path))
            for path in self._reasons
            for where in (path, f"{path}/{{below:rest}}")
            for methods in (PROBE, _WRITING)
        ]

    async def refuse(self, request: Request) -> Response:
        path = request.url.path
        found = path
        while found not in self._reasons:
            found = found.rpartition("/")[0]
        raise RequestRefused(f"{path[:200]} is not served: {self._reasons[found]}", code="not_implemented")


def _error_body(path: str) -> ErrorBody:
    is_anthropics = path.startswith(("/v1/messages", "/v1/complete"))
    return anthropic_error_body if is_anthropics else error_body
