"""The HTTP side's only way to the model: tokenises, refuses what cannot work, owns the open requests.

Life of a call:  open (tokenise, check, register, send) → fed by `run` as outputs arrive → read by its caller → closed.
A rid stays registered until its end arrives from the worker, even if its caller has gone. So two open requests never
share a rid, and late outputs of one are not taken for the other's.

Runs on one asyncio loop, in the HTTP process or in the Engine's loop thread. Knows no HTTP and no torch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from dataclasses import dataclass

import msgspec
import numpy as np

from ..scheduler.outcome import RequestRefused
from ..scheduler.request_spec import RequestSpec
from ..scheduler.stats import SchedulerStats
from ..scheduler.token_buffer import pack_ids, unpack_ids
from .answer import Answer
from .channels import AsyncReceiver, Endpoints, Sender
from .clients import Client
from .control_client import Availability, ControlClient
from .live_reports.report_client import LiveReportClient
from .load_log import LoadLog
from .messages import (
    AbortRequest,
    ControlReply,
    PrepareTurn,
    RequestError,
    StartPhase,
    TextOutput,
    TextOutputs,
    ToManager,
    TreeRows,
    WatchReport,
    WorkerReady,
)
from .metrics import RequestMeter, ServerMetrics
from .prompt import ModelLimits, Prompt, check_continuation, check_prompt
from .recording.recorder import RequestRecorder
from .request_log import RequestLog
from .step_reader import ReadCalls, StepReader
from .text.bad_words import banned_sequences
from .text.prompt_tokenizer import PromptTokenizer, TokenizedPrompt, tokens_to_read
from .text.tokenizer import Tokenizer

_IDS_OF_A_TURN = 50_000
_IDS_OF_A_WORD = 200
"""Ids that take as long to pack as a bad word takes to tokenise, with and without a space."""


@dataclass(slots=True)
class _OpenRequest:
    """A rid the worker knows. answer: None once its caller has gone. prompt: with qualified names. first: its sample
    0's position in the answer."""

    answer: Answer | None
    client: Client
    prompt: Prompt
    first: int
    unfinished: int
    meter: RequestMeter
    aborted: bool = False


