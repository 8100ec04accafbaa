"""The KV of beam searches, from the first step after the prompt to the end."""

from __future__ import annotations

import numpy as np

from ...radix.kv_sequence import KVSequence
from ...radix.lease import Lease, LeaseTerms
from ...radix.sequence_states import HeldState, SequenceStates
from ..batch import BeamCandidates
from ..beam.rows import BeamRows
from ..beam.search import Hypothesis
from ..outcome import FinishReason
from ..request import Request
from .kv_memory import KVMemory


class BeamMemory:
    """Forks, keeps and closes what the beams of a search hold. Their prompt is opened, extended and closed like that
    of any other request."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        states = memory.cache.states
        self._rows = BeamRows(memory.req_to_token, memory.allocator, states.slots if states is not None else None)

    def _start(self, search: Request) -> None:
        """Start on a computed prompt: from now on the beams hold everything after its whole pages."""
        assert search.beams is not None
        search.beam_kv = self._rows.adopt(search.held_kv, search.beams.num_live)
        search.committed_len = search.scheduled_len = search.held_kv.length

    def pages(self, search: Request) -> np.ndarray:
        """int32 [n]: the pages that the beams hold, each once."""
        return self._rows.pages(search.held_beams)

    def fork_search(self, search: Request, now: float) -> bool:
        """Give each beam of the next step its row, and a slot for its next state. False if there is no memory; a row
        that was given stays."""
        if not self._fork_rows(search, now):
            return False
        beams = search.held_beams
        return self._memory.reserve_beam_states(beams, now) or (
            self._give_up_states(search) and self._memory.reserve_beam_states(beams, now)
        )

    def _give_up_states(self, search: Request) -> bool:
        """Give up the states that a search keeps for others alone: those of its prompt and of finished sequences. False
        if it keeps none."""
        beams, trunk, states = search.held_beams, search.held_kv.states, self._memory.cache.states
        assert search.beams is not None
        if states is None or not (beams.kept_states or trunk.held):
            return False
        for hypothesis in search.beams.finished:
            hypothesis.state = 0
        self._rows.keep_states(beams, [])
        trunk.release(states.slots)
        return True

    def _fork_rows(self, search: Request, now: float) -> bool:
        kv = search.held_beams
        if kv.is_forked:
            return True
        self._memory.reclaim(self._rows.tokens_to_fork(kv), now)
        copies = self._rows.fork_rows(kv)
        if copies is None:
            return False
        if len(copies):
            self._memory.copies.add_beam_copies(search.held_kv, copies)
        return True

    def advance_search(
        self, search: Request, candidates: BeamCandidates | None, end_ids: frozenset[int]
    ) -> FinishReason | None:
        """Apply a step's result: select beams, free those that lost, keep the KV that a lease will want. Returns why
        the search has ended, None while it continues.

        candidates: None if the step only recomputed tokens the search knew. end_ids: eos and stop ids of the request.
        """
        group = search.beams
        assert group is not None
        search.num_output_placeholders = 0
        if search.beam_kv is None:
            self._start(search)
        search.held_beams.committed = search.held_beams.length
        if candidates is None:
            return None
        selection = group.select(candidates, end_ids)
        self._keep_finished(search, selection.finished)
        self._rows.keep_states(search.held_beams, self._wanted_states(search))
        if not group.done:
            self._choose(search, selection.parents)
            return None
        if group.results:
            return group.results[0].finish
        return FinishReason(type="abort", message=f"the beam search found nothing: {group.shortfall}")

    def _keep_finished(self, search: Request, finished: list[tuple[Hypothesis, int]]) -> None:
        """Note which slots hold the KV of sequences that have just finished; each comes with the beam it continued."""
        kv = search.held_beams
        for hypothesis, parent in finished:
            hypothesis.state = int(kv.states[parent]) if len(kv.states) else 0
            hypothesis.slots = self._memory.req_to_token.rows[kv.rows[parent], kv.start : kv.length].copy()

    def _wanted_states(self, search: Request) -> list[int]:
        """The states of finished sequences that a lease may want."""
        assert search.beams is not None
        best = search.beams.finished[: search.num_retained]
        return [hypothesis.state for hypothesis in best if hypothesis.state]

    def _choose(self, search: Request, parents: np.ndarray) -> None:
        """Continue the search from these beams (int32 [n]). The KV of finished sequences is kept only for a lease."""
        assert search.beams is not None
        kept: list[np.ndarray] = []
        for rank, hypothesis in enumerate(search.beams.finished):
            if rank >= search.num_retained:
                hypothesis.slots, hypothesis.state = None, 0  # a rank only ever gets worse
            elif hypothesis.slots is not None:
                kept.append(hypothesis.slots)
        self._rows.choose(search.held_beams, parents, kept)

    def retain_results(self, search: Request, results: list[Hypothesis], terms: LeaseTerms) -> list[Lease | None]:
        """Lease each finished sequence, as far as its KV is still there: at least the prompt's. Where there are
        recurrent states, up to the last one that it has left of what a continuation inherits: with a stop of several
        tokens, that is in the prompt. None for a sequence that a budget or the pool has no room for. The search itself
        keeps what it holds."""
        pool, table, trunk = self._memory.req_to_token, self._memory.leases, search.held_kv
        prompt_slots = pool.rows[trunk.row, : trunk.length].copy()
        leases: list[Lease | None] = []
        for hypothesis in results:
            row = pool.alloc() if table.make_room(terms) else None
            if row is None:
                leases.append(None)
                continue
            slots = hypothesis.slots if hypothesis.slots is not None else prompt_slots[:0]
            pool.write(row, 0, prompt_slots)
            pool.write(row, trunk.length, slots)
            length = min(trunk.length + len(slots), search.prompt_len + hypothesis.kept_tokens)
            view = KVSequence(trunk.namespace, row, trunk.node, trunk.tree_len, length)
            view.window_start = trunk.window_start
            view.states = SequenceStates(list(trunk.states.held))
            if hypothesis.state:
                view.states.held.append(HeldState(hypothesis.state, trunk.length + len(slots)))
            length = self._memory.cache.usable_length(view, length)
            forked = self._memory.fork_into(view, length, row) if length >= trunk.tree_len else None
            lease = table.grant(forked, terms) if forked is not None else None
            if forked is None:
                pool.free(row)
            elif lease is None:
                self._memory.cache.release(forked)
            leases.append(lease)
        return leases

    def close_search(self, search: Request, fence: int | None) -> None:
        """Give back what the beams hold, before the prompt is closed. Does nothing if there are none yet.

        fence: that of a step in flight, which may still write for the search; the pages come back after it.
        """
        if search.beam_kv is None:
            return
        in_flight = fence if search.num_output_placeholders else None
        self._rows.close(search.beam_kv, search.held_kv, in_flight)
        search.beam_kv = None
        self._memory.copies.drop_copies(search.held_kv)
        assert search.beams is not None
        for hypothesis in search.beams.finished:
            hypothesis.slots, hypothesis.state = None, 0
