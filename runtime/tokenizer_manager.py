"""The HTTP side's only way to the model: tokenises, refuses what cannot work, owns the open calls.

Life of a call:  open (tokenise, check, register, send) → fed by `run` as outputs arrive → read by its caller → closed.
A rid stays registered until its end arrives from the worker, also when its caller has gone: so a rid is never given to
two requests at once, and what still arrives for the first is not taken for the second.

Lives on one asyncio loop, in the HTTP process or in the Engine's loop thread. Knows no HTTP and no torch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from ..scheduler.constraints.item_trie import ItemTrie, ItemTrieError
from ..scheduler.refusal import RequestRefused
from ..scheduler.request_spec import ContinuationSpec, LogprobOptions, RequestSpec
from ..scheduler.token_buffer import pack_ids
from .answer import Call
from .channels import AsyncReceiver, Endpoints, Sender
from .constraints.item_tries import check_name, pack_trie
from .messages import (
    AbortRequest,
    ControlReply,
    ControlRequest,
    DeleteItemTrie,
    LoadItemTrie,
    ReleaseRequest,
    RequestError,
    TextOutput,
    TextOutputs,
    ToManager,
    WorkerReady,
    WorkerStats,
)
from .metrics import ServerMetrics
from .prompt import ModelLimits, Prompt, check_continuation, check_prompt
from .text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_TOKENIZE_INLINE_CHARS = 20_000
"""Longer texts are tokenised in a thread, so that the loop goes on serving the others (the tokenizer drops the GIL)."""


@dataclass(slots=True)
class _OpenRequest:
    """A rid the worker knows. call: None once its caller has gone; first: position of its sample 0 in the call."""

    call: Call | None
    prompt: Prompt
    first: int
    stream: bool
    unfinished: int
    aborted: bool = False
    last_token_at: dict[int, float] = field(default_factory=dict)
    """Sample -> when its last token came; streamed requests only."""


@dataclass(slots=True, frozen=True)
class _TokenizedPrompt:
    """ids: the whole prompt; None for a continuation that brings no prompt of its own. suffix_ids: of a continuation
    only."""

    ids: list[int] | None
    suffix_ids: list[int] | None


class TokenizerManager:
    """One per server. `run` must be running for anything to be answered."""

    def __init__(self, *, tokenizer: Tokenizer, endpoints: Endpoints, metrics: ServerMetrics) -> None:
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.worker_info: dict = {}
        """What the worker said of itself when it became ready."""
        self._receiver: AsyncReceiver[ToManager] = AsyncReceiver(endpoints.to_manager, ToManager)
        self._sender = Sender(endpoints.to_worker)
        self._open: dict[str, _OpenRequest] = {}
        self._tokenizing: dict[str, asyncio.Future[None]] = {}
        """Rids on their way to `_open`; done when they are there, or refused."""
        self._controls: dict[int, asyncio.Future[ControlReply]] = {}
        self._next_call_id = 0
        self._ready = asyncio.Event()
        self._limits: ModelLimits | None = None
        self._heard_at = self._output_at = time.monotonic()
        self._closed_because: RequestRefused | None = None
        self._emptied = asyncio.Event()
        self._emptied.set()

    # -- what callers use ------------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Requests the worker has not ended yet."""
        return len(self._open)

    @property
    def seconds_since_heartbeat(self) -> float:
        return time.monotonic() - self._heard_at

    @property
    def last_output_at(self) -> float:
        """When the last output of any request arrived, on the clock of time.monotonic()."""
        return self._output_at

    @property
    def is_ready(self) -> bool:
        """The worker has said that it can serve, and calls are not refused altogether."""
        return self._ready.is_set() and self._closed_because is None

    async def wait_ready(self) -> None:
        """Until the worker has said that it can serve."""
        await self._ready.wait()

    async def open(self, prompts: list[Prompt], *, stream: bool) -> Call:
        """Start a call. All its prompts are checked before the first is sent. Raises RequestRefused.

        A continuation never overtakes a parent whose call was opened before it, however long that one's text is.
        """
        started = time.monotonic()
        parents = {prompt.continuation.parent_rid for prompt in prompts if prompt.continuation is not None}
        on_their_way = [self._tokenizing[rid] for rid in parents & self._tokenizing.keys()]
        registered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        mine = [prompt.rid for prompt in prompts if self._tokenizing.setdefault(prompt.rid, registered) is registered]
        try:
            tokenized = await self._tokenize(prompts)
            if on_their_way:
                await asyncio.wait(on_their_way)
            return self._register(prompts, tokenized, stream, started)
        except RequestRefused as error:
            self.metrics.call_refused(error.status)
            raise
        finally:
            registered.set_result(None)
            for rid in mine:
                self._tokenizing.pop(rid, None)

    def abort(self, rid: str | None) -> list[str]:
        """End the request ``rid``, every prompt of the call ``rid``, or everything (None); the rids that were open.

        Their callers get what was generated, with finish reason ``abort``.
        """
        if rid is None:
            found = list(self._open)
        else:
            found = [name for name, request in self._open.items() if rid in (name, request.prompt.group)]
        for name in found:
            self._send_abort(name)
        return found

    async def release(self, rid: str, timeout_s: float = 10.0) -> bool:
        """Give up what the finished request ``rid`` keeps leased. False if it keeps nothing (any more)."""
        reply = await self._ask(lambda call_id: ReleaseRequest(call_id=call_id, rid=rid), "release", timeout_s)
        return msgspec.json.decode(reply.payload)

    async def tokenize(self, texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text. Raises RequestRefused for text that no UTF-8 can say (lone surrogates)."""
        tokenizer = self.tokenizer
        return await self._encode(
            texts,
            lambda text: tokenizer.encode(text, add_special_tokens),
            lambda texts: tokenizer.encode_batch(texts, add_special_tokens),
            param="text",
        )

    async def flush_cache(self, timeout_s: float = 30.0) -> None:
        """Forget all cached prefixes. Raises RequestRefused (409) while requests are open."""
        reply = await self._control("flush_cache", timeout_s)
        if not reply.ok:
            raise RequestRefused(_reason(reply), status=409, code="busy")

    async def info(self, timeout_s: float = 10.0) -> dict:
        """What the worker says of itself now."""
        reply = await self._control("info", timeout_s)
        if not reply.ok:
            raise RequestRefused(_reason(reply), status=500, code="worker_error")
        return msgspec.json.decode(reply.payload)

    async def start_profile(self, timeout_s: float = 10.0) -> None:
        """Record where the time of steps goes. Raises RequestRefused (409) if that is being done already."""
        reply = await self._control("start_profile", timeout_s)
        if not reply.ok:
            raise RequestRefused(_reason(reply), status=409, code="profiling")

    async def stop_profile(self, timeout_s: float = 60.0) -> dict:
        """What was recorded since `start_profile`; see step_profile.describe. Raises RequestRefused (409) if nothing
        was begun."""
        reply = await self._control("stop_profile", timeout_s)
        if not reply.ok:
            raise RequestRefused(_reason(reply), status=409, code="not_profiling")
        return msgspec.json.decode(reply.payload)

    async def load_item_trie(self, name: str, trie: ItemTrie, timeout_s: float = 30.0) -> None:
        """Put a trie under a name; requests sent from now on get it. Raises RequestRefused for a name or tokens that
        cannot be."""
        try:
            check_name(name)
        except ItemTrieError as error:
            raise RequestRefused(str(error), param="name") from None
        reply = await self._ask(lambda call_id: pack_trie(call_id, name, trie), "load_item_trie", timeout_s)
        if not reply.ok:
            raise RequestRefused(_reason(reply), code="invalid_item_trie")

    async def delete_item_trie(self, name: str, timeout_s: float = 10.0) -> bool:
        """Requests that have the trie keep it. False if there is none of this name."""
        reply = await self._ask(lambda call_id: DeleteItemTrie(call_id=call_id, name=name), "delete", timeout_s)
        return msgspec.json.decode(reply.payload)

    async def list_item_tries(self, timeout_s: float = 10.0) -> list[dict]:
        """name, num_items, min_depth, max_depth and num_bytes of each."""
        return msgspec.json.decode((await self._control("item_tries", timeout_s)).payload)

    # -- how a server ends -----------------------------------------------------------------------------------------

    def refuse_new(self, error: RequestRefused) -> None:
        """From now on every new call is refused with ``error``; the open ones go on."""
        self._closed_because = error

    async def wait_empty(self) -> None:
        """Until no request is open."""
        await self._emptied.wait()

    def fail_all(self, error: RequestRefused) -> None:
        """Every open call ends with ``error`` now, and so does every later one: the worker is gone, or about to go."""
        self.refuse_new(error)
        for request in list(self._open.values()):
            if request.call is not None:
                request.call.fail(error)
        self._open.clear()
        self._emptied.set()
        for future in self._controls.values():
            if not future.done():
                future.set_exception(error)
        self._controls.clear()

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()

    # -- towards the worker ----------------------------------------------------------------------------------------

    async def _tokenize(self, prompts: list[Prompt]) -> list[_TokenizedPrompt]:
        texts = iter(await self.tokenize([prompt.text for prompt in prompts if prompt.text is not None]))
        suffixes = [prompt.continuation.suffix_text for prompt in prompts if prompt.continuation is not None]
        suffixes = [text for text in suffixes if text is not None]
        encode, encode_batch = self.tokenizer.encode_continuation, self.tokenizer.encode_continuation_batch
        suffix_texts = iter(await self._encode(suffixes, encode, encode_batch, param="continuation_suffix"))
        tokenized = []
        for prompt in prompts:
            ids = next(texts) if prompt.text is not None else prompt.input_ids
            suffix_ids = None
            if (came := prompt.continuation) is not None:
                suffix_ids = next(suffix_texts) if came.suffix_text is not None else came.suffix_ids or []
            tokenized.append(_TokenizedPrompt(ids, suffix_ids))
        return tokenized

    async def _encode(
        self,
        texts: list[str],
        encode: Callable[[str], list[int]],
        encode_batch: Callable[[list[str]], list[list[int]]],
        *,
        param: str,
    ) -> list[list[int]]:
        """One by one, or beside the loop where they are long. Raises RequestRefused, blaming ``param``, for what is not
        Unicode."""
        try:
            if sum(map(len, texts)) > _TOKENIZE_INLINE_CHARS:
                return await asyncio.to_thread(encode_batch, texts)
            return [encode(text) for text in texts]
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestRefused(f"the text is not valid Unicode: {error}", param=param) from None

    def _register(self, prompts: list[Prompt], tokenized: list[_TokenizedPrompt], stream: bool, started: float) -> Call:
        # No await in here: between the checks and the registration nothing else may run.
        if self._closed_because is not None:
            raise self._closed_because
        if self._limits is None:
            raise RequestRefused("the model is still loading; try again soon", status=503, code="not_ready")
        rids = set()
        for prompt, tokens in zip(prompts, tokenized, strict=True):
            _check(prompt, tokens, self._limits)
            if prompt.rid in self._open:
                raise RequestRefused(
                    f"a request with rid {prompt.rid!r} is still open; use another rid or wait for its end",
                    status=409,
                    code="duplicate_rid",
                    param="rid",
                )
            if prompt.rid in rids:
                raise RequestRefused(f"rid {prompt.rid!r} is given twice; each prompt needs its own", param="rid")
            rids.add(prompt.rid)
        call = Call(prompts, started, self._abandon)
        first = 0
        for prompt, tokens in zip(prompts, tokenized, strict=True):
            n = prompt.sampling.n
            # A search knows its results when it ends: there is nothing to stream before.
            streams = stream and prompt.sampling.beam_width is None
            self._open[prompt.rid] = _OpenRequest(call, prompt, first, streams, unfinished=n)
            first += n
            self.metrics.num_requests.inc()
            if prompt.continuation is None:
                self.metrics.prompt_tokens.inc(len(tokens.ids or ()))
            self._sender.send(_message(prompt, tokens, streams))
        self._emptied.clear()
        return call

    def _abandon(self, call: Call) -> None:
        """The call's reader has gone: abort what is unfinished, and expect its end without it."""
        given_up = False
        for prompt in call.prompts:
            request = self._open.get(prompt.rid)
            if request is not None and request.call is call:
                request.call = None
                self._send_abort(prompt.rid)
                given_up = True
        if given_up:
            self.metrics.num_aborted_requests.inc()

    def _send_abort(self, rid: str) -> None:
        request = self._open[rid]
        if not request.aborted:
            request.aborted = True
            self._sender.send(AbortRequest(rid=rid))

    async def _control(self, verb: str, timeout_s: float) -> ControlReply:
        return await self._ask(lambda call_id: ControlRequest(call_id=call_id, verb=verb), verb, timeout_s)

    async def _ask(
        self,
        question: Callable[[int], ControlRequest | ReleaseRequest | LoadItemTrie | DeleteItemTrie],
        what: str,
        timeout_s: float,
    ) -> ControlReply:
        """Send a question, made from its call id, and wait for the reply."""
        if self._closed_because is not None:
            raise self._closed_because
        if self._limits is None:
            raise RequestRefused("the model is still loading; try again soon", status=503, code="not_ready")
        call_id, self._next_call_id = self._next_call_id, self._next_call_id + 1
        future = self._controls[call_id] = asyncio.get_running_loop().create_future()
        self._sender.send(question(call_id))
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise RequestRefused(
                f"the worker did not answer {what} within {timeout_s:g} s", status=504, code="timeout"
            ) from None
        finally:
            self._controls.pop(call_id, None)

    # -- from the worker -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Feed the open calls for as long as the server lives."""
        while True:
            for message in await self._receiver.receive():
                self._take(message)

    def _take(self, message: ToManager) -> None:
        self._heard_at = time.monotonic()
        match message:
            case TextOutputs():
                self._output_at = self._heard_at
                for item in message.items:
                    self._take_output(item)
            case RequestError():
                self._take_error(message)
            case WorkerStats():
                self.metrics.worker_reported(message)
            case ControlReply():
                future = self._controls.get(message.call_id)
                if future is not None and not future.done():
                    future.set_result(message)
            case WorkerReady():
                self.worker_info = msgspec.json.decode(message.info)
                self._limits = ModelLimits(
                    context_length=self.worker_info["context_length"], vocab_size=self.worker_info["vocab_size"]
                )
                self._ready.set()

    def _take_output(self, update: TextOutput) -> None:
        output = update.output
        request = self._open.get(output.rid)
        if request is None:
            # Only possible after `fail_all`; the callers have their answer.
            return
        now = self._heard_at
        self._count(request, update, now)
        if output.beam is not None and output.index == 0:
            first, found = request.first, output.beam.num_results
            missing = range(first + found, first + request.prompt.sampling.n)
            request.unfinished -= len(missing)
            if request.call is not None:
                request.call.leave_empty(missing)
        if request.call is not None:
            request.call.feed(request.first + output.index, update, now)
        if output.finish is not None:
            request.unfinished -= 1
            if request.unfinished == 0:
                self._forget(output.rid)

    def _count(self, request: _OpenRequest, update: TextOutput, now: float) -> None:
        output, metrics = update.output, self.metrics
        num_new = len(output.new_ids) // 4
        metrics.generation_tokens.inc(num_new)
        started = request.call.started if request.call is not None else None
        if request.stream and num_new:
            last = request.last_token_at.get(output.index)
            if last is not None:
                gap = (now - last) / num_new
                for _ in range(num_new):
                    metrics.inter_token_latency.observe(gap)
            elif started is not None:
                metrics.time_to_first_token.observe(now - started)
            request.last_token_at[output.index] = now
        if output.finish is None:
            return
        metrics.output_finished(output.finish.type)
        # The results of a search are one request's.
        if output.index == 0 or request.prompt.sampling.beam_width is None:
            metrics.cached_tokens.inc(output.cached_tokens)
            if request.prompt.continuation is not None and output.index == 0:
                metrics.prompt_tokens.inc(output.prompt_tokens)  # nobody here knew the parent's length before
            if started is not None:
                metrics.e2e_request_latency.observe(now - started)

    def _take_error(self, error: RequestError) -> None:
        request = self._open.get(error.rid)
        if request is None:
            return
        self._forget(error.rid)
        self.metrics.call_refused(error.status)
        if request.call is not None:
            # The worker knows ids only; the caller is told the field they came from.
            param = request.prompt.source if error.param == "input_ids" else error.param
            request.call.fail(RequestRefused(error.message, status=error.status, code=error.code, param=param))

    def _forget(self, rid: str) -> None:
        del self._open[rid]
        if not self._open:
            self._emptied.set()


def _check(prompt: Prompt, tokens: _TokenizedPrompt, limits: ModelLimits) -> None:
    """Refuse what the model cannot serve. Raises RequestRefused."""
    if tokens.suffix_ids is None:
        check_prompt(prompt, tokens.ids or [], limits)
    else:
        check_continuation(prompt, tokens.suffix_ids, limits)


def _message(prompt: Prompt, tokens: _TokenizedPrompt, stream: bool) -> RequestSpec:
    continuation = None
    if (asked := prompt.continuation) is not None:
        continuation = ContinuationSpec(
            parent_rid=asked.parent_rid,
            index=asked.index,
            at=asked.at,
            keep_parent=asked.keep_parent,
            suffix_text=asked.suffix_text,
            fallback_ids=None if tokens.ids is None else pack_ids(tokens.ids),
        )
    return RequestSpec(
        rid=prompt.rid,
        input_ids=pack_ids((tokens.suffix_ids if continuation is not None else tokens.ids) or []),
        sampling=prompt.sampling,
        stream=stream,
        namespace=prompt.namespace,
        logprobs=LogprobOptions(prompt.logprob_start_len, prompt.top_logprobs_num) if prompt.return_logprob else None,
        continuation=continuation,
        retain_ttl=prompt.retain_ttl,
        retain_n=prompt.retain_n,
    )


def _reason(reply: ControlReply) -> str:
    payload = msgspec.json.decode(reply.payload)
    return payload if isinstance(payload, str) else str(payload)
