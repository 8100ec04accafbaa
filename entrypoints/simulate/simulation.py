"""Plays jobs on a scheduler by a virtual clock: the turns of the real loop (`runtime/event_loop.py`), without a model.

    jobs arrive, tools return ──▶ add ──▶ next_batch ──▶ a step, which lasts as long as the cost model says ──▶ …
         ▲                                                   │ process_result
         └────────────── a tool runs ◀── a turn's end ◀──────┘

As in the loop without overlap, events during a step are handled when the step has ended.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from ...runtime.pool_sizes import PoolSizes
from ...scheduler.batch import ScheduleBatch, StepResult
from ...scheduler.config import SchedulerConfig
from ...scheduler.jobs.calls import ToolCall
from ...scheduler.outcome import MissReason, RequestRefused
from ...scheduler.policies.policy import PolicyTools, SchedulePolicy
from ...scheduler.policies.registry import make_policy
from ...scheduler.request import Request, RequestEvent
from ...scheduler.request_spec import Predecessor, RequestSpec
from ...scheduler.sampling_params import SamplingParams
from ...scheduler.token_buffer import pack_ids
from .arms import VARIANTS, AwayTimes, Sender
from .burst import RowAhead, burst_ends
from .copies import CopyLanes
from .cost_model import StepCost, StepSize
from .job_records import JobRecord, TurnRecord
from .simulated_engine import build_engine
from .work.job import Conversation, Job

CHATS: tuple[Sender, ...] = ("chat", "plain")
UNNAMED: tuple[Sender, ...] = ("plain", "bare")
"""Senders that name neither their job nor its last step."""

WAITING_BURST = 4
"""The most tokens of a burst while requests wait: as decoding proceeds, the scheduler reserves less for it, and may
admit the next request."""


GENERATION_PROMPT = 4
"""Last tokens of a chat's prompt, by which its template begins the answer. A server has the state before them kept."""


class SimulationStuck(RuntimeError):
    """Requests wait, and no event can change that: a bug in the scheduler, or in its use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Everything that a simulation depends on, besides its jobs."""

    config: SchedulerConfig
    """The sizes that ``pools`` has are replaced by those."""
    pools: PoolSizes
    cost: StepCost
    variant: str = ""
    """A name in `arms.VARIANTS`, in place of the policy of ``config``; "" for none."""
    pin_s: float = 0.0
    """Seconds for which the KV of a turn is leased, if another follows (``retain_ttl``); 0 for not at all."""
    sender: Sender = "generate"
    conversation_ttl_s: float = 60.0
    """Seconds for which the KV of a chat's turn is leased (``--conversation-ttl``). Last turns are leased, too: only
    clients that name the job's last step tell the server that no other turn follows."""
    max_new_tokens: int = 512
    burst: int = 1
    """The most tokens that a row gets in one step of the simulation."""
    check_every: int = 0
    """Steps from one check of all invariants to the next; 0: never."""


@dataclass(slots=True)
class _Playing:
    """A job that has begun and not ended."""

    record: JobRecord
    talk: Conversation
    turn: int = 0
    last_rid: str = ""
    said: list[int] = field(default_factory=list)
    """The model's output in this turn."""

    @property
    def is_last_turn(self) -> bool:
        return self.turn == len(self.record.job.turns) - 1

    @property
    def away_s(self) -> float:
        """Seconds from the end of this turn to the next one; infinite after the last turn."""
        return float("inf") if self.is_last_turn else self.record.job.turns[self.turn].tool_s


class _Launched(NamedTuple):
    batch: ScheduleBatch
    ends: list[float]
    """Time at which each token of a row is there; the last one is the end of the step."""


