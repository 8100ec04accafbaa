"""Client for the worker's control calls: everything but generation. Each call has an id and one ControlReply.

All calls raise RequestRefused before the worker is ready, when the server ends, and if the worker does not answer
within ``timeout_s``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from ..scheduler.constraints.item_trie import ItemTrie, ItemTrieError
from ..scheduler.outcome import RequestRefused
from .channels import Sender
from .clients import Client, split_name
from .constraints.item_tries import check_name, pack_trie
from .lora.adapter_config import AdapterError
from .lora.adapter_names import AdapterNames, check_adapter_name
from .messages import (
    ControlReply,
    ControlRequest,
    DeleteItemTrie,
    DescribeJobs,
    DescribeLeases,
    EndJob,
    LoadAdapter,
    ReleaseRequest,
    ToWorker,
    UnloadAdapter,
)
from .prompt import ModelLimits


class Availability:
    """The worker's readiness: it takes no messages before it is ready, nor once the server ends. The TokenizerManager
    sets it; every sender checks it."""

    def __init__(self) -> None:
        self._ready = asyncio.Event()
        self._limits: ModelLimits | None = None
        self._closed_because: RequestRefused | None = None
        self._closed = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set() and self._closed_because is None

    def require_ready(self) -> ModelLimits:
        """Return the served model's limits. Raises RequestRefused if nothing can be asked."""
        if self._closed_because is not None:
            raise self._closed_because
        if self._limits is None:
            raise RequestRefused("the model is still loading; try again soon", code="not_ready")
        return self._limits

    async def wait_ready(self) -> None:
        """Wait until the worker has said that it can serve."""
        await self._ready.wait()

    def mark_ready(self, limits: ModelLimits) -> None:
        """Record that the worker is ready, and the limits of its model."""
        self._limits = limits
        self._ready.set()

    def close(self, error: RequestRefused) -> None:
        """Refuse everything with ``error`` from now on."""
        self._closed_because = error
        self._closed.set()

    async def wait_closed(self) -> None:
        """Wait until everything is refused."""
        await self._closed.wait()


