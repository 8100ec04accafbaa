"""A step runner whose model is a table of logits, and steps for it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from baton.memory_pool.req_to_token import RowUpdates
from baton.runtime.runner.model_runner import ForwardOutput
from baton.runtime.runner.step_profile import StepProfiler
from baton.runtime.sampling.beam_candidates import BeamRanker
from baton.runtime.sampling.sampler import Sampler
from baton.runtime.sampling.sequences import SequenceState
from baton.runtime.step_runner import StepRunner
from baton.runtime.text.token_bytes import TokenBytes
from baton.scheduler.batch import (
    BeamCandidates,
    BeamStep,
    ForwardMode,
    ScheduleBatch,
    SequenceInfo,
)
from tests.doubles import trained_tokenizers
from tests.doubles.sampling_requests import make_info

BACKEND = trained_tokenizers.byte_level()
VOCAB_SIZE = BACKEND.get_vocab_size()
EOS = (2,)


class Table:
    """A model runner whose row i says logits[i]."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits
        self.config = SimpleNamespace(vocab_size=logits.shape[1], eos_token_ids=EOS)
        self.device = logits.device
        self.sound: dict[int, int] = {}

    def forward(self, batch: ScheduleBatch, previous_ids: torch.Tensor | None = None, *_: Any) -> ForwardOutput:
        return ForwardOutput(self.logits[torch.from_numpy(batch.samples)], None)

    def sound_tokens(self, batch: ScheduleBatch, rows: list[int]) -> dict[int, int]:
        return {row: self.sound.get(row, 0) for row in rows}


def make_step_runner(logits: torch.Tensor) -> StepRunner:
    sampler = Sampler(logits.shape[1], EOS, "cpu")
    return StepRunner(cast(Any, Table(logits)), sampler, lambda: TokenBytes(BACKEND), StepProfiler(logits.device))


def make_batch(
    infos: list[SequenceInfo], samples: list[bool] | None = None, *, opens: bool = True, **options: Any
) -> ScheduleBatch:
    """A row for each of ``infos``, several for that of a search. opens: it is their first step."""
    nothing = np.empty(0, dtype=np.int32)
    ones = np.ones(len(infos), dtype=np.int32)
    fields: dict[str, Any] = {
        "step_id": 0,
        "mode": ForwardMode.DECODE,
        "opened": list({info.serial: info for info in infos}.values()) if opens else [],
        "closed": [],
        "serials": np.array([info.serial for info in infos], dtype=np.int64),
        "input_ids": ones,
        "out_cache_loc": ones,
        "req_pool_indices": ones,
        "prefix_lens": ones,
        "extend_lens": ones,
        "samples": np.array(samples or [True] * len(infos), dtype=bool),
        "output_positions": 0 * ones,
        "logprob_starts": ones,
        "logprob_targets": [],
        "row_updates": RowUpdates(nothing, nothing, nothing, nothing),
    }
    return ScheduleBatch(**(fields | options))


SERIALS = itertools.count()


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return 4 * torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def make_search(width: int, **options: Any) -> SequenceInfo:
    return make_info(beam_width=width, serial=next(SERIALS), **options)


def make_step(search: SequenceInfo, start: int, stop: int, count: int, sequences: np.ndarray | None = None) -> BeamStep:
    scores = np.linspace(-1, -2, stop - start, dtype=np.float32)
    return BeamStep(search.serial, start, stop, count, scores, sequences=sequences)


def assert_ranked(found: BeamCandidates | None, logits: torch.Tensor, step: BeamStep, search: SequenceInfo) -> None:
    ranker = BeamRanker(VOCAB_SIZE, EOS, "cpu")
    (expected,) = ranker.rank(logits[step.start : step.stop].contiguous(), [step], [SequenceState(search)])
    assert found is not None
    assert np.array_equal(found.parents, expected.parents) and np.array_equal(found.tokens, expected.tokens)
    assert np.array_equal(found.scores, expected.scores)


def greedy(**options: Any) -> SequenceInfo:
    return make_info(temperature=0.0, serial=next(SERIALS), **options)
