"""The HTTP API: routes, and how answers and errors look. What a call means is decided elsewhere (native_api, runtime).

Bodies are read as bytes and decoded by msgspec, not by FastAPI's models: errors keep one shape and name one field.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from ...runtime import metrics
from ...runtime.constraints import item_tries
from ...runtime.prompt import Prompt
from ...runtime.tokenizer_manager import TokenizerManager
from ...scheduler.refusal import RequestRefused
from ...scheduler.sampling_params import SamplingParams
from ..fields.item_trie_source import build_item_trie
from ..fields.reading import read_rid, refuse_unserved
from ..native.generate import GenerateCall, parse_generate, stream_events
from ..openai.completions import CompletionAnswer, in_openai_words, parse_completion
from ..server_args import ServerArgs
from .transport import (
    ApiKeyCheck,
    EventStream,
    JSONAnswer,
    answer_error,
    read_binary,
    read_json_object,
    until_disconnect,
)

logger = logging.getLogger(__name__)

_HEALTH_GENERATE_TIMEOUT_S = 20.0
_CLIENT_CLOSED_REQUEST = 499

_PROFILE_SETTINGS: dict[str, tuple] = {
    "activities": (["CPU", "GPU"],),
    "profile_by_stage": (False,),
    **dict.fromkeys(("output_dir", "start_step", "num_steps", "with_stack", "record_shapes", "merge_profiles"), ()),
}
"""Of SGLang's profiler, which writes traces of torch; ours counts."""


@dataclass(slots=True)
class Readiness:
    """What the routes know of the server's life. warmed_up: the first answer has come through all processes."""

    warmed_up: bool = False


