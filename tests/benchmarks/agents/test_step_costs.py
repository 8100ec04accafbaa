"""A straight line through measured steps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from baton.entrypoints.simulate.cost_model import read_cost_file
from benchmarks.agents.step_costs import DECODES, PROMPTS, Measured, fit, said

COSTS = {
    "fixed_s": 0.004,
    "prompt_token_s": 0.0005,
    "decode_row_s": 0.0007,
    "context_token_s": 2e-6,
    "prompt_row_s": 0.01,
    "attended_s": 5e-8,
}


def steps(costs: dict[str, float]) -> list[Measured]:
    """Measurements of a machine with these costs."""
    sizes = [Measured(new, 0, new + cached, 0.0) for new, cached in PROMPTS]
    sizes += [Measured(0, rows, rows * context, 0.0) for rows, context in DECODES]
    return [size._replace(seconds=said(size, costs)) for size in sizes]


def test_fit_recovers_known_costs() -> None:
    assert fit(steps(COSTS)) == pytest.approx(COSTS)


def test_fitted_costs_are_never_negative() -> None:
    odd = steps(COSTS | {"context_token_s": -5e-7})
    found = fit(odd)
    assert found["context_token_s"] == 0.0 and min(found.values()) >= 0.0
    assert np.mean([abs(said(step, found) / step.seconds - 1) for step in odd]) < 0.2


def test_simulator_reads_fitted_cost_file(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(fit(steps(COSTS))))
    for step in steps(COSTS):
        assert read_cost_file(file).step_s(step.size) == pytest.approx(step.seconds)
