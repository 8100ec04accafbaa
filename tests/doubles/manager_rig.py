"""A TokenizerManager whose worker and detokenizer are played by the test.

def test_x(tokenizer):
    async def body(backend): ...        # backend.manager is under test; backend.output(...) is what it is told
    check(tokenizer, body)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from baton.runtime.channels import Endpoints, Receiver, Sender
from baton.runtime.messages import ControlReply, TextOutput, TextOutputs, TokenOutput, ToWorker, WorkerReady
from baton.runtime.metrics import ServerMetrics
from baton.runtime.prompt import Prompt
from baton.runtime.recording.recorder import RequestRecorder
from baton.runtime.text.tokenizer import Tokenizer
from baton.runtime.tokenizer_manager import TokenizerManager
from baton.scheduler.outcome import FinishReason
from baton.scheduler.request_spec import ContinuationSpec
from baton.scheduler.token_buffer import pack_ids
from tests.doubles.prompts import make_prompt


class Backend:
    """What stands behind the manager, played by the test."""

    def __init__(self, manager: TokenizerManager, endpoints: Endpoints) -> None:
        self.manager = manager
        self.inbox: Receiver[ToWorker] = Receiver(endpoints.to_worker, ToWorker)
        self.outbox = Sender(endpoints.to_manager)

    def received(self) -> list[ToWorker]:
        return self.inbox.poll(0.2)

    async def send(self, *messages: msgspec.Struct) -> None:
        """Send, and wait until the manager has taken it."""
        for message in messages:
            self.outbox.send(message)
        marker = asyncio.get_running_loop().create_future()
        self.manager.control._waiting[-1] = marker
        self.outbox.send(ControlReply(call_id=-1))
        await asyncio.wait_for(marker, 5)

    async def output(self, rid: str, text: str = "", finish: FinishReason | None = None, **fields: Any) -> None:
        item = TokenOutput(rid=rid, new_ids=pack_ids(list(text.encode())), finish=finish, **fields)
        await self.send(TextOutputs(items=[TextOutput(output=item, text=text)]))


@asynccontextmanager
async def running(
    tokenizer: Tokenizer, *, ready: bool = True, context_length: int = 500, recorder: RequestRecorder | None = None
) -> AsyncIterator[Backend]:
    endpoints = Endpoints.for_threads()
    manager = TokenizerManager(tokenizer=tokenizer, endpoints=endpoints, metrics=ServerMetrics("m"), recorder=recorder)
    backend = Backend(manager, endpoints)
    task = asyncio.create_task(manager.run())
    try:
        if ready:
            info = {"context_length": context_length, "vocab_size": 257}
            await backend.send(WorkerReady(info=msgspec.json.encode(info)))
        yield backend
    finally:
        task.cancel()
        manager.close()
        backend.inbox.close()
        backend.outbox.close()


def check(tokenizer: Tokenizer, body: Callable[[Backend], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def run() -> None:
        async with running(tokenizer, **options) as backend:
            await asyncio.wait_for(body(backend), 120)

    asyncio.run(run())


def prompt(rid: str = "r", text: str = "ab", **fields: Any) -> Prompt:
    return make_prompt(rid=rid, group=fields.pop("group", rid), text=text, **fields)


def child(rid: str = "c", parent: str = "p", **fields: Any) -> Prompt:
    own = {
        name: fields.pop(name)
        for name in ("text", "input_ids", "suffix_ids", "retain_ttl", "sampling")
        if name in fields
    }
    return make_prompt(rid=rid, group=rid, continuation=ContinuationSpec(parent, **fields), **own)
