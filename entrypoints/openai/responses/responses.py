"""Opens responses, runs those in the background, and finds stored ones by their id.

request ─▶ `find_response` (previous_response_id) ─▶ Chats.open_chat ─▶ RunningResponse ─▶ `put_response`
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from ....runtime.clients import Client
from ....runtime.tokenizer_manager import TokenizerManager
from ....scheduler.outcome import RequestRefused
from ...chat.call import ChatCall
from ...chat.chats import Chats
from ...fields.reading import STORED_RESPONSE_PREFIX
from ...server_config import ChatConfig
from .fields import RESPONSE_NAMES, ResponseRequest
from .response_object import ResponseObject
from .running import RunningResponse
from .store import ResponseStore, StoredResponse

_CANCEL_S = 10.0
"""Seconds to wait for a cancelled response to end; its client may read slowly. After that it is returned as it is."""


class Responses:
    """One per server, on the loop of its manager."""

    def __init__(
        self, manager: TokenizerManager, chats: Chats, shown_model: Callable[[Any], str], config: ChatConfig
    ) -> None:
        """shown_model: the name that an answer gives to its model, from the request's ``model``."""
        self._manager = manager
        self._chats = chats
        self._shown_model = shown_model
        self._config = config
        self._store = ResponseStore(config.max_stored_responses)
        self._running: dict[tuple[str, str], RunningResponse] = {}
        """By scope and rid."""
        self._background: set[asyncio.Task] = set()

    # -- new responses -------------------------------------------------------------------------------------------------

    async def open_response(self, client: Client, request: ResponseRequest) -> RunningResponse:
        """Start a response of a client; read it as a context, or hand it to `in_background`. Raises RequestRefused."""
        if request.background and not self._config.max_stored_responses:
            raise RequestRefused(
                "this server stores no responses (--max-stored-responses 0), so none can run in the background",
                param="background",
            )
        call = request.call
        scope = client.scope(call.prompt.spec.namespace)
        before = None if request.previous is None else self._previous(scope, request.previous)
        with RESPONSE_NAMES.translated():
            call = self._going_on(request, before)
            answer = await self._chats.open_chat(client, call)
        # Its conversation as it is stored: with what came before, and without the instructions.
        kept = dataclasses.replace(
            call.conversation, messages=call.conversation.messages[len(request.messages_before) :]
        )
        running = RunningResponse(
            scope,
            dataclasses.replace(request, call=dataclasses.replace(call, conversation=kept)),
            before,
            answer,
            ResponseObject(request, self._shown_model(request.model)),
            self._chats.parsers,
            self._manager.tokenizer.token_bytes,
            partial(self._ended, client),
        )
        self._running[scope, call.rid] = running
        return running

    def in_background(self, running: RunningResponse) -> bytes:
        """Let it run to its end, and return what it is now."""
        task = asyncio.create_task(_run(running))
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return running.body

    def _going_on(self, request: ResponseRequest, before: StoredResponse | None) -> ChatCall:
        call, spec = request.call, request.call.prompt.spec
        messages = [*request.messages_before, *(before.messages if before else []), *call.conversation.messages]
        prompt = call.prompt
        if request.store and spec.retain_ttl is None and not spec.is_last_step:
            ttl = self._config.response_ttl
            spec = msgspec.structs.replace(spec, retain_ttl=ttl, unasked=spec.job_id is None, default_lease=True)
            prompt = dataclasses.replace(prompt, spec=spec)
        return dataclasses.replace(
            call,
            prompt=prompt,
            conversation=dataclasses.replace(call.conversation, messages=messages),
            after=None if before is None else before.turn,
        )

    def _previous(self, scope: str, rid: str) -> StoredResponse:
        name = f"{STORED_RESPONSE_PREFIX}{rid}"
        if (running := self._running.get((scope, rid))) is not None and running.stored:
            raise RequestRefused(
                f"{name} is still in progress; wait for its end",
                code="response_in_progress",
                param="previous_response_id",
            )
        stored = self._store.find_response(scope, rid)
        if stored is None:
            raise _unknown(name, "previous_response_id")
        if stored.turn is None:
            raise RequestRefused(
                f"{name} is {stored.status}, so it cannot be continued; continue the response before it",
                code="parent_failed",
                param="previous_response_id",
            )
        return stored

    def _ended(self, client: Client, running: RunningResponse, to_store: StoredResponse | None) -> None:
        key = running.scope, running.request.call.rid
        if self._running.get(key) is running:
            del self._running[key]
        if to_store is not None:
            self._store.put_response(to_store, client.name)

    # -- stored and running ones, by id --------------------------------------------------------------------------------

    def get_response(self, client: Client, namespace: str, name: str) -> bytes:
        """The response's JSON, as of now. Raises RequestRefused (404), as do the others."""
        found = self._find(client.scope(namespace), name)
        return found.body

    def input_items(self, client: Client, namespace: str, name: str) -> list[dict]:
        """Oldest first, with those of all responses that it continues."""
        found = self._find(client.scope(namespace), name)
        return found.items

    async def cancel_response(self, client: Client, namespace: str, name: str) -> bytes:
        """Abort it; returns its JSON, once it has ended."""
        found = self._find(client.scope(namespace), name, unstored=True)
        if isinstance(found, RunningResponse):
            self._manager.abort_requests(client, found.request.call.rid)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(found.ended.wait(), _CANCEL_S)
        elif not found.background:
            raise RequestRefused(
                f"{name} has ended; only a response in the background can be cancelled after its end",
                code="response_not_in_background",
                param="response_id",
            )
        return found.body

    async def delete_response(self, client: Client, namespace: str, name: str) -> None:
        """Forget it, and give up the lease on its KV; if it runs, abort it."""
        found = self._find(client.scope(namespace), name)
        rid = _rid_of(name)
        if isinstance(found, RunningResponse):
            found.stored = False
            self._manager.abort_requests(client, rid)
            return
        self._store.pop_response(found.scope, rid)
        await self._manager.control.release_leases(client, rid)

    def _find(self, scope: str, name: str, *, unstored: bool = False) -> RunningResponse | StoredResponse:
        """unstored: also one that runs and will not be stored."""
        key = scope, _rid_of(name)
        running = self._running.get(key)
        if running is not None and (unstored or running.stored):
            return running
        stored = self._store.find_response(*key)
        if stored is None:
            raise _unknown(name, "response_id")
        return stored


async def _run(running: RunningResponse) -> None:
    with running, contextlib.suppress(RequestRefused):  # which is stored
        await running.whole()


def _rid_of(name: str) -> str:
    """Empty, which no response has, for what is no id of a response."""
    return name.removeprefix(STORED_RESPONSE_PREFIX) if name.startswith(STORED_RESPONSE_PREFIX) else ""


def _unknown(name: str, param: str) -> RequestRefused:
    return RequestRefused(
        f"there is no response {name!r}: it was never made, not stored (store: false), made with another cache_salt, "
        "deleted, or is forgotten (--max-stored-responses); send the whole conversation as input instead",
        code="response_not_found",
        param=param,
    )
