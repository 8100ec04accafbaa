"""A worker without a model: it speaks the messages of the real one, and fails in every way a worker can on request.

Sample i of a request repeats its prompt, or its answer in "says", shifted by i; no continuation finds its parent. A
beam search finds as many sequences as its prompt has different tokens: its samples, the likeliest first. Of item tries
there is "pairs", whose items have two tokens, and "empty". More is said in BATON_FAKE_WORKER, a JSON object:
    paused        launch no step, as on request (false)
    step_s        seconds per step (0)           start_error   message of a start-up error (ModelLoadError)
    crash_after   raise after so many steps      exit_after    exit with status 0 after so many steps
    hang_after    neither answer nor report after so many steps; start_hang: never become ready
    context_length (4096)                        refuse        rids refused by the scheduler with a 400
    says           [[needle, answer], ...]: the answer to a prompt that holds the needle, of several the last one
The checkout must be on PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import dataclass, field

import msgspec
import numpy as np

from baton.runtime.channels import Endpoints, Receiver, Sender, Waker
from baton.runtime.checkpoint.model_files import ModelLoadError
from baton.runtime.launcher.child_process import WorkerProcess, run_child
from baton.runtime.messages import (
    AbortRequest,
    BeamOutput,
    ControlReply,
    ControlRequest,
    DetokenizeParams,
    LogprobChunk,
    ReleaseRequest,
    RequestError,
    TokenOutput,
    TokenOutputs,
    ToWorker,
    WorkerReady,
)
from baton.runtime.stop_signal import StopSignal
from baton.scheduler.outcome import FinishReason, FoundTokens
from baton.scheduler.request_spec import ContinuationSpec, RequestSpec
from baton.scheduler.stats import SchedulerStats
from baton.scheduler.token_buffer import pack_ids, unpack_ids
from tests.doubles.byte_tokenizer import EOS_ID, VOCAB_SIZE


@dataclass
class Sample:
    request: RequestSpec
    index: int
    prompt: list[int]
    params: DetokenizeParams | None
    script: list[int]
    """What it says, over and over."""
    output: list[int] = field(default_factory=list)
    unsent: list[int] = field(default_factory=list)
    sent_input: bool = False

    def step(self) -> FinishReason | None:
        if self.request.sampling.max_new_tokens == 0:
            return FinishReason("length")
        token = self.script[(len(self.output) + self.index) % len(self.script)]
        self.output.append(token)
        self.unsent.append(token)
        sampling = self.request.sampling
        if token in sampling.stop_token_ids or (token == EOS_ID and not sampling.ignore_eos):
            return FinishReason("stop", matched=token)
        text = bytes(t for t in self.output if t < 256).decode(errors="ignore")
        for stop in sampling.stop:
            if stop in text:
                return FinishReason("stop", matched=stop)
        if sampling.item_trie is not None and len(self.output) == 2:
            return FinishReason("stop", matched="item")
        if len(self.output) == sampling.max_new_tokens:
            return FinishReason("length")
        return None

    def advance(self) -> tuple[bool, list[TokenOutput]]:
        """One step: (is it over, what is to be sent)."""
        finish = self.step()
        return finish is not None, [self.flush(finish)] if finish is not None or self.request.stream else []

    def abort(self) -> list[TokenOutput]:
        return [self.flush(FinishReason("abort", message="aborted by request"))]

    def flush(self, finish: FinishReason | None) -> TokenOutput:
        output = TokenOutput(
            rid=self.request.rid,
            index=self.index,
            new_ids=pack_ids(self.unsent),
            prompt_tokens=len(self.prompt),
            found=FoundTokens(len(self.prompt) - 1),
            completion_tokens=len(self.output),
            finish=finish,
            params=self.params,
            prompt_ids=pack_ids(self.prompt) if self.params is not None and self.request.returns_prompt else b"",
            input_logprobs=self.input_logprobs(),
            output_logprobs=self.logprobs(self.unsent) if self.request.logprobs is not None else None,
        )
        self.params, self.unsent, self.sent_input = None, [], True
        return output

    def logprobs(self, ids: list[int], of_prompt: bool = False, first_is_none: bool = False) -> LogprobChunk:
        """Token t has logprob -t / 1000; its alternatives are t, t + 1, ... with the same rule. A token of
        the prompt has rank t + 1."""
        options = self.request.logprobs
        k = 0 if options is None else options.input_top_k if of_prompt else options.top_k
        tops = [[(t + j) % VOCAB_SIZE for j in range(k)] for t in ids]
        values = np.array(ids, dtype="<f4") / -1000
        top_values = np.array(tops, dtype="<f4").reshape(-1) / -1000
        if first_is_none:
            values[0] = np.nan
            top_values[:k] = np.nan
        return LogprobChunk(
            ids=pack_ids(ids),
            values=values.tobytes(),
            top_ids=pack_ids([i for row in tops for i in row]),
            top_values=top_values.tobytes(),
            ranks=pack_ids([t + 1 for t in ids]) if of_prompt and options is not None and options.ranks_prompt else b"",
        )

    def input_logprobs(self) -> LogprobChunk | None:
        options = self.request.logprobs
        start = options.start_len if options is not None else -1
        if start < 0 or self.sent_input:
            return None
        return self.logprobs(self.prompt[start:], of_prompt=True, first_is_none=start == 0)


class Search:
    """A beam search, as the sum of its samples."""

    def __init__(self, request: RequestSpec, prompt: list[int], params: DetokenizeParams) -> None:
        self.request = request
        found = 0 if request.sampling.item_trie == "empty" else len(set(prompt))
        self.samples = [Sample(request, index, prompt, params, prompt) for index in range(request.sampling.n)]
        self.found = min(request.sampling.n, found)
        self.ends: dict[int, FinishReason] = {}

    def advance(self) -> tuple[bool, list[TokenOutput]]:
        if self.found == 0:
            return True, self.abort("no item is left")
        for sample in self.samples[: self.found]:
            if sample.index not in self.ends and (finish := sample.step()) is not None:
                self.ends[sample.index] = finish
        return len(self.ends) == self.found, self.results() if len(self.ends) == self.found else []

    def abort(self, message: str = "aborted by request") -> list[TokenOutput]:
        """All n of them, without what they had so far."""
        for sample in self.samples:
            sample.output, sample.unsent = [], []
        return [sample.flush(FinishReason("abort", message=message)) for sample in self.samples]

    def results(self) -> list[TokenOutput]:
        n = self.request.sampling.n
        shortfall = f"{self.found} of {n} sequences" if self.found < n else None
        ranked = sorted(self.samples[: self.found], key=self.score, reverse=True)
        return [
            msgspec.structs.replace(
                sample.flush(self.ends[sample.index]),
                index=rank,
                beam=BeamOutput(
                    sequence_score=self.score(sample),
                    cumulative_logprob=sum(sample.output) / -1000,
                    num_results=self.found,
                    shortfall=shortfall,
                ),
            )
            for rank, sample in enumerate(ranked)
        ]

    def score(self, sample: Sample) -> float:
        return sum(sample.output) / -1000 / len(sample.output) ** self.request.sampling.length_penalty


def run_fake_worker(endpoints: Endpoints, stop: StopSignal, behaviour: dict) -> None:
    inbox: Receiver[ToWorker] = Receiver(endpoints.to_worker, ToWorker)
    outbox = Sender(endpoints.to_detokenizer)
    waker = Waker(endpoints.to_worker)
    stop.on_set(waker.wake)
    try:
        serve(inbox, outbox, stop, behaviour)
    finally:
        for part in (waker, inbox, outbox):
            part.close()


def serve(inbox: Receiver, outbox: Sender, stop: threading.Event, behaviour: dict) -> None:
    if "start_error" in behaviour:
        raise ModelLoadError(behaviour["start_error"])
    while behaviour.get("start_hang") and not stop.is_set():
        time.sleep(0.05)
    info = {"max_total_tokens": 4096, "context_length": behaviour.get("context_length", 4096), "vocab_size": VOCAB_SIZE}
    info["max_running_requests"] = 8
    outbox.send(WorkerReady(info=msgspec.json.encode(info)))
    samples: dict[tuple[str, int], Sample | Search] = {}
    steps, heartbeat = 0, 0.0
    while not stop.is_set():
        if time.monotonic() >= heartbeat:
            heartbeat = time.monotonic() + 0.5
            running = len(samples)
            outbox.send(SchedulerStats(num_running_reqs=running, total_tokens=100, free_tokens=60, evictable_tokens=15))
        paused = behaviour.get("paused", False)
        for message in inbox.poll(0.0 if samples and not paused else 0.5):
            handle(message, samples, outbox, behaviour, info)
        if not samples or behaviour.get("paused"):
            continue
        time.sleep(behaviour.get("step_s", 0))
        steps += 1
        if steps == behaviour.get("crash_after"):
            raise RuntimeError("the fake device caught fire")
        if steps == behaviour.get("exit_after"):
            return
        while steps == behaviour.get("hang_after") and not stop.is_set():
            time.sleep(0.05)
        items = []
        for key, sample in list(samples.items()):
            is_over, outputs = sample.advance()
            items += outputs
            if is_over:
                del samples[key]
        if items:
            outbox.send(TokenOutputs(items=items))


def handle(message: ToWorker, samples: dict, outbox: Sender, behaviour: dict, info: dict) -> None:
    match message:
        case RequestSpec(rid=rid) if rid in behaviour.get("refuse", []):
            outbox.send(RequestError(rid=rid, message="it can never fit", code="kv_pool_exceeded", param="text"))
        case RequestSpec(continuation=ContinuationSpec(parent_rid=parent)):
            reason = f"continuation_of {parent!r}: no such request"
            outbox.send(RequestError(rid=message.rid, message=reason, code="parent_not_found", param="continuation_of"))
        case RequestSpec(sampling=sampling) if sampling.item_trie not in (None, "pairs", "empty"):
            reason, param = f"item_trie {sampling.item_trie!r} is not loaded", "sampling_params.item_trie"
            outbox.send(RequestError(rid=message.rid, message=reason, code="item_trie_not_found", param=param))
        case RequestSpec(sampling=sampling):
            prompt = unpack_ids(message.input_ids).tolist()
            params = DetokenizeParams(
                skip_special_tokens=sampling.skip_special_tokens,
                stop=sampling.stop,
                no_stop_trim=sampling.no_stop_trim,
                stream=message.stream,
            )
            if sampling.beam_width is not None:
                samples[message.rid, 0] = Search(message, prompt, params)
                return
            script = scripted(prompt, behaviour.get("says", []))
            for index in range(sampling.n):
                samples[message.rid, index] = Sample(message, index, prompt, params, script or prompt)
        case AbortRequest(rid=rid):
            ended = [key for key in samples if rid in (None, key[0])]
            items = [output for key in ended for output in samples.pop(key).abort()]
            if items:
                outbox.send(TokenOutputs(items=items))
        case ReleaseRequest():
            outbox.send(ControlReply(call_id=message.call_id, payload=b"false"))
        case ControlRequest(verb="flush_cache"):
            payload = "requests are running" if samples else None
            outbox.send(ControlReply(call_id=message.call_id, ok=not samples, payload=msgspec.json.encode(payload)))
        case ControlRequest(verb="pause" | "resume"):
            behaviour["paused"] = message.verb == "pause"
            outbox.send(ControlReply(call_id=message.call_id))
        case ControlRequest():
            stats = {"num_running_reqs": len(samples), "num_queue_reqs": 2}
            stats |= {"total_tokens": 100, "free_tokens": 60, "evictable_tokens": 15}
            stats |= {"prefix_cache_queries": 40, "prefix_cache_hits": 10}
            outbox.send(ControlReply(call_id=message.call_id, payload=msgspec.json.encode(info | {"stats": stats})))


def scripted(prompt: list[int], says: list[list[str]]) -> list[int]:
    """The tokens of the answer to this prompt, with an end; none for no answer."""
    text = bytes(token for token in prompt if token < EOS_ID)
    found = [(text.rfind(needle.encode()), answer) for needle, answer in says if needle.encode() in text]
    return [*max(found)[1].encode(), EOS_ID] if found else []


if __name__ == "__main__":
    settings = json.loads(os.environ.get("BATON_FAKE_WORKER", "{}"))
    sys.exit(run_child("worker", WorkerProcess, lambda child, stop: run_fake_worker(child.endpoints, stop, settings)))
