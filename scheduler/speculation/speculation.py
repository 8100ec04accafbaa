"""Speculation without a draft model: some of the tokens that a decode step computes for a sequence are guesses.

    propose_drafts   before a step: guesses at what follows (drafts.py), as long as they pay (draft_length.py)
    verify           after it: the samples of the step that follow from tokens really sampled
    settle_draft     right guesses have been taken; the slots of the others go back

Verification is exact: at each place the sampler chooses the token it would have chosen anyway, with the noise of that
place, and a guess is right if it is that token. So greedy and seeded outputs are those of a server without speculation.
See docs/design/speculation.md.
"""

from __future__ import annotations

import numpy as np

from ...radix.cuts import truncate
from ..batch import ScheduleBatch
from ..batch_builder import PlannedStep
from ..config import SchedulerConfig
from ..memory.kv_memory import KVMemory
from ..outcome import NO_DRAFTS, DraftCounts
from ..request import Request, RequestFault
from ..stopping_criteria import StoppingCriteria
from .draft_length import KEPT_OF_ALL, WEIGHT_OF_ALL, WEIGHT_OF_GUESS, AcceptRate, StepCost, best_lengths
from .drafts import GUESSED_RATES, MIN_OUTPUT, Draft, Drafter, PastOutputs, SequenceDrafts, Source, find_forced

PROBE = 2
"""Tokens of a probe: a draft that does not seem to pay, made to measure the accept rate."""

FIRST_GAP, LONGEST_GAP = 8, 64
"""Steps from one probe to the next, of any sequence; doubled each time while no draft seems to pay."""

LOOK_UP_S, LOOK_UP_SHARE, LONGEST_PAUSE = 20e-6, 0.01, 64
"""Seconds of a look-up for one sequence, including its share of indexing a new one; the share of a step that look-ups
may take while no draft pays; and the most steps without look-ups."""

_NOTHING = np.empty(0, dtype=np.int32)


