"""The running set: each decode step computes one new token for every running request and every beam.

When memory runs out, the scheduler retracts the request that the policy picks. That request gives its KV back (the
committed part can still be found in the tree) and waits again with its known tokens; nothing the client has seen
changes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .batch import ForwardMode, ScheduleBatch
from .batch_builder import PlannedStep, TokenRows, add_searches, plan_step
from .memory.beam_memory import BeamMemory
from .memory.kv_memory import KVMemory
from .request import Request, RequestFault
from .speculation.speculation import Speculation, extend_with_drafts


class NoFreeSlots(Exception):
    """The running requests do not fit; some must be retracted before a decode step can be formed."""


class DecodeScheduler:
    """Forms decode batches and the decode rows of mixed steps. Owns ``running``: requests with a computed prompt, in
    order of admission."""

    def __init__(self, memory: KVMemory, beams: BeamMemory, speculation: Speculation | None = None) -> None:
        """speculation: drafts tokens; None turns speculation off."""
        self._memory = memory
        self._speculation = speculation
        self._beams = beams
        self.running: list[Request] = []

    def add_running(self, request: Request) -> None:
        """The prompt of the request is computed, or will be by the step that is being formed."""
        self.running.append(request)

    def remove_running(self, request: Request) -> None:
        """Remove a running request."""
        self.running.remove(request)

    def keep_running(self, keeps: Callable[[Request], bool]) -> None:
        """Remove all running requests but those for which ``keeps`` is true."""
        self.running = [request for request in self.running if keeps(request)]

    def next_batch(self, step_id: int, previous: ScheduleBatch | None, now: float) -> PlannedStep | None:
        """Form the next decode step; None if no request can take one. Raises NoFreeSlots.

        previous: the step in flight. Its sampled tokens are not known yet; its rows stand in for them.
        """
        requests = self.wanting()
        searches = [r for r in self.running if r.beams is not None and not r.num_output_placeholders]
        if not requests and not searches:
            return None
        if not all(self._fork(search, now) for search in searches):
            raise NoFreeSlots
        drafts = None
        if self._speculation is not None:
            drafts = self._speculation.propose_drafts(requests, sum(len(search.held_beams.rows) for search in searches))
        allocated = self._allocate(requests, searches, previous, now, drafts)
        if allocated is None:
            raise NoFreeSlots
        rows, beam_slots = allocated
        step = plan_step(
            ForwardMode.DECODE if rows.draft_lens is None else ForwardMode.EXTEND,
            requests,
            rows.new_lens,
            rows.slots,
            step_id=step_id,
            row_updates=self._memory.req_to_token.take_updates(),
            copies=self._memory.copies.take_copies(search.held_kv for search in searches),
            running=rows,
        )
        if searches:
            add_searches(step, searches, np.concatenate(list(map(_input_ids, searches))), beam_slots)
        return step

    def _fork(self, search: Request, now: float) -> bool:
        try:
            return self._beams.fork_search(search, now)
        except Exception as error:
            raise RequestFault(search) from error

    def wanting(self) -> list[Request]:
        """The running requests, searches aside, that the next step could give a token."""
        return [r for r in self.running if r.beams is None and _wants_token(r)]

    def offer(self, wanting: list[Request], previous: ScheduleBatch | None, now: float) -> TokenRows | None:
        """Rows of these requests, for a step of prompts. None, and nothing allocated, if there is no memory: mixed rows
        never cause a retraction. previous: as in `next_batch`."""
        allocated = self._allocate(wanting, [], previous, now, is_mixed=True)
        return allocated[0] if allocated is not None else None

    def _allocate(
        self,
        requests: list[Request],
        searches: list[Request],
        previous: ScheduleBatch | None,
        now: float,
        drafts: list[np.ndarray] | None = None,
        *,
        is_mixed: bool = False,
    ) -> tuple[TokenRows, np.ndarray] | None:
        """Allocate one slot for each request, more for its draft, and one for each beam of the searches, which have
        been forked: the requests' rows, and the beams' slots (int32 [beams]). Without drafts if memory is short; None,
        and nothing allocated, if there is none. is_mixed: the step computes prompts, too."""
        rows = [np.fromiter((r.held_kv.row for r in requests), dtype=np.int32, count=len(requests))]
        lengths = [np.fromiter((r.scheduled_len for r in requests), dtype=np.int32, count=len(requests))]
        for search in searches:
            rows.append(search.held_beams.rows)
            lengths.append(np.full(len(rows[-1]), search.held_beams.length, dtype=np.int32))
        every, every_length = _joined(rows), _joined(lengths)
        ids, new_lens = ids_or_placeholders(requests, previous), lengths[0] + np.int32(1)
        slots = draft_lens = None
        if not self._memory.reserve_states(requests, now, is_decode=not (is_mixed or searches or drafts)):
            return None
        if drafts is not None:
            drafts = self._memory.reserve_drafts(requests, drafts)
        if drafts is not None:
            draft_lens = np.array([len(draft) for draft in drafts], dtype=np.int32)
            more = np.pad(draft_lens, (0, len(every) - len(requests)))
            slots = extend_with_drafts(self._memory, every, every_length, more)
            if slots is None:
                self._memory.reserve_drafts(requests, [])
        if slots is None or drafts is None or draft_lens is None:
            draft_lens, slots = None, self._memory.extend_rows(every, every_length, now)
        else:
            ids = np.concatenate([part for pair in zip(np.split(ids, len(ids)), drafts) for part in pair])
            new_lens += draft_lens
        if slots is None:
            return None
        for request, length in zip(requests, new_lens.tolist()):
            request.held_kv.length = length
        for search in searches:
            search.held_beams.length += 1
        return TokenRows(requests, ids, slots[: len(ids)], new_lens, draft_lens), slots[len(ids) :]


def _wants_token(request: Request) -> bool:
    """True if a token is missing that is not in flight. A request with a draft waits, because only the end of its step
    says how many tokens the draft brings."""
    if request.num_drafted:
        return False
    num_known = len(request.token_ids) + request.num_output_placeholders
    return num_known - request.prompt_len < request.max_new_tokens


def ids_or_placeholders(requests: list[Request], previous: ScheduleBatch | None) -> np.ndarray:
    """int32 [n]: the token that comes next in each request, or what stands for it; see `TokenRows.ids`."""
    rows = {serial: i for i, serial in enumerate(previous.serials.tolist())} if previous is not None else {}
    ids = []
    for request in requests:
        position, known = request.scheduled_len, request.token_ids
        try:
            ids.append(known[position] if position < len(known) else -(rows[request.serial] + 1))
        except Exception as error:
            raise RequestFault(request) from error
    return np.array(ids, dtype=np.int32)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _input_ids(search: Request) -> np.ndarray:
    """int32 [beams]: the token that the step computes for each beam; its slot is allocated already."""
    try:
        assert search.beams is not None
        return search.beams.tokens_at(search.num_computed_beam_tokens - 1)
    except Exception as error:
        raise RequestFault(search) from error