class HttpApi:
    """The routes of one server."""

    def __init__(self, manager: TokenizerManager, args: ServerArgs, state: Readiness) -> None:
        self._manager = manager
        self._args = args
        self._state = state
        self._max_body = args.server.max_body_mb * 2**20
        self._started = int(time.time())

    def build(self) -> FastAPI:
        app = FastAPI(title="Baton", version=_version(), docs_url=None, redoc_url=None, openapi_url=None)
        get, post, probe = ["GET"], ["POST"], ["GET", "HEAD"]
        routes: list[tuple[str, Callable[..., Awaitable[Response]], list[str]]] = [
            ("/generate", self.generate, post),
            ("/health", self.health, probe),
            ("/health_generate", self.health_generate, probe),
            ("/ready", self.ready, probe),
            ("/model_info", self.model_info, get),
            ("/get_model_info", self.model_info, get),
            ("/server_info", self.server_info, get),
            ("/get_server_info", self.server_info, get),
            ("/tokenize", self.tokenize, post),
            ("/detokenize", self.detokenize, post),
            ("/flush_cache", self.flush_cache, ["GET", "POST"]),
            ("/start_profile", self.start_profile, ["GET", "POST"]),
            ("/stop_profile", self.stop_profile, ["GET", "POST"]),
            ("/abort_request", self.abort_request, post),
            ("/release", self.release, post),
            ("/item_tries", self.load_item_trie, post),
            ("/item_tries", self.list_item_tries, get),
            ("/item_tries/{name}", self.delete_item_trie, ["DELETE"]),
            ("/metrics", self.metrics, get),
            ("/v1/models", self.models, get),
            ("/v1/completions", self.completions, post),
        ]
        for path, handler, methods in routes:
            app.add_api_route(path, handler, methods=methods, response_model=None)
        app.add_exception_handler(RequestRefused, _on_refused)
        app.add_exception_handler(HTTPException, _on_http_exception)
        app.add_exception_handler(Exception, _on_bug)
        if self._args.server.api_key:
            app.add_middleware(ApiKeyCheck, api_key=self._args.server.api_key)
        if origin := self._args.server.cors_origin:
            # Outermost, so that a browser may also read a refusal.
            app.add_middleware(
                CORSMiddleware, allow_origins=[origin], allow_methods=["*"], allow_headers=["*"],
                expose_headers=["X-Request-Id"],
            )  # fmt: skip
        return app

    # -- generation ------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Response:
        fields = await read_json_object(request, self._max_body)
        parsed = parse_generate(fields, rid=request.headers.get("x-request-id"))
        call = await self._manager.open(parsed.prompts, stream=parsed.stream)
        headers = _request_id(parsed)
        if parsed.stream:
            incremental = self._args.server.incremental_streaming_output
            return EventStream(call, stream_events(call, parsed, incremental=incremental), headers)
        with call:
            outputs = await until_disconnect(request.receive, call.results())
        if outputs is None:
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        return JSONAnswer(outputs if parsed.is_list else outputs[0], headers=headers)

    async def completions(self, request: Request) -> Response:
        fields = await read_json_object(request, self._max_body)
        parsed = parse_completion(fields, rid=request.headers.get("x-request-id"))
        self._check_model(parsed.model)
        headers = _request_id(parsed.generate)
        answer = CompletionAnswer(parsed, self._args.served_model_name, self._manager.tokenizer)
        with in_openai_words():
            call = await self._manager.open(parsed.generate.prompts, stream=parsed.generate.stream)
            if parsed.generate.stream:
                return EventStream(call, answer.chunks(call.updates(incremental=True)), headers)
            with call:
                outputs = await until_disconnect(request.receive, call.outputs())
        if outputs is None:
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        return JSONAnswer(answer.whole(outputs), headers=headers)

    async def abort_request(self, request: Request) -> Response:
        fields = await read_json_object(request, self._max_body)
        refuse_unserved(fields, ("rid", "abort_all"), {"abort_message": ("",)}, (), where="")
        rid, abort_all = fields.get("rid"), fields.get("abort_all") or False
        if abort_all not in (True, False) or not isinstance(rid, str | None):
            raise RequestRefused("rid takes a string and abort_all true or false", param="rid")
        if bool(rid) == abort_all:
            raise RequestRefused('say what to abort: {"rid": "..."} or {"abort_all": true}', param="rid")
        aborted = self._manager.abort(None if abort_all else read_rid(rid, "rid"))
        if rid and not aborted:
            raise RequestRefused(
                f"no open request has rid {rid!r}; it may have finished", status=404, code="not_found", param="rid"
            )
        return JSONAnswer({"aborted": aborted})

    async def release(self, request: Request) -> Response:
        """Give up the lease of a finished request. Not an error where there is none: it may have just expired."""
        fields = await read_json_object(request, self._max_body)
        refuse_unserved(fields, ("rid",), {}, (), where="")
        released = await self._manager.release(read_rid(fields.get("rid"), "rid"))
        return JSONAnswer({"released": released})

    # -- item tries ------------------------------------------------------------------------------------------------

    async def load_item_trie(self, request: Request) -> Response:
        """Put the uploaded items under ?name=; requests from now on get them, those that run keep what they have."""
        body = await read_binary(request, self._max_body)
        name = request.query_params.get("name")
        if name is None:
            raise RequestRefused("name is missing; POST /item_tries?name=NAME", param="name")
        trie = await build_item_trie(body)
        await self._manager.load_item_trie(name, trie)
        return JSONAnswer(item_tries.describe(name, trie))

    async def list_item_tries(self) -> Response:
        return JSONAnswer({"item_tries": await self._manager.list_item_tries()})

    async def delete_item_trie(self, name: str) -> Response:
        if not await self._manager.delete_item_trie(name):
            raise RequestRefused(
                f"there is no item trie {name!r}", status=404, code="item_trie_not_found", param="name"
            )
        return JSONAnswer({"deleted": name})

    # -- health ----------------------------------------------------------------------------------------------------

    async def health(self) -> Response:
        """200 while the server can take requests: worker loaded, heard of lately, not shutting down. Cheap."""
        self._refuse_unhealthy()
        return JSONAnswer({"status": "ok"})

    async def ready(self) -> Response:
        """200 once a first answer has come through all processes."""
        self._refuse_unhealthy()
        if not self._state.warmed_up:
            raise RequestRefused("the server is warming up", status=503, code="not_ready")
        return JSONAnswer({"status": "ready"})

    async def health_generate(self) -> Response:
        """200 once a token has been generated: this call's own, or anybody's meanwhile."""
        self._refuse_unhealthy()
        asked = time.monotonic()
        sampling = SamplingParams(max_new_tokens=1, temperature=0.0)
        prompt = Prompt(rid=f"health-{uuid4().hex}", input_ids=[0], sampling=sampling)
        with await self._manager.open([prompt], stream=False) as call:
            while not call.finished and self._manager.last_output_at < asked:
                if time.monotonic() - asked > _HEALTH_GENERATE_TIMEOUT_S:
                    message = f"no token was generated within {_HEALTH_GENERATE_TIMEOUT_S:g} s"
                    raise RequestRefused(message, status=503, code="unhealthy")
                await call.wait(0.5)
            if call.finished:
                await call.results()  # raises what went wrong
        return JSONAnswer({"status": "ok"})

    def _refuse_unhealthy(self) -> None:
        if not self._manager.is_ready:
            raise RequestRefused("the server is loading the model or shutting down", status=503, code="not_ready")
        silent = self._manager.seconds_since_heartbeat
        if silent > self._args.server.watchdog_timeout:
            raise RequestRefused(f"the worker has been silent for {silent:.0f} s", status=503, code="unhealthy")

    # -- information -----------------------------------------------------------------------------------------------

    async def model_info(self) -> Response:
        """What is served; with the chat template, so that a client can write roles piece by piece."""
        info = self._manager.worker_info
        template = self._manager.tokenizer.chat_template
        return JSONAnswer(
            {
                "model_path": self._args.model.model_path,
                "tokenizer_path": self._args.tokenizer_path,
                "served_model_name": self._args.served_model_name,
                "is_generation": True,
                **{name: info.get(name) for name in ("context_length", "vocab_size", "dtype", "device")},
                "chat_template": None if template is None else template.source,
                "special_tokens": self._manager.tokenizer.special_tokens,
            }
        )

    async def server_info(self) -> Response:
        """Every setting but the key, and what the worker says of itself now."""
        settings = {**asdict(self._args.model), **asdict(self._args.scheduler), **asdict(self._args.server)}
        del settings["api_key"]
        settings["served_model_name"] = self._args.served_model_name
        worker = await self._manager.info()
        return JSONAnswer({**settings, "version": _version(), "internal_states": [worker]})

    async def models(self) -> Response:
        model = {
            "id": self._args.served_model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "baton",
            "root": self._args.model.model_path,
            "max_model_len": self._manager.worker_info.get("context_length"),
        }
        return JSONAnswer({"object": "list", "data": [model]})

    async def metrics(self) -> Response:
        return Response(self._manager.metrics.render(), headers={"Content-Type": metrics.CONTENT_TYPE})

    # -- tokenizer and cache ---------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        fields = await read_json_object(request, self._max_body)
        refuse_unserved(fields, ("prompt", "add_special_tokens", "model"), {}, (), where="")
        self._check_model(fields.get("model"))
        prompt = fields.get("prompt")
        is_list = isinstance(prompt, list)
        texts: list[Any] = prompt if is_list else [prompt]
        if not all(isinstance(text, str) for text in texts):
            raise RequestRefused("prompt takes a string or a list of strings", param="prompt")
        special = _boolean(fields, "add_special_tokens", default=True)
        tokens = await self._manager.tokenize(texts, add_special_tokens=special)
        return JSONAnswer(
            {
                "tokens": tokens if is_list else tokens[0],
                "count": [len(ids) for ids in tokens] if is_list else len(tokens[0]),
                "max_model_len": self._manager.worker_info.get("context_length"),
            }
        )

    async def detokenize(self, request: Request) -> Response:
        fields = await read_json_object(request, self._max_body)
        refuse_unserved(fields, ("tokens", "skip_special_tokens", "model"), {}, (), where="")
        self._check_model(fields.get("model"))
        tokens = fields.get("tokens")
        if not isinstance(tokens, list):
            raise RequestRefused("tokens takes a list of token ids, or a list of such lists", param="tokens")
        is_list = bool(tokens) and all(isinstance(item, list) for item in tokens)
        vocab = self._manager.tokenizer.vocab_size
        for token_id in (item for ids in tokens for item in ids) if is_list else tokens:
            if type(token_id) is not int or not 0 <= token_id < vocab:
                raise RequestRefused(f"tokens holds {token_id!r}; token ids go from 0 to {vocab - 1}", param="tokens")
        skip = _boolean(fields, "skip_special_tokens", default=True)
        decode = self._manager.tokenizer.decode
        texts = [decode(ids, skip_special_tokens=skip) for ids in (tokens if is_list else [tokens])]
        return JSONAnswer({"text": texts if is_list else texts[0]})

    async def flush_cache(self) -> Response:
        await self._manager.flush_cache()
        return JSONAnswer({"success": True, "message": "the cache is empty"})

    # -- profile ---------------------------------------------------------------------------------------------------

    async def start_profile(self, request: Request) -> Response:
        """Record where the time of steps goes, until stop_profile. Takes no settings, and no body is needed."""
        await self._refuse_settings(request)
        await self._manager.start_profile()
        return JSONAnswer({"success": True, "message": "profiling; POST /stop_profile answers with what was found"})

    async def stop_profile(self, request: Request) -> Response:
        await self._refuse_settings(request)
        return JSONAnswer(await self._manager.stop_profile())

    async def _refuse_settings(self, request: Request) -> None:
        if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
            refuse_unserved(await read_json_object(request, self._max_body), (), _PROFILE_SETTINGS, (), where="")

    def _check_model(self, name: Any) -> None:
        if name is not None and name != self._args.served_model_name:
            raise RequestRefused(
                f"model {name!r} is not served here; this server has {self._args.served_model_name!r}",
                status=404,
                code="model_not_found",
                param="model",
            )


