"""The running set: each decode step computes one new token for every running request and every beam.

When memory runs out, the scheduler retracts the request that the policy picks. That request gives its KV back (the
committed part can still be found in the tree) and waits again with its known tokens; nothing the client has seen
changes.
"""

from __future__ import annotations

import numpy as np

from .batch import ForwardMode, ScheduleBatch
from .batch_builder import PlannedStep, add_searches, plan_step
from .memory.beam_memory import BeamMemory
from .memory.kv_memory import KVMemory
from .request import Request


class OutOfMemory(Exception):
    """The running requests do not fit; some must be retracted before a decode step can be formed."""


class DecodeScheduler:
    """Forms decode batches. Owns ``running``: requests whose prompt is computed, in order of admission."""

    def __init__(self, memory: KVMemory, beams: BeamMemory) -> None:
        self._memory = memory
        self._beams = beams
        self.running: list[Request] = []

    def next_batch(self, step_id: int, previous: ScheduleBatch | None, now: float) -> PlannedStep | None:
        """Form the next decode step; None if no request can take one. Raises OutOfMemory.

        previous: the step in flight whose sampled tokens are not known yet; its rows stand in for them.
        """
        requests = [r for r in self.running if r.beams is None and _wants_token(r)]
        searches = [r for r in self.running if r.beams is not None and not r.num_output_placeholders]
        if not requests and not searches:
            return None
        if not all(self._beams.fork(search, now) for search in searches):
            raise OutOfMemory
        slots = self._allocate(requests, searches, now)
        if slots is None:
            raise OutOfMemory
        rows = {serial: i for i, serial in enumerate(previous.serials.tolist())} if previous is not None else {}
        input_ids = np.empty(len(requests), dtype=np.int32)
        positions = [request.scheduled_len for request in requests]
        for i, (request, position) in enumerate(zip(requests, positions)):
            known = position < len(request.token_ids)
            input_ids[i] = request.token_ids[position] if known else -(rows[request.serial] + 1)
        step = plan_step(
            ForwardMode.DECODE,
            requests,
            np.array(positions, dtype=np.int32) + 1,
            slots[: len(requests)],
            step_id=step_id,
            row_updates=self._memory.req_to_token.take_updates(),
            copies=self._memory.copies.take(search.held_kv for search in searches),
            input_ids=input_ids,
        )
        if searches:
            add_searches(step, searches, np.concatenate(list(map(_input_ids, searches))), slots[len(requests) :])
        return step

    def _allocate(self, requests: list[Request], searches: list[Request], now: float) -> np.ndarray | None:
        """Allocate one slot for each request, then one for each beam of the searches, which have been forked: int32
        [rows]. None, and nothing allocated, if there is no memory."""
        rows = [np.fromiter((r.held_kv.row for r in requests), dtype=np.int32, count=len(requests))]
        lengths = [np.fromiter((r.scheduled_len for r in requests), dtype=np.int32, count=len(requests))]
        for search in searches:
            rows.append(search.held_beams.rows)
            lengths.append(np.full(len(rows[-1]), search.held_beams.length, dtype=np.int32))
        slots = self._memory.extend_rows(_joined(rows), _joined(lengths), now)
        if slots is None:
            return None
        for request, length in zip(requests, lengths[0].tolist()):
            request.held_kv.length = length + 1
        for search in searches:
            search.held_beams.length += 1
        return slots


def _wants_token(request: Request) -> bool:
    """True if a token is missing that is not in flight. A constraint needs the last token, so it waits for that one."""
    if request.constraint is not None and request.num_output_placeholders:
        return False
    num_known = len(request.token_ids) + request.num_output_placeholders
    return num_known - request.prompt_len < request.max_new_tokens


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _input_ids(search: Request) -> np.ndarray:
    """int32 [beams]: the token that the step computes for each beam; its slot is allocated already."""
    assert search.beams is not None
    return search.beams.tokens_at(search.num_computed_beam_tokens - 1)
