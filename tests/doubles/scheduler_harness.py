"""Drives a whole scheduler on the KV-echo model, with invariants checked after every step."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest

from baton.memory_pool.allocator import Allocator
from baton.memory_pool.fences import Fences
from baton.memory_pool.req_to_token import ReqToTokenPool
from baton.memory_pool.state_slots import StateSlots
from baton.memory_pool.window_pages import WindowedAllocator, WindowPages, least_tokens
from baton.radix.cache import RadixCache
from baton.radix.kv_sequence import KVSequence
from baton.radix.node_states import NodeStates
from baton.radix.node_windows import NodeWindows
from baton.radix.tiers.host_tier import HostPolicy
from baton.scheduler.batch import ScheduleBatch, StepResult
from baton.scheduler.beam.rows import BeamRows
from baton.scheduler.beam.search import Hypothesis
from baton.scheduler.config import SchedulerConfig
from baton.scheduler.constraints.allowed_ids import AllowedIds
from baton.scheduler.constraints.constraint import Constraint
from baton.scheduler.constraints.item_trie import ItemConstraint, ItemTrie
from baton.scheduler.outcome import FinishReason, RequestRefused
from baton.scheduler.request import Request, RequestEvent
from baton.scheduler.request_spec import ContinuationSpec, PoolingSpec, Predecessor
from baton.scheduler.sampling_params import Grammar, SamplingParams
from baton.scheduler.scheduler import Scheduler
from baton.scheduler.token_buffer import pack_ids
from tests.doubles.kv_echo import KVEchoModel, Stage, StepFailed
from tests.doubles.specs import make_spec
from tests.doubles.tier_rig import FakeBlocks, FakeTiers

STEP_FAILURES = ("forward_failed", "kv_load_failed")
"""Codes of requests whose step or whose load failed."""

PAGES = pytest.mark.parametrize("page_size", [1, 16, 64])


class FailingAllocator(Allocator):
    """Refuses the allocations that ``should_fail`` picks (given the number of the call, from 0)."""

    def __init__(self, num_tokens: int, page_size: int) -> None:
        super().__init__(num_tokens, page_size, check=True)
        self.calls = 0
        self.should_fail: Callable[[int], bool] = lambda call: False

    def alloc_extend(self, old_lens, new_lens, last_slots):
        self.calls += 1
        if self.should_fail(self.calls - 1):
            return None
        return super().alloc_extend(old_lens, new_lens, last_slots)


class FailingWindowedAllocator(WindowedAllocator):
    """The same, with a window pool."""

    def __init__(self, windows: WindowPages, num_tokens: int) -> None:
        super().__init__(windows, num_tokens, check=True)
        self.calls = 0
        self.should_fail: Callable[[int], bool] = lambda call: False

    def alloc_extend(self, old_lens, new_lens, last_slots):
        self.calls += 1
        if self.should_fail(self.calls - 1):
            return None
        return super().alloc_extend(old_lens, new_lens, last_slots)


class FailingStateSlots(StateSlots):
    """Has no free slot at the calls that ``should_fail`` picks (given the number of the call, from 0)."""

    def __init__(self, num_states: int, fences: Fences) -> None:
        super().__init__(num_states, fences=fences, check=True)
        self.calls = 0
        self.should_fail: Callable[[int], bool] = lambda call: False

    def take(self) -> int | None:
        self.calls += 1
        return None if self.should_fail(self.calls - 1) else super().take()


@dataclass
class Outcome:
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    refusal: RequestRefused | None = None
    request: Request | None = None
    results: list[Hypothesis] = field(default_factory=list)
    """Results of a beam search."""


class Harness:
    """``depth``: steps in flight at most; 1 is the plain loop, 2 the overlapped one."""

    def __init__(
        self,
        *,
        num_tokens: int = 512,
        page_size: int = 1,
        rows: int = 8,
        leases: int = 8,
        leased_ratio: float = 0.5,
        max_finished_requests: int = 1024,
        max_finished_tokens: int = 4_000_000,
        context: int = 256,
        chunk: int = 64,
        policy: str = "fcfs",
        disable_radix_cache: bool = False,
        depth: int = 1,
        eos: tuple[int, ...] = (),
        check: bool = True,
        host_tokens: int = 0,
        host_policy: HostPolicy | None = None,
        block_tokens: int = 0,
        blocks: tuple[FakeBlocks, FakeBlocks] | None = None,
        tiers_rng: random.Random | None = None,
        states: int = 0,
        host_states: int = 0,
        window: int = 0,
        window_tokens: int = 0,
        **more: Any,
    ) -> None:
        """host_tokens: of a host tier; 0 for none. block_tokens: of a disk tier behind it, which has ``blocks``.
        tiers_rng: decides when what they order ends. states: recurrent states of the model; 0 for one without them.
        host_states: so many that the host tier keeps.
        window: tokens that its layers with a window see; 0 for none. window_tokens: slots of these; 0: the least.
        more: other fields of SchedulerConfig."""
        self.config = SchedulerConfig(
            context_length=context,
            max_total_tokens=num_tokens,
            max_states=states,
            max_running_requests=rows,
            max_leased_requests=leases,
            max_leased_ratio=leased_ratio,
            max_finished_requests=max_finished_requests,
            max_finished_tokens=max_finished_tokens,
            chunked_prefill_size=chunk,
            page_size=page_size,
            schedule_policy=policy,
            disable_radix_cache=disable_radix_cache,
            **more,
        )
        self.pool = ReqToTokenPool(rows + leases, context)
        self.windows: WindowPages | None = None
        if window:
            window_tokens = window_tokens or least_tokens(window, page_size, self.config.step_tokens)
            window_tokens = min(window_tokens, num_tokens) // page_size * page_size
            self.windows = WindowPages(window_tokens, num_tokens, page_size, window, check=True)
        if self.windows is not None:
            self.allocator = FailingWindowedAllocator(self.windows, num_tokens)
        else:
            self.allocator = FailingAllocator(num_tokens, page_size)
        self.slots = FailingStateSlots(states, self.allocator.fences) if states else None
        self.cache = RadixCache(
            self.pool,
            self.allocator,
            page_size=page_size,
            disabled=disable_radix_cache,
            states=None if self.slots is None else NodeStates(self.slots, page_size),
            windows=None if self.windows is None else NodeWindows(self.windows),
        )
        self.model = KVEchoModel(
            num_tokens + page_size,
            rows + leases,
            context,
            frozenset(eos),
            states,
            window,
            window_tokens + page_size,
            page_size,
        )
        self.tiers: FakeTiers | None = None
        if host_tokens:
            self.tiers = FakeTiers(
                self.cache,
                self.model,
                host_tokens=host_tokens,
                host_states=host_states,
                policy=host_policy,
                block_tokens=block_tokens,
                blocks=blocks,
                rng=tiers_rng,
            )
        host, stores = (self.tiers.host, self.tiers.stores) if self.tiers is not None else (None, [])
        self.scheduler = Scheduler(self.config, self.pool, self.allocator, self.cache, eos, host, stores)
        self.depth = depth
        self.eos = eos
        self.check = check
        self.check_every = 1
        """One in this many due checks is made."""
        self._checks_due = 0
        self.now = 0.0
        self.turn_s = 1.0
        """Seconds that a turn takes."""
        self.outcomes: dict[tuple[str, int], Outcome] = {}
        self.fault: Callable[[ScheduleBatch], Stage | None] = lambda batch: None
        """Where a step fails that is launched now."""
        self.failed: set[str] = set()
        """The rids that ended because of it."""
        self._results: deque[StepResult | StepFailed | ScheduleBatch] = deque()
        """Results of the steps in flight; the batch itself where a step waits for the tokens of the one before."""

    def add(
        self,
        rid: str,
        prompt: list[int],
        max_new_tokens: int | None = 8,
        *,
        namespace: str = "",
        adapter: str = "",
        retain_ttl: float | None = None,
        retain_n: int | None = None,
        continuation: ContinuationSpec | None = None,
        predecessor: Predecessor | None = None,
        trie: ItemTrie | None = None,
        grammar: Constraint | None = None,
        priority: int = 0,
        client: str = "",
        job_id: str | None = None,
        parent_job_id: str | None = None,
        is_last_step: bool = False,
        no_reuse_from: int | None = None,
        unasked: bool = False,
        default_lease: bool = False,
        pooling: PoolingSpec | None = None,
        state_points: tuple[int, ...] = (),
        **sampling,
    ) -> None:
        if trie is not None:
            sampling["item_trie"] = "items"
        if grammar is not None:
            sampling["grammar"] = Grammar("grammar", "the constraint's own")
        params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, **sampling)
        spec = make_spec(
            rid,
            prompt,
            params,
            namespace=namespace,
            continuation=continuation,
            predecessor=predecessor,
            retain_ttl=retain_ttl,
            retain_n=retain_n,
            priority=priority,
            client=client,
            job_id=job_id,
            parent_job_id=parent_job_id,
            is_last_step=is_last_step,
            no_reuse_from=no_reuse_from,
            unasked=unasked,
            default_lease=default_lease,
            pooling=pooling,
            state_points=state_points,
        )
        constraint = ItemConstraint(trie, "items") if trie is not None else grammar
        if params.allowed_token_ids:
            constraint = AllowedIds(params.allowed_token_ids)
        try:
            for request in self.scheduler.add_request(spec, self.now, constraint=constraint, adapter=adapter):
                self.outcomes[request.key] = Outcome(request=request)
        finally:
            self._take(self.scheduler.take_events())

    def continue_from(
        self,
        parent: str,
        rid: str,
        suffix: list[int],
        max_new_tokens: int = 8,
        *,
        index: int = 0,
        at: Literal["finish", "now"] = "finish",
        keep_parent: bool = False,
        fallback: list[int] | None = None,
        **more,
    ) -> None:
        ids = pack_ids(fallback) if fallback is not None else None
        spec = ContinuationSpec(parent, index, at, keep_parent, fallback_ids=ids)
        self.add(rid, suffix, max_new_tokens, continuation=spec, **more)

    def prepare(self, rid: str, ids: list[int], index: int = 0) -> None:
        """The next prompt of this request's job will begin with these tokens."""
        self.scheduler.prepare_turn(rid, index, np.array(ids, dtype=np.int32))

    def abort(self, rid: str) -> None:
        self._take(self.scheduler.abort_request(rid, self.now))
        self.verify()

    def take_ends(self, events: list[RequestEvent]) -> None:
        """Note the events of a call to the scheduler."""
        self._take(events)
        self.verify()

    def step(self) -> bool:
        """One turn of the loop; False if there was nothing to do. As in the event loop, no step is launched behind one
        whose launch failed."""
        self.now += self.turn_s
        ended = self._end_orders()
        batch = None
        newest = self._results[-1] if self._results else None
        if not isinstance(newest, StepFailed) or not newest.is_known_at_launch:
            batch = self.scheduler.next_batch(self.now)
            if self.windows is not None:
                self.model.windows.free_slots = self.windows.free_slots()
            self._take(self.scheduler.take_events())
        if self.tiers is not None:
            self.tiers.order(self.scheduler.take_transfer_orders(self.now))
        if batch is not None:
            self._results.append(batch if batch.lacks_masks else self._launch(batch))
        self.verify()
        if self._results and (batch is None or len(self._results) >= self.depth):
            oldest = self._results.popleft()
            assert not isinstance(oldest, ScheduleBatch)
            self._commit(oldest)
            self.verify()
            self._launch_waiting()
            return True
        return batch is not None or ended or bool(self.tiers)

    def _end_orders(self) -> bool:
        """Some of what the tiers have ordered ends; False if nothing does."""
        ended = self.tiers.take_ended() if self.tiers is not None else []
        for end in ended:
            if end.blocks is not None:
                self.scheduler.finish_block_order(end.fence, end.blocks, self.now)
                continue
            events = self.scheduler.finish_copy(end.fence, end.ok, self.now)
            self.failed |= {event.request.rid for event in events if _is_failed(event)}
            self._take(events)
        if ended:
            self.verify()
        return bool(ended)

    def _launch(self, batch: ScheduleBatch) -> StepResult | StepFailed:
        loaded = self.tiers is None or self.tiers.load_all()
        try:
            return self.model.forward(batch, self.fault(batch) if loaded else "copies")
        except StepFailed as failure:
            return failure

    def _launch_waiting(self) -> None:
        """Launch the newest step, if it waited for the tokens of the one before, which are known now. (A real one is
        launched in time, and only sampled late.)"""
        newest = self._results[-1] if self._results else None
        if isinstance(newest, ScheduleBatch):
            self.scheduler.add_masks(self.now)
            self._take(self.scheduler.take_events())
            self._results[-1] = self._launch(newest)
            self.verify()

    def _commit(self, result: StepResult | StepFailed) -> None:
        if isinstance(result, StepResult):
            self._take(self.scheduler.process_result(result, self.now))
            return
        events = self.scheduler.fail_step(self.now, str(result))
        self.failed |= {event.request.rid for event in events if _is_failed(event)}
        self._take(events)

    def run(self, max_steps: int = 20_000) -> None:
        """Until nothing is live. A scheduler that stops making progress is an error, unless the allocator lies."""
        for _ in range(max_steps):
            calls = self.calls
            if not self.step() and (self.scheduler.is_idle or self.calls == calls):
                break
        assert self.scheduler.is_idle, f"stuck with {self.scheduler.live_requests}"
        self.verify()

    @property
    def calls(self) -> int:
        """Allocations so far, of KV and of states: each may have been refused."""
        return self.allocator.calls + (0 if self.slots is None else self.slots.calls)

    def verify(self) -> None:
        self._checks_due += 1
        if not self.check or self._checks_due % self.check_every:
            return
        self.scheduler.check_invariants()
        if self.tiers is not None:
            self.tiers.check()
        for request in self.scheduler.live_requests:
            if request.beam_kv is not None:
                self._check_search(request)
            elif request.kv is not None:
                self._check_states(request.kv, request.committed_len, request.cut_len)
        for lease in self.scheduler._leases.live():
            if lease.kv is not None:
                self._check_states(lease.kv, lease.kv.length)

    def _check_search(self, search: Request) -> None:
        """Its rows are taken and its own, share the prompt, and are as many as may be."""
        kv, rows, group = search.held_beams, self.pool.rows, search.beams
        assert group is not None
        every = [*kv.rows.tolist(), *kv.spare]
        assert len(set(every)) == len(every) <= group.width and search.held_kv.row in every
        assert all(map(self.pool.is_taken, every))
        trunk = rows[search.held_kv.row, : kv.start]
        assert all(np.array_equal(rows[row, : kv.start], trunk) for row in kv.rows)
        assert len(kv.parents) == group.num_live and kv.length <= search.prompt_len + group.num_tokens
        # Behind the prompt: at most width × ceil((partial page + steps) / page) pages, twice that where a lease is due.
        page = self.config.page_size
        most = group.width * -(-(search.prompt_len % page + group.num_tokens) // page)
        held = len(BeamRows(self.pool, self.allocator).pages(kv))
        assert held <= max(1, most) * (2 if search.retain_ttl else 1), (held, most)

    def _check_states(self, kv: KVSequence, committed: int, cut_len: int | None = None) -> None:
        """A sequence names two states at most that no step in flight writes: its newest, and the newest that the tree
        can take; and those that it had when it was ``cut_len`` long."""
        lengths = [state.length for state in kv.states.held if state.length <= committed]
        if cut_len is not None:
            lengths = [n for n in lengths if n > cut_len] or lengths
        assert len(lengths) <= 2 and all(length % self.config.page_size == 0 for length in lengths[:-1]), lengths

    def _take(self, events: list[RequestEvent]) -> None:
        for event in events:
            outcome = self.outcomes[event.request.key]
            assert outcome.finish is None, f"{event.request} got an event after its end"
            outcome.tokens += event.token_ids
            outcome.finish, outcome.refusal = event.finish, event.refusal
            if event.finish is not None and event.request.beams is not None:
                outcome.results = event.request.beams.results


def _is_failed(event: RequestEvent) -> bool:
    """True if the request ended because its step or its load failed."""
    return event.refusal is not None and event.refusal.code in STEP_FAILURES
