"""Endpoints of SGLang, vLLM and OpenAI that this server does not have: 501 says so, and why, where 404 would look like
a wrong address."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from ...scheduler.outcome import RequestRefused
from .route import ANY_MEDIA, POST, Route

_TEXT_ONLY = "this server generates text and nothing else"
_ONE_MODEL = "the weights stay as they were loaded; start another server with --model-path"
_NO_SESSIONS = "there are no sessions; use continuation_of, or send the whole conversation: its beginning is cached"

UNSERVED = {
    _TEXT_ONLY: (
        "/encode", "/v1/embeddings", "/v1/embed", "/v2/embed", "/embed", "/pooling", "/classify", "/v1/classify",
        "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/v1/moderations", "/v1/audio/speech",
        "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/generations", "/v1/images/edits",
        "/v1/images/variations", "/v1/videos",
    ),
    _ONE_MODEL: (
        "/update_weights_from_disk", "/update_weights_from_tensor", "/update_weights_from_distributed",
        "/init_weights_update_group", "/release_memory_occupation", "/resume_memory_occupation",
        "/load_lora_adapter", "/unload_lora_adapter", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
    ),
    _NO_SESSIONS: ("/open_session", "/close_session"),
}  # fmt: skip
"""Why -> paths."""


class UnservedRoutes:
    """Whatever the body is, it is not read."""

    def __init__(self) -> None:
        self._reasons = {path: reason for reason, paths in UNSERVED.items() for path in paths}

    def routes(self) -> list[Route]:
        return [Route(path, self.refuse, POST, media=ANY_MEDIA) for path in self._reasons]

    async def refuse(self, request: Request) -> Response:
        path = request.url.path
        raise RequestRefused(f"{path} is not served: {self._reasons[path]}", status=501, code="not_served")
