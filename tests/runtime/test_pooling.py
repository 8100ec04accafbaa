"""Vectors of single steps, with hidden states made by hand: sums over chunks, several kinds beside each other."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from baton.runtime.pooling import Pooler
from baton.runtime.sampling.sequences import SequenceTable
from baton.scheduler.batch import PooledSpan, ScheduleBatch, SequenceInfo
from baton.scheduler.request_spec import PoolingSpec
from baton.scheduler.sampling_params import SamplingParams

MEAN, CLS, LAST = PoolingSpec(kind="mean"), PoolingSpec(kind="cls"), PoolingSpec()
WEIGHT = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])


class Runner:
    """Final states are twice the hidden ones; three tokens and three labels."""

    def final_states(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 2

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ WEIGHT.T

    def compute_labels(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ WEIGHT.T


class Batch:
    """The part of a ScheduleBatch that is read."""

    def __init__(self, serials: list[int], spans: list[PooledSpan]) -> None:
        self.serials = np.array(serials, dtype=np.int64)
        self.pooled = spans


class Scene:
    def __init__(self, *poolings: PoolingSpec) -> None:
        self.pooler = Pooler(cast(Any, Runner()))
        self.sequences = SequenceTable()
        nothing = np.empty(0, dtype=np.int32)
        self.sequences.update_sequences(
            [
                SequenceInfo(serial, SamplingParams(max_new_tokens=0), 0, None, True, nothing, pooling=pooling)
                for serial, pooling in enumerate(poolings)
            ],
            [],
        )

    def step(self, serials: list[int], spans: list[PooledSpan], hidden: list[list[float]]) -> dict[int, list[float]]:
        states = torch.tensor(hidden, dtype=torch.float32).reshape(-1, 2)
        batch = cast(ScheduleBatch, Batch(serials, spans))
        found = self.pooler.pool(states, batch, self.sequences)
        arrays = iter([tensor.numpy() for tensor in found.tensors])
        return {row: vector.tolist() for row, vector in found.read_vectors(arrays).items()}


def test_kinds_and_outputs_share_a_step() -> None:
    scene = Scene(LAST, MEAN, PoolingSpec(output="labels"), CLS, PoolingSpec(output="tokens", token_ids=(2, 0)))
    spans = [
        PooledSpan(0, 4, 5, 0, True),
        PooledSpan(1, 0, 2, 0, True),
        PooledSpan(2, 1, 2, 0, True),
        PooledSpan(3, 0, 1, 0, True),
        PooledSpan(4, 0, 1, 6, True),
    ]
    found = scene.step([0, 1, 2, 3, 4], spans, [[1, 2], [3, 4], [5, 8], [1, 0], [7, 9], [0, 1]])
    assert found[0] == [2, 4] and found[1] == [8, 12] and found[2] == [1, 0, 1] and found[3] == [14, 18]
    expected = torch.log_softmax(torch.tensor([0.0, 1.0, 1.0]), -1)[[2, 0]]
    assert found[4] == pytest.approx(expected.tolist())


def test_mean_is_of_all_chunks() -> None:
    scene = Scene(MEAN)
    assert scene.step([0], [PooledSpan(0, 0, 2, 0, False)], [[1, 1], [2, 3]]) == {}
    assert scene.step([0], [PooledSpan(0, 0, 1, 2, True)], [[6, 2]]) == {0: [6, 4]}
    assert len(scene.pooler) == 0


def test_retracted_prompt_begins_anew() -> None:
    scene = Scene(MEAN, CLS)
    scene.step([0, 1], [PooledSpan(0, 0, 1, 0, False), PooledSpan(1, 0, 1, 0, False)], [[9, 9], [9, 9]])
    scene.step([0, 1], [PooledSpan(0, 0, 1, 0, False), PooledSpan(1, 0, 1, 0, False)], [[1, 2], [3, 4]])
    found = scene.step([0, 1], [PooledSpan(0, 0, 1, 1, True), PooledSpan(1, 0, 0, 1, True)], [[3, 2]])
    assert found == {0: [4, 4], 1: [6, 8]}


def test_gap_in_mean_is_an_error() -> None:
    scene = Scene(MEAN)
    scene.step([0], [PooledSpan(0, 0, 1, 0, False)], [[1, 1]])
    with pytest.raises(AssertionError, match="every token once"):
        scene.step([0], [PooledSpan(0, 0, 1, 2, True)], [[1, 1]])


def test_ended_sequences_leave_no_sum_behind() -> None:
    scene = Scene(MEAN)
    scene.step([0], [PooledSpan(0, 0, 1, 0, False)], [[1, 1]])
    scene.pooler.drop([0, 5])
    assert len(scene.pooler) == 0