class TokenizerManager:
    """One per server. Nothing is answered unless `run` is running.

    control: control calls to the worker. live_reports: reports on its requests and its cache. worker_info: the worker's
    description of itself, sent when it became ready.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        endpoints: Endpoints,
        metrics: ServerMetrics,
        read_calls: ReadCalls | None = None,
        recorder: RequestRecorder | None = None,
        load_log: LoadLog | None = None,
        request_log: RequestLog | None = None,
    ) -> None:
        """read_calls: finds the tool calls in a text, for jobs. recorder: records the requests; closed with the
        manager. load_log: gets the worker's reports. request_log: logs the requests."""
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.worker_info: dict = {}
        self._receiver: AsyncReceiver[ToManager] = AsyncReceiver(endpoints.to_manager, ToManager)
        self._sender = Sender(endpoints.to_worker)
        self._availability = Availability()
        self.control = ControlClient(self._sender, self._availability)
        self.live_reports = LiveReportClient(self._sender, self._availability)
        self._prompt_tokenizer = PromptTokenizer(tokenizer)
        self._step_reader = StepReader(self._sender, read_calls)
        self._recorder = recorder
        self._load_log = load_log
        self._request_log = request_log
        self._open: dict[str, _OpenRequest] = {}
        """By qualified rid, as in all messages from the worker."""
        self._start_phase = "loading libraries"
        self._heard_at = self._output_at = time.monotonic()
        self._emptied = asyncio.Event()
        self._emptied.set()

    # -- calls of the APIs -----------------------------------------------------------------------------------------

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
        """The worker has said that it can serve, and new calls are not being refused."""
        return self._availability.is_ready

    @property
    def start_phase(self) -> str:
        """What the worker does while it cannot serve yet; "" once it can."""
        return self._start_phase

    @property
    def limits(self) -> ModelLimits:
        """Limits of the served model. Raises RequestRefused before the worker is ready and after the server has
        ended."""
        return self._availability.require_ready()

    async def wait_ready(self) -> None:
        """Wait until the worker has said that it can serve."""
        await self._availability.wait_ready()

    async def open_answer(self, client: Client, prompts: list[Prompt], *, stream: bool) -> Answer:
        """Send a client's prompts and return their answer. All are checked before the first is sent. Raises
        RequestRefused.

        A continuation never overtakes a parent that was opened before it, however long the parent's text is.
        """
        started = time.monotonic()
        limits = self._availability.require_ready()
        async with self._prompt_tokenizer.tokenized(prompts, limits.context_length) as tokenized:
            specs = await _checked_specs(prompts, tokenized, limits, stream, self.tokenizer)
            return self._register(client, prompts, specs, started)

    def prepare_turn(self, client: Client, rid: str, index: int, ids: np.ndarray) -> None:
        """The prompt that follows the client's finished request will begin with ``ids``, int32 [n]; the worker may
        compute them in idle time."""
        if self._availability.is_ready:
            self._sender.send(PrepareTurn(rid=client.qualified(rid), index=index, ids=pack_ids(ids)))

    def abort_requests(self, client: Client, rid: str | None) -> list[str]:
        """End the client's request ``rid``, every prompt of its call ``rid``, or all its requests (None). Returns the
        open rids.

        Their callers get what was generated, with finish reason ``abort``.
        """
        if rid is None:
            found = [name for name in self._open if client.owns(name)]
        else:
            asked = client.qualified(rid)
            found = [name for name, request in self._open.items() if asked in (name, request.prompt.group)]
        for name in found:
            self._send_abort(name)
        return [client.stripped(name) for name in found]

    def abort_all(self) -> list[str]:
        """End the requests of every client. Returns their rids, qualified."""
        found = list(self._open)
        for name in found:
            self._send_abort(name)
        return found

    async def tokenize(
        self,
        texts: list[str],
        *,
        add_special_tokens: bool = True,
        goes_on: bool = False,
        is_truncated: bool = False,
        param: str = "prompt",
    ) -> list[list[int]]:
        """Token ids of each text. goes_on: they continue other texts. Raises RequestRefused for text that UTF-8 cannot
        encode (lone surrogates), and for a text that is longer than the context, unless it is truncated afterwards."""
        most = tokens_to_read(self._availability.require_ready().context_length, is_truncated=is_truncated)
        return await self._prompt_tokenizer.encode(
            texts, most, add_special_tokens=add_special_tokens, goes_on=goes_on, param=param
        )

    # -- how a server ends -----------------------------------------------------------------------------------------

    def refuse_new(self, error: RequestRefused) -> None:
        """Refuse every new call with ``error`` from now on; the open ones continue."""
        self._start_phase = ""
        self._availability.close(error)

    async def wait_empty(self) -> None:
        """Wait until no request is open."""
        await self._emptied.wait()

    def fail_all(self, error: RequestRefused) -> None:
        """End every open call with ``error``, and refuse every later one: the worker is gone, or about to go."""
        self.refuse_new(error)
        for request in list(self._open.values()):
            if request.answer is not None:
                request.answer.fail(error)
        self._open.clear()
        self._emptied.set()
        self.control.fail_all(error)
        self.live_reports.fail_all(error)

    def close(self) -> None:
        self._prompt_tokenizer.close()
        self._receiver.close()
        self._sender.close()
        if self._recorder is not None:
            self._recorder.close()

    # -- towards the worker ----------------------------------------------------------------------------------------

    def _register(self, client: Client, prompts: list[Prompt], specs: list[RequestSpec], started: float) -> Answer:
        # No await in here: between the checks and the registration nothing else may run.
        self._availability.require_ready()
        specs = list(map(client.qualified_spec, specs))
        rids = set()
        for prompt, spec in zip(prompts, specs, strict=True):
            if spec.rid in self._open:
                raise RequestRefused(
                    f"a request with rid {prompt.rid!r} is still open; use another rid or wait for its end",
                    code="duplicate_rid",
                    param="rid",
                )
            if spec.rid in rids:
                raise RequestRefused(f"rid {prompt.rid!r} is given twice; each prompt needs its own", param="rid")
            rids.add(spec.rid)
        if self._recorder is not None:
            specs = list(map(self._recorder.ask_for_prompt, specs))
        try:
            frames = list(
                map(self._sender.packed, specs)
            )  # all of them first: what cannot be packed leaves nothing open
        except UnicodeEncodeError as error:  # from the Engine; JSON has been checked for it
            raise RequestRefused(f"a field is not valid Unicode: {error}") from None
        qualified = [_qualified(client, prompt) for prompt in prompts]
        answer = Answer(prompts, started, lambda gone: self._abandon(gone, qualified), self.tokenizer.token_text)
        first = 0
        for prompt, spec, frame in zip(qualified, specs, frames, strict=True):
            n = prompt.sampling.n
            meter = RequestMeter(self.metrics, prompt, started=started, streams=spec.stream)
            self._open[spec.rid] = _OpenRequest(answer, client, prompt, first, unfinished=n, meter=meter)
            first += n
            self.metrics.num_requests.inc()
            if prompt.continuation is None:
                self.metrics.prompt_tokens.inc(len(unpack_ids(spec.input_ids)))
            if self._recorder is not None:
                self._recorder.open_request(prompt, spec)
            if self._request_log is not None:
                self._request_log.open_request(prompt, spec)
            self._sender.send_packed(frame)
        self._emptied.clear()
        return answer

    def _abandon(self, answer: Answer, prompts: list[Prompt]) -> None:
        """The answer's reader has gone: abort its unfinished requests, which stay registered until they end. prompts:
        the answer's, with qualified names."""
        given_up = False
        for prompt in prompts:
            request = self._open.get(prompt.rid)
            if request is not None and request.answer is answer:
                request.answer = None
                request.meter.caller_left()
                self._send_abort(prompt.rid)
                given_up = True
        if given_up:
            self.metrics.num_aborted_requests.inc()

    def _send_abort(self, rid: str) -> None:
        request = self._open[rid]
        if not request.aborted:
            request.aborted = True
            self._sender.send(AbortRequest(rid=rid))

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
            case SchedulerStats():
                self.metrics.worker_reported(message)
                if self._load_log is not None:
                    self._load_log.add_report(message, self._heard_at)
            case ControlReply():
                self.control.take_reply(message)
            case WatchReport() | TreeRows():
                self.live_reports.take_message(message)
            case StartPhase():
                self._start_phase = message.phase
            case WorkerReady():
                self._start_phase = ""
                self.live_reports.worker_started()
                self.worker_info = msgspec.json.decode(message.info)
                self.control.adapters.set_adapters(self.worker_info.get("adapters", []))
                context, vocab = self.worker_info["context_length"], self.worker_info["vocab_size"]
                generates = self.worker_info.get("pooling", {}).get("head", "language") == "language"
                limits = ModelLimits(
                    context_length=context,
                    vocab_size=vocab,
                    generates=generates,
                    keeps_states=self.worker_info.get("scheduler", {}).get("max_states", 0) > 0,
                )
                self._availability.mark_ready(limits)

    def _take_output(self, update: TextOutput) -> None:
        output = update.output
        request = self._open.get(output.rid)
        if request is None:
            # Only possible after `fail_all`; the callers have their answer.
            return
        now = self._heard_at
        request.meter.count_output(output, now)
        self._step_reader.add_output(request.prompt, update)
        if self._recorder is not None:
            self._recorder.record_output(output)
        if self._request_log is not None:
            self._request_log.record_output(update)
        if output.beam is not None and output.index == 0:
            first, found = request.first, output.beam.num_results
            missing = range(first + found, first + request.prompt.sampling.n)
            request.unfinished -= len(missing)
            if request.answer is not None:
                request.answer.leave_empty(missing)
        if request.answer is not None:
            request.answer.feed(request.first + output.index, _stripped(update, request.client), now)
        if output.finish is not None:
            request.unfinished -= 1
            if request.unfinished == 0:
                if self._recorder is not None:
                    self._recorder.end_request(output.rid)
                if self._request_log is not None:
                    self._request_log.end_request(output.rid)
                self._forget(output.rid)

    def _take_error(self, error: RequestError) -> None:
        request = self._open.get(error.rid)
        if request is None:
            return
        if self._request_log is not None:
            self._request_log.fail_request(error)
        self._forget(error.rid)
        if request.answer is not None:
            # The worker knows only ids; tell the caller the field they came from.
            param = request.prompt.source if error.param == "input_ids" else error.param
            message = request.client.stripped_text(error.message, request.prompt.spec)
            request.answer.fail(RequestRefused(message, code=error.code, param=param, overflow=error.overflow))

    def _forget(self, rid: str) -> None:
        del self._open[rid]
        self._step_reader.forget_request(rid)
        if self._recorder is not None:
            self._recorder.forget_request(rid)
        if not self._open:
            self._emptied.set()


