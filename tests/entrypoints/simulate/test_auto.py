"""The policy `auto` beside fcfs and handoff, in two small cells of the study that are overloaded. All figures are
reproducible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.entrypoints.simulate.runs import Plan, run

COSTS = {"fixed_s": 0.008, "prompt_token_s": 0.0004, "decode_row_s": 0.0015, "context_token_s": 1.5e-6}
PEOPLE = {"workload": "chats", "tools": "people", "rate": 0.3}
DRIFTING = {"workload": "agents", "tools": "drifting", "rate": 0.25}


@pytest.mark.parametrize(("cell", "sender", "gain"), [(PEOPLE, "+plain", -0.01), (DRIFTING, "", 0.3)])
def test_auto_is_within_its_bounds_beside_fcfs(tmp_path: Path, cell: dict[str, Any], sender: str, gain: float) -> None:
    costs = tmp_path / "costs.json"
    costs.write_bytes(msgspec.json.encode(COSTS))
    plan = Plan(arm="", costs=str(costs), pool=8000, scale=0.5, num_jobs=60, trim=0.1, seed=1, **cell)
    fcfs, auto, handoff = (
        run(msgspec.structs.replace(plan, arm=policy + sender))["figures"] for policy in ("fcfs", "auto", "handoff")
    )
    assert auto["service_s"]["mean"] < (1 - gain) * fcfs["service_s"]["mean"]
    assert all(auto["service_s"][point] <= 1.01 * fcfs["service_s"][point] for point in ("p95", "p99"))
    first_token = [figures["ttft_s"]["p99"] for figures in (fcfs, auto, handoff)]
    assert first_token[1] <= 1.05 * first_token[0] and first_token[2] > 1.2 * first_token[0], first_token
