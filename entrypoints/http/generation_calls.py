"""The steps that every API which generates has in common: read the body, send a stream or a whole answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, TypeVar

from fastapi import Request

from ...runtime.tokenizer_manager import TokenizerManager
from ...scheduler.outcome import RequestRefused
from ..fields.conversation_names import ConversationNames, read_names
from ..fields.ignored import Ignored, IgnoredLog
from ..server_config import ServerArgs
from .model_names import ModelNames
from .wire.answers import DATA_EVENTS, EventFormat, EventStream, request_id
from .wire.bodies import Bodies, parsed

T = TypeVar("T")

Parse = Callable[[dict[str, Any], str | None, ConversationNames, Ignored], T]
"""(fields of the body, rid of the X-Request-Id header, names of the conversation, collector of fields without effect)
-> the parsed request."""


class GenerationCalls:
    """Shared by the routes of all APIs on one server.

    max_prompts: limit of one request. model: the served name. defaults: sampling parameters where a request has none.
    """

    def __init__(
        self,
        manager: TokenizerManager,
        args: ServerArgs,
        bodies: Bodies,
        defaults: Mapping[str, Any],
        models: ModelNames,
    ) -> None:
        self.defaults = defaults
        self.max_prompts = args.server.max_prompts_per_request
        self.model = args.served_model_name
        self._models = models
        self._bodies = bodies
        self._ignored_log = IgnoredLog(args.server.unknown_fields)
        self._count_error = manager.metrics.call_refused

    @asynccontextmanager
    async def read_call(self, request: Request, parse: Parse[T]) -> AsyncIterator[tuple[T, Ignored]]:
        """The parsed request and its fields without effect. The body's room is kept for the ``with`` block, so that it
        includes handing the prompts on. Raises RequestRefused and ClientLeft."""
        async with self._bodies.generation(request) as fields:
            ignored = self._ignored_log.begin_request()
            rid = request.headers.get("x-request-id")
            names = read_names(fields, request.headers)
            self._models.name_adapter(fields)
            try:
                call = await parsed(request, lambda: parse(fields, rid, names, ignored))
            except RequestRefused as error:
                if error.code == "unsupported_content":  # a picture, say: other models may take it
                    message = f"{error.message} (model {self.model})"
                    raise RequestRefused(message, code=error.code, param=error.param) from error
                raise
            yield call, ignored

    def check_model(self, name: Any) -> None:
        """Raises RequestRefused (404) for the name of another model."""
        self._models.check(name)

    def shown_model(self, asked: Any) -> str:
        """See `ModelNames.shown_model`."""
        return self._models.shown_model(asked)

    def answer_headers(self, rid: str, ignored: Ignored) -> dict[str, str]:
        """``X-Request-Id``, and that of `report_ignored`."""
        return request_id(rid) | self.report_ignored(ignored)

    def report_ignored(self, ignored: Ignored) -> dict[str, str]:
        """The header that warns about fields without effect; they are logged, too."""
        return self._ignored_log.report(ignored)

    def stream_answer(
        self,
        answer: AbstractContextManager,
        events: AsyncIterator[dict],
        headers: dict[str, str],
        format: EventFormat = DATA_EVENTS,
    ) -> EventStream:
        """answer: aborts what is unfinished when it is left."""
        return EventStream(answer, events, headers, self._count_error, format)
