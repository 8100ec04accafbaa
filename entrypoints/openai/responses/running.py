"""A response from its opening to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec

from ....runtime.text.token_bytes import TokenBytes
from ....scheduler.outcome import RequestRefused
from ...chat.answer_parsers import AnswerParsers
from ...chat.chats import ChatAnswer, ChatUpdate
from .fields import RESPONSE_NAMES, ResponseRequest
from .output_items import Event, OutputItems, TextTokens
from .response_object import ResponseObject, Status
from .store import StoredResponse

_LARGE = 20_000
"""Tokens, characters and logprobs; larger updates are dressed in a thread."""

_STATUSES: dict[str, Status] = {"stop": "completed", "length": "incomplete", "abort": "cancelled"}


class RunningResponse:
    """Reads the answer once: with `events` or `whole`. Use it as a context: leaving it aborts an unfinished answer.

    stored: it can be read and continued by its id. ended: set when it is over, or left.
    """

    def __init__(
        self,
        scope: str,
        request: ResponseRequest,
        before: StoredResponse | None,
        answer: ChatAnswer,
        response: ResponseObject,
        parsers: AnswerParsers,
        token_bytes: TokenBytes,
        on_end: Callable[[RunningResponse, StoredResponse | None], None],
    ) -> None:
        """scope: where it is stored. before: the response that it continues. on_end: called once, with the response to
        store."""
        self.scope = scope
        self.request = request
        self.stored = request.store
        self.ended = asyncio.Event()
        self.body = msgspec.json.encode(response.opening_state("queued" if request.background else "in_progress"))
        """Its JSON, as of now."""
        self._before = before
        self._answer = answer
        self._response = response
        self._on_end = on_end
        tells_thoughts = parsers.reasoning_name is not None and request.call.separate_reasoning
        needs_tokens = request.wants_logprobs or tells_thoughts
        self._tokens = TextTokens(token_bytes, answer.forced) if needs_tokens else None
        self._items = OutputItems(request.call.rid, parsers.new_call_id, self._tokens, request.offered)

    def __enter__(self) -> RunningResponse:
        return self

    def __exit__(self, *_: object) -> None:
        self._answer.answer.close()
        self._end(None)

    @property
    def items(self) -> list[dict]:
        """The items of its input, and of all responses before it."""
        before = self._before
        return [*(before.items + before.output if before else []), *self.request.input_items]

    async def whole(self) -> bytes:
        """The JSON of the response, once it is over. Raises RequestRefused."""
        async for _ in self.events():
            pass
        return self.body

    async def events(self) -> AsyncIterator[Event]:
        """The events of a stream. Raises RequestRefused, with the names of this API, before the first of them; what
        fails later is an event."""
        number = 0
        begun = False
        try:
            with RESPONSE_NAMES.translated():
                async for update in self._answer.updates():
                    first: list[Event] = []
                    if not begun:
                        begun = True
                        state = self._response.opening_state("in_progress")
                        self.body = msgspec.json.encode(state)
                        first = [{"type": f"response.{name}", "response": state} for name in _FIRST]
                    for event in first + await self._told(update):
                        yield {"type": event["type"], "sequence_number": number, **event}
                        number += 1
        except RequestRefused as refused:
            failed = self.fail(refused)
            if not begun:
                raise
            yield {"type": "response.failed", "sequence_number": number, "response": failed}

    def fail(self, error: RequestRefused) -> dict[str, Any]:
        """It ends with an error."""
        failed = self._response.failed_state(error, self._items.ended)
        self.body = msgspec.json.encode(failed)
        # In the foreground the client has the error, and no request can continue it.
        self._end(self._to_store("failed") if self.request.background else None)
        return failed

    # -- the answer grows ----------------------------------------------------------------------------------------------

    async def _told(self, update: ChatUpdate) -> list[Event]:
        output = update.output
        if len(output.token_ids) + len(output.text) + output.output_logprobs.num_entries > _LARGE:
            events = await asyncio.to_thread(lambda: list(self._take(update)))
        else:
            events = list(self._take(update))
        if output.finish is not None:
            self._end(self._to_store(_STATUSES[output.finish.type]))
        return events

    def _take(self, update: ChatUpdate) -> Iterator[Event]:
        output, pieces = update
        if self._tokens is not None:
            self._tokens.add_output(output)
        for piece in pieces:
            yield from self._items.take_piece(piece)
        if output.finish is None:
            return
        status = _STATUSES[output.finish.type]
        last = "completed" if status == "completed" else "incomplete"
        yield from self._items.end_answer(last, may_be_empty=status == "cancelled")
        state = self._response.ended_state(status, self._items.ended, output, self._items.reasoning_tokens)
        self.body = msgspec.json.encode(state)
        # There is no event for a cancelled one; its own status says it.
        yield {"type": f"response.{'incomplete' if status == 'cancelled' else status}", "response": state}

    # -- its end -------------------------------------------------------------------------------------------------------

    def _to_store(self, status: Status) -> StoredResponse | None:
        if not self.stored:
            return None
        before, request = self._before, self.request
        output = [_without_logprobs(item) for item in self._items.ended]
        turn = self._answer.turns[0] if self._answer.turns else None
        own = request.call.conversation.messages
        return StoredResponse(
            rid=request.call.rid,
            scope=self.scope,
            status=status,
            background=request.background,
            body=self.body,
            items=self.items,
            output=output,
            item_bytes=(before.item_bytes if before else 0) + request.input_bytes + len(msgspec.json.encode(output)),
            messages=[*own, self._items.message],
            turn=turn,
        )

    def _end(self, to_store: StoredResponse | None) -> None:
        if not self.ended.is_set():
            self.ended.set()
            self._on_end(self, to_store)


_FIRST = ("created", "in_progress")


def _without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    if item["type"] != "message":
        return item
    parts = [{name: value for name, value in part.items() if name != "logprobs"} for part in item["content"]]
    return {**item, "content": parts}
