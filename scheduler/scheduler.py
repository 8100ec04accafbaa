"""The scheduler: which requests run in the next step, and what a finished step means for them.

    add ──▶ waiting ──PrefillScheduler──▶ DecodeScheduler.running ──process_result──▶ finished
                ▲───────────── retract (memory pressure) ───┘

Pure decision code: time comes in as an argument, tensors stay outside, and everything it decides is a function of the
calls made. One step may be in flight while the next is formed (overlapped scheduling): `next_batch` then works with
placeholders for tokens not known yet, and `process_result` is called one step late.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..memory_pool.allocator import Allocator
from ..memory_pool.req_to_token import ReqToTokenPool
from ..radix.cache import RadixCache
from .batch import RequestEvent, ScheduleBatch, StepResult, StopMatch
from .config import SchedulerConfig
from .decode import DecodeScheduler, OutOfMemory
from .kv_memory import KVMemory
from .policy import make_policy
from .prefill import DecodeReserve, PrefillScheduler
from .request import FinishReason, Request, RequestSpec, RequestStatus


class RequestRefused(Exception):
    """A request that cannot be served as it stands. ``status`` is the HTTP status, ``param`` the field to change."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request", param: str | None = None):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


@dataclass(slots=True, frozen=True)
class SchedulerStats:
    """A snapshot; token counts exclude the padding page, counters run since start."""

    num_running_reqs: int
    num_queue_reqs: int
    total_tokens: int
    free_tokens: int
    evictable_tokens: int
    protected_tokens: int
    private_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    evicted_tokens: int
    retractions: int
    steps: int