def _stripped(update: TextOutput, client: Client) -> TextOutput:
    """An update with the names in its cache report as the client gave them."""
    report = update.output.cache_report
    if report is None or not client.name:
        return update
    missed = tuple(
        msgspec.structs.replace(span, by=client.stripped(span.by)) if span.by is not None else span
        for span in report.missed
    )
    output = msgspec.structs.replace(update.output, cache_report=msgspec.structs.replace(report, missed=missed))
    return msgspec.structs.replace(update, output=output)


def _qualified(client: Client, prompt: Prompt) -> Prompt:
    """The prompt with qualified names. A probe of the server's own belongs to no call, and its group stays empty."""
    group = client.qualified(prompt.group) if prompt.group else ""
    return dataclasses.replace(prompt, spec=client.qualified_spec(prompt.spec), group=group) if client.name else prompt


async def _checked_specs(
    prompts: list[Prompt], tokenized: list[TokenizedPrompt], limits: ModelLimits, stream: bool, tokenizer: Tokenizer
) -> list[RequestSpec]:
    """The specs to send to the worker, one per prompt. Checking and packing ten thousand ids takes a millisecond, so
    the loop yields in between. Raises RequestRefused for what the model cannot serve."""
    specs, ids_since_turn = [], 0
    banned: dict[int, tuple[tuple[int, ...], ...]] = {}  # by the identity of sampling parameters that prompts share
    for prompt, tokens in zip(prompts, tokenized, strict=True):
        if tokens.suffix_ids is None:
            check_prompt(prompt, tokens.ids or [], limits)
        else:
            check_continuation(prompt, tokens.suffix_ids, limits)
        # A search knows its results only when it ends: there is nothing to stream before that.
        specs.append(_spec(prompt, tokens, stream and prompt.sampling.beam_width is None))
        if (sampling := prompt.sampling).bad_words:
            if id(sampling) not in banned:
                banned[id(sampling)] = banned_sequences(tokenizer, sampling, limits.vocab_size)
                ids_since_turn += _IDS_OF_A_WORD * len(sampling.bad_words)
            specs[-1] = msgspec.structs.replace(specs[-1], banned=banned[id(sampling)])
        ids_since_turn += len(tokens.ids or ()) + len(tokens.suffix_ids or ())
        if ids_since_turn >= _IDS_OF_A_TURN:
            ids_since_turn = 0
            await asyncio.sleep(0)
    return specs


def _spec(prompt: Prompt, tokens: TokenizedPrompt, stream: bool) -> RequestSpec:
    """The prompt's spec, completed with its tokens."""
    spec, own_ids = prompt.spec, tokens.ids
    continuation = spec.continuation
    if continuation is not None:
        own_ids = tokens.suffix_ids
        if tokens.ids is not None:
            continuation = msgspec.structs.replace(continuation, fallback_ids=pack_ids(tokens.ids))
    return msgspec.structs.replace(spec, input_ids=pack_ids(own_ids or []), stream=stream, continuation=continuation)