class ControlClient:
    """Sends control calls. Runs on the TokenizerManager's loop, which passes it the replies."""

    def __init__(self, sender: Sender, availability: Availability) -> None:
        self._sender = sender
        self._availability = availability
        self._waiting: dict[int, asyncio.Future[ControlReply]] = {}
        self._next_call_id = 0
        self.paused = False
        """True while the worker is to launch no steps."""
        self.adapters = AdapterNames()
        self._changes: set[asyncio.Future[None]] = set()
        """Changes of the adapters that have not ended."""

    # -- calls about a client's names ------------------------------------------------------------------------------

    async def release_leases(self, client: Client, rid: str, timeout_s: float = 10.0) -> bool:
        """Give up the leases of the client's finished request ``rid``. False if it has none (any more)."""
        name = client.qualified(rid)
        reply = await self._ask(lambda call_id: ReleaseRequest(call_id=call_id, rid=name), "release", timeout_s)
        return _payload(reply)

    async def job(self, client: Client, namespace: str, job_id: str, timeout_s: float = 10.0) -> dict | None:
        """Report on one of the client's jobs, or None. See scheduler/jobs/job.py."""
        scope, name = client.kv_namespace(namespace), client.qualified(job_id)
        reply = await self._ask(
            lambda call_id: DescribeJobs(call_id=call_id, namespace=scope, job_id=name), "jobs", timeout_s
        )
        return next((_stripped_job(client, job) for job in _payload(reply)), None)

    async def jobs(self, client: Client, namespace: str, timeout_s: float = 10.0) -> list[dict]:
        """Reports on the client's jobs in a namespace, most recently active last."""
        scope, prefix = client.kv_namespace(namespace), client.prefix
        reply = await self._ask(
            lambda call_id: DescribeJobs(call_id=call_id, namespace=scope, prefix=prefix), "jobs", timeout_s
        )
        return [_stripped_job(client, job) for job in _payload(reply)]

    async def jobs_of_all_clients(self, timeout_s: float = 10.0) -> list[dict]:
        """Reports on all jobs, each with its ``client``. Only for servers with a key per client."""
        reply = await self._ask(lambda call_id: DescribeJobs(call_id=call_id, namespace=None), "jobs", timeout_s)
        jobs = []
        for job in _payload(reply):
            owner = Client(split_name(job["job_id"])[0])
            jobs.append({"client": owner.name, **_stripped_job(owner, job)})
        return jobs

    async def end_job(self, client: Client, namespace: str, job_id: str, timeout_s: float = 10.0) -> dict | None:
        """End one of the client's jobs: abort its open requests, give up what is kept for it. Returns the rids
        ``aborted`` and the ``released_tokens``; None if the job is not known."""
        scope, name = client.kv_namespace(namespace), client.qualified(job_id)
        reply = await self._ask(
            lambda call_id: EndJob(call_id=call_id, namespace=scope, job_id=name), "the end of a job", timeout_s
        )
        ended = _payload(reply)
        return None if ended is None else {**ended, "aborted": [client.stripped(rid) for rid in ended["aborted"]]}

    async def leases(self, client: Client, after: int = -1, limit: int = 100, timeout_s: float = 10.0) -> dict:
        """A page of the client's live leases; see scheduler/continuation/records.py."""
        page = await self._leases(client.name or None, after, limit, timeout_s)
        return page | {"leases": [_stripped_lease(client, lease) for lease in page["leases"]]}

    async def leases_of_all_clients(self, after: int = -1, limit: int = 100, timeout_s: float = 10.0) -> dict:
        """A page of all live leases, each with the ``client`` it belongs to. Only for servers with a key per client."""
        page = await self._leases(None, after, limit, timeout_s)
        leases = [
            {"client": lease["user"], **_stripped_lease(Client(lease["user"]), lease)} for lease in page["leases"]
        ]
        return page | {"leases": leases}

    async def _leases(self, client: str | None, after: int, limit: int, timeout_s: float) -> dict:
        reply = await self._ask(
            lambda call_id: DescribeLeases(call_id=call_id, after=after, limit=limit, client=client),
            "leases",
            timeout_s,
        )
        return _payload(reply)

    # -- calls about the server ------------------------------------------------------------------------------------

    async def flush_cache(self, timeout_s: float = 30.0) -> None:
        """Forget all cached prefixes. Raises RequestRefused (409) while requests are open."""
        reply = await self._ask_verb("flush_cache", timeout_s)
        if not reply.ok:
            raise RequestRefused(_reason(reply), code="busy")

    async def pause(self, timeout_s: float = 10.0) -> None:
        """Stop launching steps until `resume`. Open and new requests wait; all other calls are answered."""
        await self._ask_verb("pause", timeout_s)
        self.paused = True

    async def resume(self, timeout_s: float = 10.0) -> None:
        """End a pause, if there is one."""
        await self._ask_verb("resume", timeout_s)
        self.paused = False

    async def info(self, timeout_s: float = 10.0) -> dict:
        """The worker's description of itself, with its current stats."""
        reply = await self._ask_verb("info", timeout_s)
        if not reply.ok:
            raise RequestRefused(_reason(reply), code="worker_error")
        return _payload(reply)

    async def tiers(self, timeout_s: float = 10.0) -> dict:
        """Contents and counters of the KV cache's tiers; see `control.report_tiers`."""
        reply = await self._ask_verb("tiers", timeout_s)
        if not reply.ok:
            raise RequestRefused(_reason(reply), code="worker_error")
        return _payload(reply)

    async def cache_statistics(self, timeout_s: float = 10.0) -> dict:
        """Lookups, hits and evictions of the prefix cache since the start or the last reset; see
        scheduler/cache_stats.py."""
        return _payload(await self._ask_verb("statistics", timeout_s))

    async def reset_cache_statistics(self, timeout_s: float = 10.0) -> None:
        """Restart the counts of `cache_statistics`. The totals of `info` and the metrics continue."""
        await self._ask_verb("reset_statistics", timeout_s)

    async def start_profile(self, timeout_s: float = 10.0) -> None:
        """Start recording where the time of steps goes. Raises RequestRefused (409) if it has been started already."""
        reply = await self._ask_verb("start_profile", timeout_s)
        if not reply.ok:
            raise RequestRefused(_reason(reply), code="profiling")

    async def stop_profile(self, timeout_s: float = 60.0) -> dict:
        """Stop recording and return the profile; see step_profile.describe. Raises RequestRefused (409) if nothing was
        started."""
        reply = await self._ask_verb("stop_profile", timeout_s)
        if not reply.ok:
            raise RequestRefused(_reason(reply), code="not_profiling")
        return _payload(reply)

    async def load_item_trie(self, name: str, trie: ItemTrie, timeout_s: float = 30.0) -> None:
        """Store a trie under a name; requests sent from now on get it. Raises RequestRefused for an invalid name or
        invalid tokens."""
        try:
            check_name(name)
        except ItemTrieError as error:
            raise RequestRefused(str(error), param="name") from None
        reply = await self._ask(lambda call_id: pack_trie(call_id, name, trie), "load_item_trie", timeout_s)
        if not reply.ok:
            raise RequestRefused(_reason(reply), code="invalid_item_trie")

    async def delete_item_trie(self, name: str, timeout_s: float = 10.0) -> bool:
        """Delete a trie; requests that use it keep it. False if there is none of this name."""
        reply = await self._ask(lambda call_id: DeleteItemTrie(call_id=call_id, name=name), "delete", timeout_s)
        return _payload(reply)

    async def list_item_tries(self, timeout_s: float = 10.0) -> list[dict]:
        """List the name, num_items, min_depth, max_depth and num_bytes of each trie."""
        return _payload(await self._ask_verb("item_tries", timeout_s))

    async def load_adapter(self, name: str, path: str, timeout_s: float = 300.0) -> None:
        """Load the adapter in a folder of the worker's machine and name it; requests may name it once this returns.
        Raises RequestRefused for an invalid name, and for an adapter that cannot be served."""
        try:
            check_adapter_name(name)
        except AdapterError as error:
            raise RequestRefused(str(error), param="lora_name") from None
        await self._change_adapters(
            lambda call_id: LoadAdapter(call_id=call_id, name=name, path=path), "load_adapter", timeout_s, "lora_path"
        )

    async def unload_adapter(self, name: str, timeout_s: float = 10.0) -> None:
        """Take a name from its adapter; open requests keep it. Raises RequestRefused (404) if there is none of this
        name."""
        await self._change_adapters(
            lambda call_id: UnloadAdapter(call_id=call_id, name=name), "unload_adapter", timeout_s, "lora_name"
        )

    async def _change_adapters(
        self, question: Callable[[int], ToWorker], what: str, timeout_s: float, param: str
    ) -> None:
        """Ask for a change of the adapters, and record it even if the caller leaves or times out before the answer:
        otherwise the names here would differ from the worker's."""
        change = asyncio.ensure_future(self._note_change(question, what, param))
        self._changes.add(change)
        change.add_done_callback(self._forget_change)
        try:
            await asyncio.wait_for(asyncio.shield(change), timeout_s)
        except TimeoutError:
            raise RequestRefused(
                f"{what}: no answer of the worker within {timeout_s:g} s; it may still come", code="timeout"
            ) from None

    def _forget_change(self, change: asyncio.Future[None]) -> None:
        self._changes.discard(change)
        if not change.cancelled():
            change.exception()  # the caller may have left

    async def _note_change(self, question: Callable[[int], ToWorker], what: str, param: str) -> None:
        reply = await self._ask(question, what, None)
        if not reply.ok:
            if param == "lora_path":
                raise RequestRefused(_reason(reply), code="invalid_adapter", param=param)
            raise RequestRefused(_reason(reply), code="adapter_not_found", param=param)
        self.adapters.set_adapters(_payload(reply))

    # -- calls of the manager --------------------------------------------------------------------------------------

    def take_reply(self, reply: ControlReply) -> None:
        """Hand a reply to its waiting call; drop it if the call has timed out."""
        future = self._waiting.get(reply.call_id)
        if future is not None and not future.done():
            future.set_result(reply)

    def fail_all(self, error: RequestRefused) -> None:
        """Raise ``error`` in every waiting call."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()

    # -- calls and replies -----------------------------------------------------------------------------------------

    async def _ask_verb(self, verb: str, timeout_s: float) -> ControlReply:
        return await self._ask(lambda call_id: ControlRequest(call_id=call_id, verb=verb), verb, timeout_s)

    async def _ask(
        self,
        question: Callable[[int], ToWorker],
        what: str,
        timeout_s: float | None,
    ) -> ControlReply:
        """Send a message, made from its call id, and wait for the reply. timeout_s: None for as long as it takes.
        Raises RequestRefused for a name that no message can hold."""
        self._availability.require_ready()
        call_id, self._next_call_id = self._next_call_id, self._next_call_id + 1
        try:
            frame = self._sender.packed(question(call_id))
        except UnicodeEncodeError as error:
            raise RequestRefused(f"{what}: a name is not valid Unicode: {error}") from None
        future = self._waiting[call_id] = asyncio.get_running_loop().create_future()
        self._sender.send_packed(frame)
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            assert timeout_s is not None
            raise RequestRefused(f"the worker did not answer {what} within {timeout_s:g} s", code="timeout") from None
        finally:
            self._waiting.pop(call_id, None)


def _stripped_job(client: Client, job: dict) -> dict:
    """A job as its client named it, its requests, and its pins."""
    return {
        **job,
        "job_id": client.stripped(job["job_id"]),
        "parent_job_id": None if (parent := job["parent_job_id"]) is None else client.stripped(parent),
        "open_requests": [client.stripped(rid) for rid in job["open_requests"]],
        "pins": [{**pin, "rid": client.stripped(pin["rid"])} for pin in job["pins"]],
    }


def _stripped_lease(client: Client, lease: dict) -> dict:
    names = {name: None if lease[name] is None else client.stripped(lease[name]) for name in ("rid", "job_id")}
    return lease | names


def _payload(reply: ControlReply) -> Any:
    return msgspec.json.decode(reply.payload)


def _reason(reply: ControlReply) -> str:
    return str(_payload(reply))
