"""The running set: one new token for every running request and every beam per step, and retraction when memory runs
out.

A retracted request gives its KV back (what it had committed stays findable in the tree) and waits again with its
known tokens; nothing the client has seen changes. Victims are the newest first, so the oldest always gets on and no
two requests can retract each other for ever.
"""

from __future__ import annotations

import numpy as np

from .batch import ForwardMode, ScheduleBatch, add_searches, build_batch
from .kv_memory import KVMemory
from .request import Request


class OutOfMemory(Exception):
    """The running requests do not fit; some must be retracted before a decode step can be formed."""


class DecodeScheduler:
    """Forms decode batches. Owns ``running``: requests whose prompt is computed, in order of admission."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self.running: list[Request] = []

    def next_batch(self, step_id: int, previous: ScheduleBatch | None, now: float) -> ScheduleBatch | None:
        """The next decode step; None if no request can take one. Raises OutOfMemory.

        previous: the step in flight whose sampled tokens are not known yet; its rows stand in for them.
        """
        requests = [r for r in self.running if r.beams is None and _wants_token(r)]
        searches = [r for r in self.running if r.beams is not None and not r.num_output_placeholders]
        if not requests and not searches:
            return None
        if not all(self._memory.fork_beams(search, now) for search in searches):
            raise OutOfMemory
        slots = self._memory.extend_by_one(requests, searches, now)
        if slots is None:
            raise OutOfMemory
        new_lens = np.fromiter((r.scheduled_len + 1 for r in requests), dtype=np.int32, count=len(requests))
        rows = {r: i for i, r in enumerate(previous.requests)} if previous is not None else {}
        input_ids = np.empty(len(requests), dtype=np.int32)
        for i, request in enumerate(requests):
            position = request.scheduled_len
            known = position < len(request.token_ids)
            input_ids[i] = request.token_ids[position] if known else -(rows[request] + 1)
        batch = build_batch(
            step_id,
            ForwardMode.DECODE,
            requests,
            new_lens,
            slots[: len(requests)],
            self._memory.req_to_token.take_updates(),
            self._memory.take_copies(searches),
            input_ids,
        )
        if searches:
            add_searches(batch, searches, np.concatenate(list(map(_input_ids, searches))), slots[len(requests) :])
        return batch

    def pick_victim(self) -> Request:
        """The running request that loses least by starting over: the one that arrived last."""
        return max(self.running, key=lambda r: (r.arrival, r.sequence_number))


def _wants_token(request: Request) -> bool:
    """Not all tokens are generated or in flight; with an item trie, which says what may follow, none is in flight."""
    if request.item_trie is not None and request.num_output_placeholders:
        return False
    return request.num_output_tokens + request.num_output_placeholders < request.max_new_tokens


def _input_ids(search: Request) -> np.ndarray:
    """int32 [beams]: the token of each beam that the step computes; its slot is allocated already."""
    assert search.beams is not None
    return search.beams.tokens_at(search.num_computed_beam_tokens - 1)
