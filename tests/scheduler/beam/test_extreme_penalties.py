"""Scores of searches whose length ** length_penalty float32 cannot hold."""

from __future__ import annotations

import math

import numpy as np
import pytest

from baton.scheduler.beam.search import BeamGroup
from baton.scheduler.sampling_params import SamplingParams


@pytest.mark.parametrize("penalty", [-10.0, -9.5, -5e-324, -0.0, 0.0, 5e-324, 1.0, 9.5, 10.0])
@pytest.mark.parametrize("length", [1, 2, 1000, 131_072, 10_000_000])
def test_scores_stay_finite_and_in_order(penalty: float, length: int) -> None:
    group = BeamGroup(SamplingParams(beam_width=3, length_penalty=penalty), 10, None, 1)
    scores = np.array([-0.5, -1.5, -9e6], dtype=np.float32)
    found = group._scores_at_end(scores, length)
    assert all(map(math.isfinite, found))
    assert found[0] > found[1] > found[2]
    np.testing.assert_allclose(found, scores.astype(np.float64) / float(length) ** penalty, rtol=1e-6)
