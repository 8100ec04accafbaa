"""One static batch through the model runner: real rows and allocator, argmax for sampling; no scheduler, no HTTP."""

from __future__ import annotations

import numpy as np

from baton.memory_pool.allocator import Allocator
from baton.memory_pool.req_to_token import ReqToTokenPool
from baton.runtime.config import ModelArgs
from baton.runtime.runner.model_runner import ModelRunner
from baton.scheduler.batch import ForwardMode, KVCopies, ScheduleBatch


class StaticBatch:
    """Sequences of equal length that begin and go on together. Every step is waited for."""

    def __init__(self, args: ModelArgs, *, num_rows: int, context: int, max_prefill: int) -> None:
        """max_prefill: new tokens of a step; longer batches are prefilled in several, by whole sequences."""
        self.max_prefill = max_prefill
        self.runner = ModelRunner(
            args,
            context_length=context,
            num_rows=num_rows,
            page_size=1,
            max_total_tokens=num_rows * context,
            chunked_prefill_size=max_prefill,
        )

    def start(self, prompts: np.ndarray) -> np.ndarray:
        """Prefill int32 [bs, length] -> next ids int32 [bs]. What was there before is forgotten."""
        bs, length = prompts.shape
        self._pool = ReqToTokenPool(*self.runner.req_to_token.shape)
        self._allocator = Allocator(self.runner.max_total_tokens, 1)
        self._rows = np.array([self._pool.alloc() for _ in range(bs)], dtype=np.int32)
        self._lengths = np.zeros(bs, dtype=np.int32)
        self._last_slots = np.zeros(bs, dtype=np.int32)
        together = max(1, self.max_prefill // length)
        parts = [np.arange(first, min(first + together, bs)) for first in range(0, bs, together)]
        return np.concatenate([self._forward(part, prompts[part]) for part in parts])

    def decode(self, ids: np.ndarray) -> np.ndarray:
        """int32 [bs] -> the ids after them, int32 [bs]"""
        return self._forward(np.arange(len(ids)), ids[:, None])

    def _forward(self, which: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """The next tokens of some sequences, int32 [n, new] -> int32 [n]"""
        rows, lengths = self._rows[which], self._lengths[which]
        counts = np.full(len(which), ids.shape[1], dtype=np.int32)
        slots = self._allocator.alloc_extend(lengths, lengths + counts, self._last_slots[which])
        assert slots is not None, "the pool holds all rows"
        is_decode = ids.shape[1] == 1
        if is_decode:
            self._pool.write_many(rows, lengths, slots)
        else:
            for row, start, own in zip(rows.tolist(), lengths.tolist(), slots.reshape(len(which), -1), strict=True):
                self._pool.write(row, start, own)
        output = self.runner.forward(
            ScheduleBatch(
                step_id=0,
                mode=ForwardMode.DECODE if is_decode else ForwardMode.EXTEND,
                opened=[],
                closed=[],
                serials=which.astype(np.int64),
                input_ids=ids.ravel(),
                out_cache_loc=slots,
                req_pool_indices=rows,
                prefix_lens=lengths,
                extend_lens=counts,
                samples=np.ones(len(which), dtype=bool),
                output_positions=np.zeros(len(which), dtype=np.int32),
                logprob_starts=counts,
                logprob_targets=[],
                row_updates=self._pool.take_updates(),
                copies=KVCopies.join([]),
            )
        )
        self._lengths[which] = lengths + counts
        self._last_slots[which] = slots.reshape(len(which), -1)[:, -1]
        return output.logits.argmax(-1).cpu().numpy().astype(np.int32)
