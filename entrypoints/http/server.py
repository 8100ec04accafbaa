"""The HTTP API: puts the routes together. `native`, `openai`, `anthropic` and `runtime` decide what a request means.

Bodies are read as bytes and decoded by msgspec, not by FastAPI's models, so that all errors have one shape and name
one field.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from ...runtime.tokenizer_manager import TokenizerManager
from ...scheduler.outcome import RequestRefused
from ..chat.setup import ChatSetup
from ..fields.ignored import WARNING_HEADER
from ..openai.responses.responses import Responses
from ..server_config import ServerArgs
from ..version import baton_version
from .adapter_routes import AdapterRoutes
from .cache_routes import CacheRoutes
from .control_routes import ControlRoutes
from .dashboard.dashboard_routes import DashboardRoutes
from .dashboard.token_texts import TokenTexts
from .dashboard.tree_routes import TreeRoutes
from .docs_routes import DocsRoutes
from .generation_calls import GenerationCalls
from .generation_routes import GenerationRoutes
from .guards import ErrorCount, Guards
from .health_routes import HealthRoutes, Readiness
from .information_routes import InformationRoutes, RootRoutes
from .item_trie_routes import ItemTrieRoutes
from .jobs_routes import JobsRoutes
from .keys import Keys
from .messages_routes import MessagesRoutes
from .model_names import ModelNames
from .openai_routes import OpenAIRoutes
from .pooling_routes import PoolingRoutes
from .responses_routes import ResponsesRoutes
from .route import Route, RouteTable
from .tokenizer_routes import TokenizerRoutes
from .unserved_routes import UnservedRoutes
from .wire.answers import ErrorBody, answer_error, client_gone, error_body
from .wire.bodies import Bodies, ClientLeft

logger = logging.getLogger(__name__)


def server_routes(
    manager: TokenizerManager,
    args: ServerArgs,
    readiness: Readiness,
    keys: Keys,
    chat: ChatSetup,
    defaults: Mapping[str, Any],
) -> list[Route]:
    """Every route of one server. defaults: sampling parameters for what requests leave out."""
    bodies, chats = Bodies(args.server.max_body_bytes), chat.chats(manager)
    models = ModelNames(args, manager.control.adapters)
    calls = GenerationCalls(manager, args, bodies, defaults, models)
    responses = Responses(manager, chats, models.shown_model, args.chat)
    texts = TokenTexts(manager.tokenizer) if keys.has_admin else None
    subjects = (
        GenerationRoutes(manager, bodies, calls, streams_increments=args.server.incremental_streaming_output),
        OpenAIRoutes(manager, args, calls, chats, models),
        PoolingRoutes(manager, calls, chat.renderer),
        ResponsesRoutes(calls, responses),
        MessagesRoutes(calls, chats),
        HealthRoutes(manager, args, readiness),
        InformationRoutes(manager, chats, args, defaults),
        TokenizerRoutes(manager, chats, models, bodies),
        ItemTrieRoutes(manager, bodies),
        AdapterRoutes(manager, args, bodies),
        JobsRoutes(manager),
        CacheRoutes(manager, bodies),
        TreeRoutes(manager.live_reports, texts),
        DashboardRoutes(manager, args, texts),
        ControlRoutes(manager, bodies),
        RootRoutes(args),
        UnservedRoutes(),
    )
    routes = [route for subject in subjects for route in subject.routes]
    return routes + DocsRoutes(routes).routes


def build_app(
    manager: TokenizerManager,
    args: ServerArgs,
    readiness: Readiness,
    keys: Keys,
    chat: ChatSetup,
    defaults: Mapping[str, Any],
) -> FastAPI:
    """The ASGI application of one server. defaults: sampling parameters for what requests leave out."""
    routes = server_routes(manager, args, readiness, keys, chat, defaults)
    app = FastAPI(title="Baton", version=baton_version(), docs_url=None, redoc_url=None, openapi_url=None)
    for route in routes:
        app.add_api_route(route.path, route.handler, methods=list(route.methods), response_model=None)
    app.add_exception_handler(RequestRefused, _on_refused)
    app.add_exception_handler(ClientLeft, _on_client_left)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)
    app.add_middleware(Guards, routes=RouteTable(routes), server=args.server, keys=keys)
    probes = [route.path for route in routes if route.access == "open"]
    app.add_middleware(ErrorCount, count=manager.metrics.call_refused, probes=probes)
    if origin := args.server.cors_origin:
        # Added last, so it is outermost: a browser may then read refusals too.
        app.add_middleware(
            CORSMiddleware, allow_origins=[origin], allow_methods=["*"], allow_headers=["*"],
            expose_headers=["X-Request-Id", WARNING_HEADER],
        )  # fmt: skip
    return app


async def _on_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRefused)
    return answer_error(error, body=_error_body(request))


async def _on_client_left(request: Request, _: Exception) -> Response:
    logger.debug("%s %s was abandoned by its client", request.method, request.url.path)
    return client_gone()


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answer a path that does not exist; `Guards` has refused methods that do not."""
    assert isinstance(error, HTTPException)
    is_missing = error.status_code == 404
    message = (
        f"there is no {request.url.path[:200]} here; GET /docs lists what there is" if is_missing else error.detail
    )
    refused = RequestRefused(message, code="not_found" if is_missing else "http_error")
    return answer_error(refused, headers=dict(error.headers or {}), body=_error_body(request), status=error.status_code)


async def _on_bug(request: Request, error: Exception) -> Response:
    # Starlette logs the traceback; the client sees only the kind of error, not our internals.
    message = f"internal error ({type(error).__name__}); the server's log has the details"
    refused = RequestRefused(message, code="internal_error")
    # Starlette raises the exception again behind the answer, and uvicorn closes the connection then.
    return answer_error(refused, {"Connection": "close"}, body=_error_body(request))


def _error_body(request: Request) -> ErrorBody:
    """The shape of this route's errors."""
    return getattr(request.state, "error_body", error_body)