class Simulation:
    def __init__(self, jobs: Sequence[Job], conditions: Conditions) -> None:
        self._conditions = conditions
        self.pools = conditions.pools
        self._cost = conditions.cost
        make = partial(_make_policy, conditions.variant, jobs)
        self.engine = build_engine(conditions.config, self.pools, self._plan_burst, make)
        # A burst leaves no state where a page ends in its midst.
        self._burst = 1 if self.pools.states and self.pools.page_size > 1 else conditions.burst
        self.scheduler = self.engine.scheduler
        self.now = 0.0
        self.busy_s = 0.0
        self.steps = 0
        """Steps launched."""
        self.records = [JobRecord(job) for job in jobs]
        self._events: list[tuple[float, int, _Playing]] = []
        """A heap of turns to be sent: (time, number, job)."""
        self._numbered = 0
        for record in self.records:
            self._send_at(record.job.arrival, _Playing(record, Conversation(record.job)))
        self._active: dict[int, _Playing] = {}
        """Jobs with a request under way, by its serial."""
        self._copies = CopyLanes(self._cost)
        self._launched: _Launched | None = None
        self._burst_ends: list[float] = []
        self._more_prompts = False
        """True if the last step computed prompts, and the next one may, too."""
        self._sampling = SamplingParams(max_new_tokens=conditions.max_new_tokens, temperature=0.0)

    @property
    def jobs_left(self) -> int:
        """Jobs that have not ended, under way or to come."""
        return len(self._active) + len(self._events)

    def run(self) -> list[JobRecord]:
        while self.step():
            pass
        return self.records

    # -- a turn of the loop -------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One turn; False when all jobs have ended. Raises SimulationStuck."""
        self._end_copies()
        if self._launched is not None:
            self._commit(self._launched)
        while self._events and self._events[0][0] <= self.now:
            sent, _, playing = heapq.heappop(self._events)
            self._send(playing, sent)
        batch = self.scheduler.next_batch(self.now)
        self._copies.order_copies(self.scheduler.take_transfer_orders(self.now), self.now)
        self._launched = self._launch(batch) if batch is not None else None
        every = self._conditions.check_every
        if every and self.steps % every == 0:
            self.scheduler.check_invariants()
        if self._launched is not None:
            self.now = self._launched.ends[-1]
            return True
        return self._sleep()

    def _sleep(self) -> bool:
        """Nothing can be computed: advance the clock to the next event. False if there is none."""
        ends = [self._events[0][0] if self._events else None, self._copies.next_end()]
        if self.jobs_left:  # once all jobs have ended, leases need not expire
            ends.append(self.scheduler.next_lease_deadline)
        due = [end for end in ends if end is not None]
        if not due and self._active:
            raise SimulationStuck(self._describe())
        if due:
            self.now = max(self.now, min(due))
        return bool(due)

    def _describe(self) -> str:
        live = self.scheduler.live_requests
        return (
            f"at {self.now:.3f} s {len(live)} requests wait, and no event can change that: {live[:8]}; "
            f"{self.scheduler.stats()}; leases: {self.scheduler.live_leases()[:8]}"
        )

    def _end_copies(self) -> None:
        for ended in self._copies.take_ended_copies(self.now):
            events = self.scheduler.finish_copy(ended.fence, True, self.now, ended.seconds)
            assert not events, "a copy that was made ends no request"

    # -- steps --------------------------------------------------------------------------------------------------------

    def _launch(self, batch: ScheduleBatch) -> _Launched:
        self.steps += 1
        if batch.is_extend:
            ends = [self.now + self._cost.step_s(size_of(batch, self._cost.window))]
            self._more_prompts = self.scheduler.num_waiting > 0 or not batch.samples.all()
        else:
            ends = self._burst_ends[: int(batch.extend_lens.max())]
            self._more_prompts = False
        if (waits := self._wait_for_loads(ends[0] - self.now)) > 0:
            ends = [end + waits for end in ends]
        self.busy_s += ends[-1] - self.now
        return _Launched(batch, ends)

    def _wait_for_loads(self, seconds: float) -> float:
        """Seconds by which the loads delay a step that would take so many ``seconds``: it begins when all states are
        there, and the last layer waits for its KV, which comes last."""
        delay = max(0.0, self._copies.states_end - self.now)
        if self._copies.loads_end > self.now:
            delay = max(delay, self._copies.loads_end + seconds / self._cost.layers - self.now - seconds)
        return delay

    def _plan_burst(self, requests: Sequence[Request]) -> list[int]:
        left = []
        for request in requests:
            playing = self._active[request.serial]
            tokens = len(playing.said) - request.num_output_tokens
            left.append(RowAhead(tokens, request.scheduled_len + 1, playing.away_s))
        waiting = self.scheduler.num_waiting > 0
        most = min(self._burst, WAITING_BURST) if waiting else self._burst
        most = 1 if self._more_prompts else most
        self._burst_ends = burst_ends(left, self._cost, self.now, self._horizon(waiting), most, waiting)
        longest = len(self._burst_ends)
        return [min(ahead.tokens, longest) for ahead in left]

    def _horizon(self, waiting: bool) -> float:
        """The first time at which the scheduler would do something other than decode."""
        ends = [self._events[0][0] if self._events else None]
        if waiting:
            ends += [self._copies.next_end(), self.scheduler.next_lease_deadline]
        return min((end for end in ends if end is not None), default=float("inf"))

    def _commit(self, launched: _Launched) -> None:
        batch, self._launched = launched.batch, None
        stops = (batch.output_positions + 1).tolist()
        counts = np.ones(len(batch), dtype=np.int32) if batch.is_extend else batch.extend_lens.copy()
        counts[~batch.samples] = 0
        tokens: list[int] = []
        for serial, stop, count in zip(batch.serials.tolist(), stops, counts.tolist()):
            if count:
                tokens += self._active[serial].said[stop - count : stop]
        self.engine.burst.settle_burst()
        result = StepResult(np.array(tokens, dtype=np.int32), counts)
        for event in self.scheduler.process_result(result, self.now):
            self._note(event, launched)

    def _note(self, event: RequestEvent, launched: _Launched) -> None:
        request = event.request
        playing = self._active[request.serial]
        turn = playing.record.turns[-1]
        if not turn.first_token and event.token_ids:
            turn.first_token = self.now  # a prompt's step brings one token
        if event.finish is None:
            return
        if event.finish.type != "stop":
            raise SimulationStuck(f"{request} ended with {event.finish}; {self._describe()}")
        del self._active[request.serial]
        turn.end = launched.ends[len(event.token_ids) - 1]
        turn.found, turn.from_host = request.found.total, request.found.below_device
        turn.output, turn.retractions = request.num_output_tokens, request.retractions
        turn.no_state, turn.no_window = _missed(request, "no_state"), _missed(request, "no_window")
        tool = playing.record.job.turns[playing.turn].tool
        if playing.is_last_turn and self._conditions.sender in UNNAMED:
            tool = ""  # the server reads its text like any other turn's
        if tool is not None and not request.spec.is_last_step:
            calls = (ToolCall(tool, tool),) if tool else ()
            self.scheduler.record_tool_calls(request.rid, 0, calls, self.now)
        if playing.is_last_turn:
            playing.record.end = turn.end
        else:
            self._send_at(turn.end + playing.away_s, playing)
            playing.turn += 1

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def _send_at(self, when: float, playing: _Playing) -> None:
        self._numbered += 1
        heapq.heappush(self._events, (when, self._numbered, playing))

    def _send(self, playing: _Playing, sent: float) -> None:
        """Send the next turn as the server gets it from a continued chat: the whole prompt, and its predecessor's rid.
        Plain chats name neither their job nor its end; the server names the job after its first turn
        (entrypoints/chat/chats.py). A bare prompt names nothing at all, so it is for the scheduler to recognise."""
        job, turn = playing.record.job, playing.record.job.turns[playing.turn]
        prompt, playing.said = playing.talk.begin_turn(playing.turn)
        rid = _rid(job, playing.turn)
        sender = self._conditions.sender
        pin_s = self._conditions.conversation_ttl_s if sender in CHATS else 0.0
        if not playing.is_last_turn:
            pin_s = max(pin_s, self._conditions.pin_s)
        state_points = ()
        if self.pools.states and sender in CHATS and turn.prompt > GENERATION_PROMPT:
            state_points = (turn.prompt - GENERATION_PROMPT,)
        job_ids: dict[Sender, str | None] = {"plain": f"chat-{_rid(job, 0)}", "bare": None}
        spec = RequestSpec(
            rid=rid,
            sampling=self._sampling,
            input_ids=pack_ids(prompt),
            predecessor=Predecessor(playing.last_rid) if sender != "bare" and playing.last_rid and turn.kept else None,
            retain_ttl=pin_s or None,
            job_id=job_ids.get(sender, job.name),
            is_last_step=playing.is_last_turn and sender not in UNNAMED,
            unasked=sender == "plain",
            default_lease=sender in CHATS and not self._conditions.pin_s,
            state_points=state_points,
        )
        playing.last_rid = rid
        playing.record.turns.append(TurnRecord(sent, turn.prompt, turn.kept))
        try:
            request = self.scheduler.add_request(spec, self.now)[0]
        except RequestRefused as refusal:
            playing.record.refused, playing.record.end = refusal.message, self.now
            return
        self._active[request.serial] = playing