class Scheduler:
    """Owns the queues. ``eos_token_ids`` end a request unless it sets ignore_eos."""

    def __init__(
        self,
        config: SchedulerConfig,
        req_to_token: ReqToTokenPool,
        allocator: Allocator,
        cache: RadixCache,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._config = config
        self._eos_token_ids = frozenset(eos_token_ids)
        self._memory = KVMemory(req_to_token, allocator, cache)
        self._reserve = DecodeReserve()
        self._prefill = PrefillScheduler(
            self._memory, make_policy(config.schedule_policy, cache), self._reserve, config.chunked_prefill_size
        )
        self._decode = DecodeScheduler(self._memory)
        self._waiting: list[Request] = []
        self._live: dict[str, list[Request]] = {}
        self._in_flight: list[ScheduleBatch] = []
        self._seeds = np.random.default_rng(config.random_seed)
        self._num_requests = 0
        self._num_steps = 0
        self._last_was_extend = False
        self._retractions = 0
        self._queried_tokens = 0
        self._hit_tokens = 0

    # -- arrivals and ends ------------------------------------------------------------------------------------------

    def add(self, spec: RequestSpec, now: float) -> list[Request]:
        """Queue ``spec.sampling.n`` sequences. Raises RequestRefused for what can never be served."""
        if spec.rid in self._live:
            raise RequestRefused(
                f"rid {spec.rid!r} is still running; use another rid or abort it first",
                status=409,
                code="duplicate_rid",
                param="rid",
            )
        max_new_tokens = self._max_new_tokens(spec)
        seed = spec.sampling.seed
        if seed is None:
            seed = int(self._seeds.integers(2**62))
        requests = []
        for index in range(spec.sampling.n):
            request = Request(
                spec,
                index=index,
                seed=seed + index,
                max_new_tokens=max_new_tokens,
                arrival=now,
                sequence_number=self._num_requests,
            )
            self._num_requests += 1
            requests.append(request)
        self._live[spec.rid] = list(requests)
        self._waiting.extend(requests)
        return requests

    def _max_new_tokens(self, spec: RequestSpec) -> int:
        prompt_len, context, pool = len(spec.prompt_ids), self._config.context_length, self._memory.total_tokens
        if prompt_len == 0:
            raise RequestRefused("the prompt is empty; send at least one token", param="input_ids")
        if prompt_len >= context:
            raise RequestRefused(
                f"the prompt has {prompt_len} tokens, the context holds {context} with at least one new token; "
                "shorten it or raise --context-length",
                code="context_length_exceeded",
                param="input_ids",
            )
        wanted = spec.sampling.max_new_tokens
        if wanted is not None and prompt_len + wanted > context:
            raise RequestRefused(
                f"prompt ({prompt_len} tokens) + max_new_tokens ({wanted}) = {prompt_len + wanted} exceeds the context "
                f"of {context} tokens; ask for at most {context - prompt_len}",
                code="context_length_exceeded",
                param="max_new_tokens",
            )
        most = min(context - prompt_len, pool - prompt_len + 1)  # the last token's KV is never computed
        if most < 1 or (wanted is not None and wanted > most):
            raise RequestRefused(
                f"prompt ({prompt_len} tokens) + max_new_tokens ({wanted}) can never fit the KV pool of {pool} tokens; "
                "shorten the request or start the server with a larger --max-total-tokens",
                code="kv_pool_exceeded",
                param="max_new_tokens",
            )
        return most if wanted is None else wanted

    def abort(self, rid: str, message: str = "aborted by the client") -> list[RequestEvent]:
        """End every sequence of ``rid`` now. Unknown rids give no events."""
        reason = FinishReason(type="abort", message=message)
        return [self._end(request, reason) for request in list(self._live.get(rid, ()))]

    def abort_all(self, message: str) -> list[RequestEvent]:
        return [event for rid in list(self._live) for event in self.abort(rid, message)]

    def _end(self, request: Request, reason: FinishReason, row: int = -1, token_id: int = -1) -> RequestEvent:
        if request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
        else:
            self._leave(request)
        request.status = RequestStatus.FINISHED
        request.finish = reason
        siblings = self._live[request.rid]
        siblings.remove(request)
        if not siblings:
            del self._live[request.rid]
        return RequestEvent(request, row, token_id, reason)

    def _leave(self, request: Request) -> None:
        """Take a prefilling or running request out of its set and give back its KV."""
        if request is self._prefill.prefilling:
            self._prefill.prefilling = None
        else:
            self._decode.running.remove(request)
        self._memory.close(request, self._in_flight[-1].step_id if self._in_flight else None)

    # -- steps ------------------------------------------------------------------------------------------------------

    def next_batch(self) -> ScheduleBatch | None:
        """The next step, prompts before decodes. None: nothing to do, or nothing until the step in flight is
        processed."""
        batch = None
        if not self._decode_is_due():
            batch = self._prefill.next_batch(self._waiting, self._decode.running, self._num_steps)
        if batch is not None:
            self._count_admissions(batch)
        elif self._decode.running:
            batch = self._next_decode_batch()
        if batch is not None:
            self._num_steps += 1
            self._in_flight.append(batch)
            self._last_was_extend = batch.is_extend
        return batch

    def _decode_is_due(self) -> bool:
        """Between the chunks of a long prompt the running requests get a token, so that none stalls for long."""
        return self._last_was_extend and self._prefill.prefilling is not None and bool(self._decode.running)

    def _next_decode_batch(self) -> ScheduleBatch | None:
        previous = self._in_flight[-1] if self._in_flight else None
        while True:
            try:
                return self._decode.next_batch(self._num_steps, previous)
            except OutOfMemory:
                if self._in_flight:
                    return None  # retraction needs to know every token; the caller processes the step in flight first
                self._retract(self._prefill.prefilling or self._decode.pick_victim())

    def _retract(self, request: Request) -> None:
        self._leave(request)
        request.status = RequestStatus.WAITING
        request.retractions += 1
        self._retractions += 1
        self._reserve.retracted()
        position = sum(r.sequence_number < request.sequence_number for r in self._waiting)
        self._waiting.insert(position, request)

    def _count_admissions(self, batch: ScheduleBatch) -> None:
        for request, prefix_len in zip(batch.requests, batch.prefix_lens.tolist()):
            if request.queried:
                continue
            request.queried = True
            request.cached_tokens = prefix_len
            self._queried_tokens += request.prompt_len
            self._hit_tokens += prefix_len

    def process_result(self, result: StepResult) -> list[RequestEvent]:
        """Commit the oldest step in flight; returns what its requests' clients must hear of, in batch order."""
        batch = self._in_flight.pop(0)
        events: list[RequestEvent] = []
        for row, request in enumerate(batch.requests):
            if request.finish is not None:
                continue  # ended while this step was in flight: its token was never asked for
            self._commit(request, int(batch.prefix_lens[row] + batch.extend_lens[row]))
            if batch.samples[row]:
                token_id = int(result.next_ids[row])
                events.append(self._take_token(request, row, token_id, result.stop_matches.get(row)))
            if request.kv is not None and batch.is_extend:
                self._memory.publish(request)
        self._memory.allocator.release_quarantine(batch.step_id)
        if not batch.is_extend:
            self._reserve.decoded()
        return events

    def fail_step(self, message: str) -> list[RequestEvent]:
        """The oldest step in flight could not be computed: end its requests, siblings included, and keep the rest."""
        batch = self._in_flight.pop(0)
        rids = dict.fromkeys(request.rid for request in batch.requests)
        events = [event for rid in rids for event in self.abort(rid, message)]
        self._memory.allocator.release_quarantine(batch.step_id)
        return events

    def _commit(self, request: Request, length: int) -> None:
        request.committed_len = length
        if request.logprob_next < request.prompt_len:
            request.logprob_next = max(request.logprob_next, min(length + 1, request.prompt_len))

    def _take_token(self, request: Request, row: int, token_id: int, stop_match: StopMatch | None) -> RequestEvent:
        request.num_output_placeholders -= 1
        request.token_ids.append(token_id)
        reason = self._finish_reason(request, token_id, stop_match)
        if reason is None:
            return RequestEvent(request, row, token_id)
        return self._end(request, reason, row, token_id)

    def _finish_reason(self, request: Request, token_id: int, stop_match: StopMatch | None) -> FinishReason | None:
        sampling = request.sampling
        if request.num_output_tokens > sampling.min_new_tokens:
            is_eos = token_id in self._eos_token_ids and not sampling.ignore_eos
            if is_eos or token_id in sampling.stop_token_ids:
                return FinishReason(type="stop", matched=token_id)
            if stop_match is not None:
                return FinishReason(type="stop", matched=sampling.stop[stop_match.stop_index])
        if request.num_output_tokens >= request.max_new_tokens:
            return FinishReason(type="length")
        return None

    # -- state ------------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """True when no request is live and no step is in flight."""
        return not self._live and not self._in_flight

    @property
    def live_requests(self) -> list[Request]:
        return [request for siblings in self._live.values() for request in siblings]

    def flush_cache(self) -> bool:
        """Forget every cached prefix. False, and nothing happens, unless the scheduler is idle."""
        if not self.is_idle:
            return False
        self._memory.cache.reset()
        return True

    def stats(self) -> SchedulerStats:
        allocator, cache = self._memory.allocator, self._memory.cache
        free, evictable, protected = allocator.free_tokens, cache.evictable_tokens, cache.protected_tokens
        return SchedulerStats(
            num_running_reqs=len(self._decode.running) + (self._prefill.prefilling is not None),
            num_queue_reqs=len(self._waiting),
            total_tokens=allocator.total_tokens,
            free_tokens=free,
            evictable_tokens=evictable,
            protected_tokens=protected,
            private_tokens=allocator.total_tokens - free - evictable - protected - allocator.quarantined_tokens,
            prefix_cache_queries=self._queried_tokens,
            prefix_cache_hits=self._hit_tokens,
            evicted_tokens=cache.evicted_total,
            retractions=self._retractions,
            steps=self._num_steps,
        )