def _version() -> str:
    """Of the package; a checkout that is only on the path has none."""
    try:
        return version("baton")
    except PackageNotFoundError:
        return "unknown"


def _request_id(call: GenerateCall) -> dict[str, str]:
    """The header that says the call's name, where a header can."""
    return {"X-Request-Id": call.rid} if call.rid.isascii() and call.rid.isprintable() else {}


def _boolean(fields: dict[str, Any], name: str, *, default: bool) -> bool:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestRefused(f"{name} takes true or false", param=name)
    return value


async def _on_refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRefused)
    return answer_error(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """A path or method that does not exist."""
    assert isinstance(error, HTTPException)
    words = {404: f"there is no {request.url.path} here", 405: f"{request.url.path} does not take {request.method}"}
    codes = {404: "not_found", 405: "method_not_allowed"}
    message = words.get(error.status_code, error.detail)
    if allowed := (error.headers or {}).get("Allow"):
        message += f"; use {allowed}"
    refused = RequestRefused(message, status=error.status_code, code=codes.get(error.status_code, "http_error"))
    return answer_error(refused, headers=dict(error.headers or {}))


async def _on_bug(_: Request, error: Exception) -> Response:
    # Starlette logs the trace; the client gets the kind of error, not our internals.
    message = f"internal error ({type(error).__name__}); the server's log has the details"
    return answer_error(RequestRefused(message, status=500, code="internal_error"))
