"""The highest logit of each row, which comes with its token and says whether the row says anything."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from baton.runtime.sampling.sampler import Sampler
from tests.doubles.sampling_requests import allow, make_sequence

VOCAB = 500
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.9},
    "biased": {"temperature": 0.0, "logit_bias": {3: -100.0, 7: 5.0}},
    "min_new_tokens": {"temperature": 0.0, "min_new_tokens": 5, "stop_token_ids": (4,)},
}


def rows_of_all_kinds() -> tuple[torch.Tensor, list[bool]]:
    """Logits, and whether they are sound."""
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[1, 4] = math.nan  # a token that min_new_tokens bans
    logits[2, 10] = math.inf
    logits[3] = -math.inf
    logits[4] = math.nan
    logits[5, : VOCAB // 2] = -math.inf
    logits[6, 3] = 3e38
    logits[7, [5, 6]] = torch.tensor([math.inf, math.nan])
    return logits, [True, False, False, False, False, True, True, False]


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("constrained", [False, True])
def test_peaks_are_finite_for_usable_rows(name: str, constrained: bool) -> None:
    logits, sound = rows_of_all_kinds()
    sequences = [make_sequence(seed=row, **REQUESTS[name]) for row in range(len(logits))]
    allowed = allow({row: [3, 9] for row in range(len(logits))}) if constrained else None
    sampled = Sampler(VOCAB, (2,), "cpu").sample(logits, sequences, np.zeros(len(logits), dtype=np.int32), allowed)
    assert sampled.peaks.isfinite().tolist() == sound
    assert sampled.peaks.dtype == torch.float32
    assert torch.equal(sampled.peaks[sound], logits.amax(-1)[sound])
    assert all(0 <= token < VOCAB for token in sampled.ids.tolist()), "the next step looks them up"


def test_peaks_in_mixed_batches() -> None:
    logits, sound = rows_of_all_kinds()
    wishes = list(REQUESTS.values())
    sequences = [make_sequence(seed=row, **wishes[row % len(wishes)]) for row in range(len(logits))]
    sampled = Sampler(VOCAB, (2,), "cpu").sample(logits, sequences, np.zeros(len(logits), dtype=np.int32))
    assert sampled.peaks.isfinite().tolist() == sound
