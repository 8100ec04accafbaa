"""Drives a ModelRunner by hand: sequences with slots of any layout, steps of any mix. No scheduler, no tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from baton.memory_pool.req_to_token import ReqToTokenPool
from baton.runtime.runner.model_runner import ForwardOutput, ModelRunner
from baton.scheduler.batch import ForwardMode, KVCopies, ScheduleBatch


@dataclass
class DrivenSequence:
    """ids: int32 [n], grows; the first ``computed`` have KV."""

    row: int
    ids: np.ndarray
    computed: int = 0


class ModelDriver:
    """Gives every token a slot; pages are scattered at random unless ``seed`` is None."""

    def __init__(self, runner: ModelRunner, *, page_size: int = 1, seed: int | None = 0) -> None:
        self.runner = runner
        self.page_size = page_size
        self.pool = ReqToTokenPool(*runner.req_to_token.shape)
        count = runner.max_total_tokens // page_size
        pages = np.arange(1, count + 1) if seed is None else np.random.default_rng(seed).permutation(count) + 1
        self._pages = iter(pages.tolist())
        self._step = 0

    def open(self, ids: Sequence[int] | np.ndarray) -> DrivenSequence:
        row = self.pool.alloc()
        assert row is not None
        return DrivenSequence(row, np.asarray(ids, dtype=np.int32))

    def close(self, sequence: DrivenSequence) -> None:
        """Give the row back; the slots stay lost."""
        self.pool.free(sequence.row)

    def step(
        self,
        spans: list[tuple[DrivenSequence, int]],
        *,
        samples: list[bool] | None = None,
        logprob_starts: list[int] | None = None,
        copies: list[KVCopies] | None = None,
    ) -> ForwardOutput:
        """Compute the next n tokens of each (sequence, n). By default every row samples and none wants logprobs."""
        slots = [self._slots(sequence, count) for sequence, count in spans]
        for (sequence, _), own in zip(spans, slots, strict=True):
            self.pool.write(sequence.row, sequence.computed, own)
        counts = np.array([count for _, count in spans], dtype=np.int32)
        output = self.runner.forward(
            ScheduleBatch(
                step_id=self._step,
                mode=ForwardMode.DECODE if (counts == 1).all() else ForwardMode.EXTEND,
                opened=[],
                closed=[],
                serials=np.zeros(len(spans), dtype=np.int64),
                input_ids=np.concatenate([seq.ids[seq.computed : seq.computed + count] for seq, count in spans]),
                out_cache_loc=np.concatenate(slots),
                req_pool_indices=np.array([seq.row for seq, _ in spans], dtype=np.int32),
                prefix_lens=np.array([seq.computed for seq, _ in spans], dtype=np.int32),
                extend_lens=counts,
                samples=np.array(samples if samples is not None else [True] * len(spans)),
                output_positions=np.zeros(len(spans), dtype=np.int32),
                logprob_starts=np.array(logprob_starts, dtype=np.int32) if logprob_starts is not None else counts,
                logprob_targets=[],
                row_updates=self.pool.take_updates(),
                copies=KVCopies.join(copies or []),
            )
        )
        self._step += 1
        for sequence, count in spans:
            sequence.computed += count
        return output

    def generate(self, sequences: list[DrivenSequence], steps: int) -> None:
        """Greedy: append a token to every sequence, compute it, and so on; the prompts are computed first."""
        output = self.step([(sequence, len(sequence.ids) - sequence.computed) for sequence in sequences])
        for step in range(steps):
            for sequence, token in zip(sequences, output.logits.argmax(-1).tolist(), strict=True):
                sequence.ids = np.append(sequence.ids, np.int32(token))
            if step + 1 < steps:
                output = self.step([(sequence, 1) for sequence in sequences])

    def _slots(self, sequence: DrivenSequence, count: int) -> np.ndarray:
        start, size = sequence.computed, self.page_size
        slots = np.empty(count, dtype=np.int32)
        for i, position in enumerate(range(start, start + count)):
            if position % size == 0:
                slots[i] = next(self._pages) * size
            else:
                slots[i] = (slots[i - 1] if i else self.pool.rows[sequence.row, position - 1]) + 1
        return slots
