"""The row_statistics of a beam search's logits, in Triton's interpreter, against its torch twin."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from baton.runtime.sampling.beam_candidates import BeamRanker
from baton.runtime.sampling.ops import TORCH_OPS
from baton.runtime.sampling.ranking import row_statistics
from baton.scheduler.batch import BeamStep
from tests.doubles.draw_cases import random_case
from tests.doubles.sampling_requests import make_sequence


@pytest.mark.parametrize("chunk", [32, 128])
@pytest.mark.parametrize("vocab_size", [5, 128, 4096, 4097, 9001])
def test_triton_row_statistics_equal_torch(interpreter, vocab_size, chunk):
    from baton.runtime.sampling import triton_ops

    logits = random_case(vocab_size, 6, vocab_size).logits
    logits[1, : vocab_size // 2] = -torch.inf
    logits[2, 1:] = -torch.inf
    logits[3] = logits[3].sort().values  # a likelier one turns up all the time
    maxima, best, log_sum = triton_ops.row_statistics(logits, chunk)
    expected = row_statistics(logits, chunk)
    assert torch.equal(maxima, expected[0]) and torch.equal(best, expected[1])
    torch.testing.assert_close(log_sum, expected[2], atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter is numpy
def test_statistics_of_non_finite_row_affect_no_other(interpreter):
    from baton.runtime.sampling import triton_ops

    logits = random_case(0, 5, 5000).logits
    logits[0], logits[1, 4500], logits[2, 3] = -torch.inf, torch.nan, torch.inf
    for take_statistics in (row_statistics, triton_ops.row_statistics):
        _, best, log_sum = take_statistics(logits, 128)
        logprobs = (logits - best[:, None]) - log_sum[:, None]
        assert logprobs[:3].isnan().all(), take_statistics
        torch.testing.assert_close(logprobs[3:], logits[3:].log_softmax(-1), atol=1e-4, rtol=1e-5)
    assert len(triton_ops.row_statistics(logits[:0], 128)[0]) == 0


def test_beams_ranked_by_triton_and_torch_statistics_agree(interpreter):
    from baton.runtime.sampling import triton_ops

    logits = random_case(1, 8, 5000, ties=False).logits
    sequence = make_sequence(beam_width=8)
    step = BeamStep(0, 0, 8, 16, np.linspace(-1, -2, 8, dtype=np.float32))
    (expected,) = BeamRanker(5000, (2,), "cpu").rank(logits, [step], [sequence])
    ops = replace(TORCH_OPS, row_statistics=triton_ops.row_statistics)
    (found,) = BeamRanker(5000, (2,), "cpu", ops).rank(logits, [step], [sequence])
    assert np.array_equal(found.tokens, expected.tokens) and np.array_equal(found.parents, expected.parents)
    np.testing.assert_allclose(found.scores, expected.scores, atol=1e-5)