def _make_policy(variant: str, jobs: Sequence[Job], name: str, tools: PolicyTools) -> SchedulePolicy:
    if not variant:
        return make_policy(name, tools)
    away: AwayTimes = {_rid(job, number): turn.tool_s for job in jobs for number, turn in enumerate(job.turns)}
    return VARIANTS[variant].make(tools, away)


def _rid(job: Job, turn: int) -> str:
    return f"{job.name}.{turn}"


def _missed(request: Request, reason: MissReason) -> int:
    """Prompt tokens that were not found, for this reason."""
    report = request.cache_report
    return sum(span.tokens for span in report.missed if span.reason == reason) if report is not None else 0


def size_of(batch: ScheduleBatch, window: int = 0) -> StepSize:
    """The size of a step with prompts. Rows with one new token count as decodes, which they are in a mixed step.
    window: tokens that layers with a window see; 0 for none."""
    new, before = batch.extend_lens.astype(np.int64), batch.prefix_lens.astype(np.int64)
    decodes = int((new == 1).sum())
    size = StepSize(
        int(new.sum()) - decodes, decodes, int((new + before).sum()), _pairs(new, before), len(batch) - decodes
    )
    if not window:
        return size
    whole = np.clip(window - before, 0, new)  # new tokens that see all tokens before them
    return size._replace(
        window_context=int(np.minimum(new + before, new + window - 1).sum()),
        window_attended=_pairs(whole, before) + int((new - whole).sum()) * window,
    )


def _pairs(new: np.ndarray, before: np.ndarray) -> int:
    """Pairs of a new token and a token up to it, int64 [bs] both."""
    return int((new * before + new * (new + 1) // 2).sum())
