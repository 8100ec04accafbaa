"""Drives a ModelRunner by hand: sequences with slots of any layout, steps of any mix. No scheduler, no tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.memory_pool.req_to_token import ReqToTokenPool, RowUpdates
from baton.memory_pool.window_pages import WindowPages
from baton.runtime.runner.model_runner import ForwardOutput, ModelRunner
from baton.scheduler.batch import NO_COPIES, ForwardMode, KVCopies, ScheduleBatch, StateRows, WindowSlots


@dataclass
class DrivenSequence:
    """ids: int32 [n], grows; the first ``computed`` have KV. states: the slots of its recurrent states, by number of
    tokens, if the model keeps some; the last is that of all computed tokens."""

    row: int
    ids: np.ndarray
    computed: int = 0
    states: dict[int, int] = field(default_factory=dict)


class ModelDriver:
    """Gives every token a slot; pages are scattered at random unless ``seed`` is None. What is behind the windows of a
    sequence is given back after each step, where the model has a pool for windows."""

    def __init__(self, runner: ModelRunner, *, page_size: int = 1, seed: int | None = 0) -> None:
        self.runner = runner
        self.page_size = page_size
        self.pool = ReqToTokenPool(*runner.req_to_token.shape)
        count = runner.max_total_tokens // page_size
        pages = np.arange(1, count + 1) if seed is None else np.random.default_rng(seed).permutation(count) + 1
        self._pages = iter(pages.tolist())
        self._states = np.random.default_rng(seed).permutation(np.arange(1, runner.max_states + 1)).tolist()
        self._shared: set[int] = set()
        self.windows: WindowPages | None = None
        if runner.window:
            tokens = runner.window_tokens, runner.max_total_tokens
            self.windows = WindowPages(*tokens, page_size, runner.window, check=True)
        self._step = 0

    def open(self, ids: Sequence[int] | np.ndarray) -> DrivenSequence:
        row = self.pool.alloc()
        assert row is not None
        return DrivenSequence(row, np.asarray(ids, dtype=np.int32))

    def fork(self, sequence: DrivenSequence, length: int, ids: Sequence[int] | np.ndarray = ()) -> DrivenSequence:
        """A sequence that shares KV and state of the first ``length`` tokens and goes on with ``ids``. Pages of one."""
        fork = self.open(np.concatenate((sequence.ids[:length], np.asarray(ids, dtype=np.int32))))
        self.pool.write(fork.row, 0, self.pool.rows[sequence.row, :length].copy())
        fork.computed = length
        if self.runner.state_pool is not None:
            fork.states[length] = sequence.states[length]
            self._shared.add(sequence.states[length])
        return fork

    def close(self, sequence: DrivenSequence) -> None:
        """Give the row and the states back; the slots of KV stay lost."""
        self.pool.free(sequence.row)
        self._states += set(sequence.states.values()) - self._shared

    def step(
        self,
        spans: list[tuple[DrivenSequence, int]],
        *,
        samples: list[bool] | None = None,
        logprob_starts: list[int] | None = None,
        copies: list[KVCopies] | None = None,
        ends: list[list[int]] | None = None,
        in_place: bool = True,
    ) -> ForwardOutput:
        """Compute the next n tokens of each (sequence, n). By default every row samples and none wants logprobs.

        ends: for each row, new tokens after which its state is kept, besides the last. in_place: the last state of a
        row is written over the one that it starts from, unless a fork has that, too; else the sequence keeps both."""
        slots = [self._slots(sequence, count) for sequence, count in spans]
        for (sequence, _), own in zip(spans, slots, strict=True):
            self.pool.write(sequence.row, sequence.computed, own)
        counts = np.array([count for _, count in spans], dtype=np.int32)
        updates, out = self.pool.take_updates(), np.concatenate(slots)
        output = self.runner.forward(
            ScheduleBatch(
                step_id=self._step,
                mode=ForwardMode.DECODE if (counts == 1).all() else ForwardMode.EXTEND,
                opened=[],
                closed=[],
                serials=np.zeros(len(spans), dtype=np.int64),
                input_ids=np.concatenate([seq.ids[seq.computed : seq.computed + count] for seq, count in spans]),
                out_cache_loc=out,
                req_pool_indices=np.array([seq.row for seq, _ in spans], dtype=np.int32),
                prefix_lens=np.array([seq.computed for seq, _ in spans], dtype=np.int32),
                extend_lens=counts,
                samples=np.array(samples if samples is not None else [True] * len(spans)),
                output_positions=np.zeros(len(spans), dtype=np.int32),
                logprob_starts=np.array(logprob_starts, dtype=np.int32) if logprob_starts is not None else counts,
                logprob_targets=[],
                row_updates=updates,
                copies=KVCopies.join(copies or []),
                states=self._plan_states(spans, ends or [[]] * len(spans), in_place),
                windows=self._plan_windows(updates, out),
            )
        )
        self._step += 1
        for sequence, count in spans:
            sequence.computed += count
            if self.windows is not None:
                gone = self.pool.rows[sequence.row, : self.windows.first_needed(sequence.computed) : self.page_size]
                self.windows.take_back(gone // self.page_size)
        return output

    def generate(self, sequences: list[DrivenSequence], steps: int) -> None:
        """Greedy: append a token to every sequence, compute it, and so on; the prompts are computed first."""
        output = self.step([(sequence, len(sequence.ids) - sequence.computed) for sequence in sequences])
        for step in range(steps):
            for sequence, token in zip(sequences, output.logits.argmax(-1).tolist(), strict=True):
                sequence.ids = np.append(sequence.ids, np.int32(token))
            if step + 1 < steps:
                output = self.step([(sequence, 1) for sequence in sequences])

    def _plan_windows(self, updates: RowUpdates, out: np.ndarray) -> WindowSlots | None:
        windows = self.windows
        if windows is None:
            return None
        pages = np.unique(out // self.page_size)
        windows.give(pages[~windows.has(pages)])
        return WindowSlots(windows.slots_of(out), windows.slots_of(updates.values), NO_COPIES)

    def _plan_states(
        self, spans: list[tuple[DrivenSequence, int]], ends: list[list[int]], in_place: bool
    ) -> StateRows | None:
        if self.runner.state_pool is None:
            return None
        sources, written = [], []
        for row, ((sequence, count), inner) in enumerate(zip(spans, ends, strict=True)):
            source = sequence.states.get(sequence.computed, 0)
            assert (source == 0) == (sequence.computed == 0), "no state of these tokens was kept"
            sources.append(source)
            takes_over = in_place and source and source not in self._shared
            for end in (*inner, count):
                slot = source if takes_over and end == count else self._states.pop()
                written.append((row, end, slot))
                sequence.states[sequence.computed + end] = slot
            if takes_over:
                del sequence.states[sequence.computed]
        arrays = np.array(written, dtype=np.int32).T
        return StateRows(np.array(sources, dtype=np.int32), *arrays)

    def _slots(self, sequence: DrivenSequence, count: int) -> np.ndarray:
        start, size = sequence.computed, self.page_size
        slots = np.empty(count, dtype=np.int32)
        for i, position in enumerate(range(start, start + count)):
            if position % size == 0:
                slots[i] = next(self._pages) * size
            else:
                slots[i] = (slots[i - 1] if i else self.pool.rows[sequence.row, position - 1]) + 1
        return slots