class Speculation:
    """Drafts for the running requests."""

    def __init__(self, config: SchedulerConfig, memory: KVMemory, stopping_criteria: StoppingCriteria) -> None:
        self._guesses = config.speculative_algorithm != "off"
        self._jumps = not config.disable_jump_forward
        self._longest = config.speculative_num_draft_tokens
        self._room = config.max_sampled_tokens
        self._memory = memory
        self._stopping_criteria = stopping_criteria
        self._drafter = Drafter(memory.cache.tree)
        self._cost = StepCost()
        self._rates = {source: AcceptRate(KEPT_OF_ALL) for source in Source}
        self._last_result = 0.0
        self._pause_left = 0
        """Steps left without look-ups."""
        self._until_probe, self._probe_gap = 0, FIRST_GAP
        """Steps until the next probe, and from that one to the one after."""
        self._sequences: dict[int, SequenceDrafts] = {}
        """Draft state by serial, from the first draft to the end of the request."""
        self.counts = NO_DRAFTS
        """Counts of all sequences since start."""

    def propose_drafts(self, requests: list[Request], num_beams: int) -> list[np.ndarray] | None:
        """Propose drafts for the next decode step: int32 [k] for each of these requests, k may be 0. Each request gets
        a token in that step. None if no request has a draft. num_beams: further rows of the step."""
        self._until_probe -= 1
        looks_up = self._guesses and not self._pause_left
        self._pause_left = max(0, self._pause_left - 1)
        rows = len(requests) + num_beams
        found = [
            (place, draft)
            for place, request in enumerate(requests)
            if (looks_up or (self._jumps and request.constraint is not None))
            and (draft := self._draft_of(request, looks_up)) is not None
        ]
        if not found:
            return None
        room = self._room - rows
        rates = [self._rate(requests[place], draft.source) for place, draft in found]
        lengths = best_lengths(rates, [len(draft.tokens) for _, draft in found], rows, room, self._cost)
        room -= sum(lengths)
        if any(lengths):
            self._probe_gap = FIRST_GAP
        elif looks_up:
            self._pause_left = self._pause(rows)
        drafts = [_NOTHING] * len(requests)
        for (place, draft), length in zip(found, lengths):
            if not length and self._until_probe <= 0 and room >= PROBE:
                length, self._until_probe = min(PROBE, len(draft.tokens)), self._probe_gap
                self._probe_gap = min(2 * self._probe_gap, LONGEST_GAP)
            self._sequences[requests[place].serial].source = draft.source
            drafts[place] = draft.tokens[:length]
        return drafts if any(map(len, drafts)) else None

    def settle_draft(self, batch: ScheduleBatch, row: int, request: Request, num_sampled: int, num_taken: int) -> None:
        """Settle the draft of one row after its step, and give back the KV of wrong guesses. The row sampled
        ``num_sampled`` tokens; the request took ``num_taken`` of them, fewer if one of them ended it."""
        drafted = int(batch.draft_lens[row]) if batch.draft_lens is not None else 0
        if not drafted:
            return
        request.num_drafted = 0
        request.num_output_placeholders -= drafted
        length = request.scheduled_len - drafted + num_taken - 1
        keep_first(self._memory, request, length)
        state, right = self._sequences[request.serial], num_sampled - 1
        state.rates[state.source].record_draft(right, drafted)
        self._rates[state.source].record_draft(right, drafted)
        counts = DraftCounts(1, drafted, min(right, num_taken))
        request.drafts += counts
        self.counts += counts

    def record_step(self, step: PlannedStep, now: float) -> None:
        """Record a step's duration. A step formed while the one before it ran began with that one's result."""
        began, self._last_result = max(step.formed, self._last_result), now
        if not step.num_prompts:
            self._cost.record_step(int(step.batch.extend_lens.sum()), now - began)

    def keep_output(self, request: Request) -> None:
        """Keep the output of an ended request for later drafts, and forget its own drafts."""
        self._sequences.pop(request.serial, None)
        if self._guesses and request.beams is None and request.num_output_tokens >= MIN_OUTPUT:
            self._drafter.past.add_output(request.namespace, request.token_ids, request.prompt_len)

    def discard_sequence(self, request: Request) -> None:
        """Forget the drafts of a request without keeping its output."""
        self._sequences.pop(request.serial, None)

    def forget_outputs(self) -> None:
        """Forget all past outputs."""
        self._drafter.past = PastOutputs()

    def _draft_of(self, request: Request, looks_up: bool) -> Draft | None:
        try:
            return self._draft(request, looks_up)
        except Exception as error:
            raise RequestFault(request) from error

    def _draft(self, request: Request, looks_up: bool) -> Draft | None:
        """The longest draft that the request may have. looks_up: not only of what its constraint forces."""
        state = self._sequences.get(request.serial)
        if state is None:
            if not can_draft(request):
                return None
            state = self._sequences[request.serial] = SequenceDrafts(self._stopping_criteria.end_ids(request))
        in_flight = request.num_output_placeholders
        known = len(request.token_ids) + in_flight
        if request.scheduled_len != known - 1 or in_flight > 1:
            return None  # it computes tokens that it knows
        room = request.max_new_tokens - (known - request.prompt_len) - 1
        if room <= 0:
            return None
        forced = find_forced(request, state.end_ids, in_flight, room) if self._jumps else None
        if forced is not None or not looks_up:
            return forced
        return self._drafter.find_draft(request, state, in_flight, min(self._longest, room))

    def _pause(self, rows: int) -> int:
        """Steps to skip look-ups after one in which no draft paid: 0 where a row takes milliseconds."""
        seconds_a_row = float(self._cost.estimate(np.array([rows]))[0]) / rows
        return min(LONGEST_PAUSE, int(LOOK_UP_S / (LOOK_UP_SHARE * seconds_a_row)))

    def _rate(self, request: Request, source: Source) -> float:
        of_all = self._rates[source].estimate(GUESSED_RATES[source], WEIGHT_OF_GUESS)
        return self._sequences[request.serial].rates[source].estimate(of_all, WEIGHT_OF_ALL)


def can_draft(request: Request) -> bool:
    """False for beam searches, and where the logits depend on earlier tokens in ways that no draft is followed in: with
    penalties and bans of several tokens."""
    if request.is_search or request.sampling.has_penalties:
        return False
    return all(len(banned) < 2 for banned in request.spec.banned)


def extend_with_drafts(
    memory: KVMemory, rows: np.ndarray, lengths: np.ndarray, draft_lens: np.ndarray
) -> np.ndarray | None:
    """Allocate one slot and those of a draft in each row (int32 [n], each once) after its first ``lengths``.

    lengths, draft_lens: int32 [n]. Returns int32 [sum(1 + draft_lens)] and has written the rows. None, and nothing
    allocated, unless free and evictable memory is enough. The caller updates the lengths of the sequences.
    """
    allocator, pool = memory.allocator, memory.req_to_token
    new_lens = lengths + np.int32(1) + draft_lens
    missing = allocator.tokens_needed(lengths, new_lens) - allocator.free_tokens
    if missing > memory.cache.evictable_tokens:
        return None
    if missing > 0:
        memory.cache.evict(missing)
    if memory.windows is not None:
        memory.windows.make_room(allocator.tokens_needed(lengths, new_lens))
    slots = allocator.alloc_extend(lengths, new_lens, pool.rows[rows, np.maximum(lengths - 1, 0)])
    if slots is not None:
        each = np.split(slots, np.cumsum(1 + draft_lens)[:-1])
        for row, length, own in zip(rows.tolist(), lengths.tolist(), each):
            pool.write(row, length, own)
    return slots


def keep_first(memory: KVMemory, request: Request, length: int) -> None:
    """Keep only the first ``length`` computed tokens of a request after a step, and free the slots of the others."""
    request.committed_len = request.scheduled_len = length
    truncate(memory.cache, request.held_kv, length)
