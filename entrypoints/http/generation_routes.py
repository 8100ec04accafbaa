"""SGLang's ``/generate``, and the routes that abort a request or release its leases."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from starlette.responses import Response

from ...runtime.tokenizer_manager import TokenizerManager
from ...scheduler.outcome import RequestRefused
from ..description.json_schema import answered, flag, list_of, string, taken
from ..description.openapi import GENERATING, Operation
from ..fields.conversation_names import ConversationNames
from ..fields.ignored import Ignored
from ..fields.jobs import JOB_HEADERS
from ..fields.prompts import PromptBatch, with_extra_body
from ..fields.reading import MAX_RID_CHARS, RID, read_rid, refuse_unserved
from ..native.generate import BODY, EXAMPLES, parse_generate
from ..native.generate_response import ANSWER, OUTPUT, lazy_response, stream_events
from .generation_calls import GenerationCalls
from .keys import caller, sees_all
from .route import POST, Route
from .wire.answers import JSONAnswer, client_gone, json_answer, size_of, until_disconnect
from .wire.bodies import Bodies

_GENERATE = Operation(
    summary="Generate tokens",
    about="SGLang's native endpoint: a prompt, a batch of them, or what continues an earlier request.",
    tag="Native",
    body=with_extra_body(BODY),
    headers=JOB_HEADERS,
    examples=EXAMPLES,
    answer=ANSWER,
    events=OUTPUT,
    refusals=GENERATING,
)
_ABORTED = string("The rid of the request; empty, as SGLang's clients send it, beside abort_all.", most=MAX_RID_CHARS)
_ABORT_OFF = {"abort_message": ("",)}
_ABORT = Operation(
    summary="Abort a request, or all",
    about="`abort_all` ends all of the client's own; with the admin key, those of all clients.",
    tag="Native",
    body=taken({"rid": _ABORTED, "abort_all": flag(default=False)}, title="AbortBody", unsupported=_ABORT_OFF),
    answer=answered({"aborted": list_of(string("rid"))}, title="Aborted"),
    refusals=(404,),
)
_RELEASE = Operation(
    summary="Release the leases of a finished request",
    tag="Native",
    body=taken({"rid": RID}, title="ReleaseBody", required=("rid",)),
    answer=answered({"released": flag("True if there were any leases.")}, title="Released"),
    refusals=(504,),
)


class GenerationRoutes:
    def __init__(
        self, manager: TokenizerManager, bodies: Bodies, calls: GenerationCalls, *, streams_increments: bool
    ) -> None:
        """streams_increments: each event of a stream has only what is new, not the whole output so far."""
        self._manager = manager
        self._bodies = bodies
        self._calls = calls
        self._streams_increments = streams_increments
        self.routes = [
            Route("/generate", self.generate, POST, operation=_GENERATE),
            Route("/abort_request", self.abort_request, POST, operation=_ABORT),
            Route("/release", self.release, POST, operation=_RELEASE),
        ]

    async def generate(self, request: Request) -> Response:
        async with self._calls.read_call(request, self._parse_generate) as (batch, ignored):
            answer = await self._manager.open_answer(caller(request), batch.prompts, stream=batch.stream)
        headers = self._calls.answer_headers(batch.rid, ignored)
        if batch.stream:
            events = stream_events(answer, batch, incremental=self._streams_increments)
            return self._calls.stream_answer(answer, events, headers)
        with answer:
            outputs = await until_disconnect(request.receive, answer.outputs())
        if outputs is None:
            return client_gone()
        return await json_answer(lambda: lazy_response(outputs, batch), size_of(outputs), headers)

    def _parse_generate(
        self, fields: dict[str, Any], rid: str | None, names: ConversationNames, ignored: Ignored
    ) -> PromptBatch:
        return parse_generate(fields, rid=rid, max_prompts=self._calls.max_prompts, names=names, ignored=ignored)

    async def abort_request(self, request: Request) -> Response:
        async with self._bodies.json_object(request) as fields:
            refuse_unserved(fields, ("rid", "abort_all"), _ABORT_OFF)
        rid, abort_all = fields.get("rid"), fields.get("abort_all") or False
        if abort_all not in (True, False) or not isinstance(rid, str | None):
            raise RequestRefused("rid takes a string and abort_all true or false", param="rid")
        if bool(rid) == abort_all:
            raise RequestRefused('say what to abort: {"rid": "..."} or {"abort_all": true}', param="rid")
        if abort_all and sees_all(request):
            return JSONAnswer({"aborted": self._manager.abort_all()})
        aborted = self._manager.abort_requests(caller(request), None if abort_all else read_rid(rid, "rid"))
        if rid and not aborted:
            raise RequestRefused(
                f"no open request has rid {rid!r}; it may have finished", code="not_found", param="rid"
            )
        return JSONAnswer({"aborted": aborted})

    async def release(self, request: Request) -> Response:
        """Release the leases of a finished request. Having none is no error: they may have just expired."""
        async with self._bodies.json_object(request) as fields:
            refuse_unserved(fields, ("rid",))
        released = await self._manager.control.release_leases(caller(request), read_rid(fields.get("rid"), "rid"))
        return JSONAnswer({"released": released})
