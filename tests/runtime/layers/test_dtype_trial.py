"""When a model in bfloat16 is computed so on a CPU. Time is the test's own, but for one trial in earnest."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.attention import processor
from baton.runtime.layers import dtype_trial
from baton.runtime.layers.dtype_trial import ROWS, cpu_dtype, is_worth_it
from baton.runtime.layers.product_trials import SMALL_MODEL_BYTES
from tests.doubles.lowered_processor import lower_to_avx2

FLOAT, BRAIN = torch.float32, torch.bfloat16


def config(**changes: Any) -> Any:
    """What is looked at of a ModelConfig."""
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_layers": 8}
    heads = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 64}
    return SimpleNamespace(**{"dtype": "bfloat16", **sizes, **heads, **changes})


@pytest.mark.parametrize(
    ("shares", "worth"),
    [
        ((0.5, 0.5, 0.5), True),
        ((0.75, 0.75, 0.88), True),
        ((0.79, 0.8, 0.82), False),  # a fifth on average is asked for
        ((0.3, 0.3, 1.09), True),
        ((0.3, 0.3, 1.11), False),  # and no loss anywhere
        ((20.0, 0.6, 0.7), False),
    ],
)
def test_is_worth_it_thresholds(shares: tuple[float, ...], worth: bool) -> None:
    plain: dict[int, float] = dict(zip(ROWS, (1.0, 3.0, 40.0)))
    brain: dict[int, float] = {rows: share * plain[rows] for rows, share in zip(ROWS, shares)}
    assert is_worth_it(brain, plain) is worth


@pytest.mark.parametrize(("brain_s", "found"), [(0.4, BRAIN), (2.0, FLOAT)])
def test_the_faster_type_is_chosen_and_logged_once(
    brain_s: float, found: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    threads: list[int] = []

    def time_forms(layers: list[Any], rows: int, forms: list[str], timer: Any) -> dict[str, float]:
        threads.append(torch.get_num_threads())
        return {"torch": 9.0, "onednn": brain_s if layers[0].weight.dtype == BRAIN else 1.0}

    monkeypatch.setattr(dtype_trial, "time_forms", time_forms)
    monkeypatch.setattr(processor, "multiplies", lambda dtype: True)
    before = torch.get_num_threads()
    with caplog.at_level(logging.INFO, logger="baton.runtime.layers.dtype_trial"):
        assert cpu_dtype(config()) == found
    assert set(threads) == {1} and torch.get_num_threads() == before
    (line,) = caplog.messages
    assert line.startswith(f"dtype {str(found).removeprefix('torch.')}, tried") and f"512: {brain_s:.2f}" in line


@pytest.mark.parametrize("found", [BRAIN, FLOAT])
def test_a_quiet_trial_is_kept_for_the_next_start(found: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    trials: list[int] = []

    def time_forms(layers: list[Any], rows: int, forms: list[str], timer: Any) -> dict[str, float]:
        trials.append(rows)
        return {"torch": 1.0 if layers[0].weight.dtype == found else 2.0}

    monkeypatch.setattr(dtype_trial, "time_forms", time_forms)
    monkeypatch.setattr(processor, "multiplies", lambda dtype: True)
    for share in (0.5, 1.0, 0.0):  # beside a busy process, alone, not needed
        clock, own = iter([0.0, 1.0]), iter([0.0, share])
        monkeypatch.setattr(dtype_trial, "time", SimpleNamespace(perf_counter=clock.__next__, thread_time=own.__next__))
        assert cpu_dtype(config()) == found
    assert len(trials) == 2 * 2 * len(ROWS)
    assert next(clock) == 0.0, "the third start asks no clock"


@pytest.mark.parametrize("changes", [{"dtype": "float32"}, {"dtype": "float16"}, {"num_layers": 1, "hidden_size": 64}])
def test_other_dtypes_and_small_models_skip_dtype_trial(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtype_trial, "time_forms", None)
    assert cpu_dtype(config(**changes)) == FLOAT
    assert SMALL_MODEL_BYTES < 2 * 8 * 512 * (2 * 12 * 64 + 3 * 1408), "or nothing is tried in any test"


def test_no_dtype_trial_without_bfloat16_arithmetic(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The trial itself took longest there."""
    lower_to_avx2(monkeypatch)
    monkeypatch.setattr(dtype_trial, "time_forms", None)
    with caplog.at_level(logging.INFO, logger="baton.runtime.layers.dtype_trial"):
        assert cpu_dtype(config()) == FLOAT
    assert caplog.messages == ["dtype float32: this processor has no arithmetic for the checkpoint's bfloat16"]


def test_real_dtype_trial_completes() -> None:
    assert cpu_dtype(config(num_layers=4)) in (FLOAT, BRAIN)
