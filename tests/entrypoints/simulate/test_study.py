"""Runs in parallel and in pieces: what is there is not run again, and the same plan gives the same figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.entrypoints.simulate import study
from baton.entrypoints.simulate.job_records import JobRecord
from baton.entrypoints.simulate.runs import Plan, make_simulation, run
from baton.entrypoints.simulate.study import (
    RunLines,
    find_enough_states,
    find_peak,
    find_peaks,
    find_states,
    peak_plan,
    run_all,
    states_plan,
)
from tests.doubles.simulated import talk

SMALL = Plan(arm="fcfs", gpu="RTX6000", pool=3000, scale=0.2, num_jobs=6, rate=2.0, trim=0.0)


def plans(count: int = 3) -> list[Plan]:
    return [msgspec.structs.replace(SMALL, seed=seed) for seed in range(count)]


def without_times(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in ("wall_s", "key")}


def test_figures_do_not_depend_on_the_number_of_processes() -> None:
    here = run_all(plans(2), RunLines(), processes=1)
    assert [without_times(line) for line in run_all(plans(2), RunLines(), processes=2)] == list(
        map(without_times, here)
    )
    first, second = (line["figures"] for line in here)
    assert first["jobs_done"] == 6 and first["service_s"]["mean"] != second["service_s"]["mean"]


def test_policies_run_identical_jobs() -> None:
    played = [make_simulation(msgspec.structs.replace(SMALL, arm=arm)) for arm in ("fcfs", "lpm", "continuum")]
    jobs = [[record.job for record in simulation.records] for simulation in played]
    assert jobs[0] == jobs[1] == jobs[2]


def test_study_resumes_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "runs.jsonl"
    assert len(run_all(plans(), RunLines(path), processes=1, most=2)) == 2
    ran: list[int] = []

    def noted(plan: Plan) -> dict[str, Any]:
        ran.append(plan.seed)
        return run(plan)

    monkeypatch.setattr(study, "run", noted)
    found = run_all(plans(), RunLines(path), processes=1)
    assert ran == [2] and [line["plan"]["seed"] for line in found] == [0, 1, 2]
    assert len(path.read_text().splitlines()) == 3


def test_truncated_result_line_is_rerun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.jsonl"
    whole = run_all(plans(2), RunLines(path), processes=1)
    path.write_text(path.read_text()[:-40])
    found = run_all(plans(2), RunLines(path), processes=1)
    assert "1 lines of" in capsys.readouterr().err
    assert list(map(without_times, found)) == list(map(without_times, whole))
    assert all(RunLines(path).get_line(plan.key) for plan in plans(2))


class Saturated:
    """A server that completes three jobs a second, and half of that once it is asked for more than five."""

    def __init__(self, plan: Plan) -> None:
        self._pace = min(plan.rate, 3.0 if plan.rate <= 5 else 1.5)
        self._plan = plan

    def run(self) -> list[JobRecord]:
        jobs = [talk(str(n), n / self._plan.rate, (1, 1, 0.0)) for n in range(self._plan.num_jobs)]
        return [JobRecord(job, end=(number + 1) / self._pace) for number, job in enumerate(jobs)]


def test_peak_is_the_highest_completion_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "make_simulation", Saturated)
    found = find_peak(peak_plan(SMALL, 5.0))
    assert found["peak"] == pytest.approx(3.0, rel=0.02)
    assert [rate for rate, _ in found["tried"]] == pytest.approx([0.25, 0.5, 1, 2, 2.378, 2.828, 3.364, 4], rel=1e-3)
    lines = RunLines(tmp_path / "runs.jsonl")
    others = [msgspec.structs.replace(SMALL, arm="lpm", seed=9), msgspec.structs.replace(SMALL, arm="fcfs+pin")]
    peaks = find_peaks(others, 5.0, lines, processes=1)
    assert list(peaks.values()) == [found["peak"]]  # one for all policies and seeds of a cell
    monkeypatch.setattr(study, "find_peak", None)
    assert find_peaks(others, 5.0, RunLines(tmp_path / "runs.jsonl"), processes=1) == peaks


@pytest.mark.parametrize(
    ("needed", "floor", "found"), [(20, 0.0, 23), (3, 0.0, 4), (16, 0.2, 16), (17, 0.0, 19), (200, 0.0, 192)]
)
def test_enough_states_are_found_by_doubling(
    needed: int, floor: float, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six jobs of eight turns: 192 states are one for every place."""
    pools: set[int] = set()

    def lossy(plan: Plan) -> dict[str, Any]:
        pools.add(plan.pool)
        return {"figures": {"no_state_share": floor + (0.3 if plan.states < needed and plan.states < 192 else 0.009)}}

    monkeypatch.setattr(study, "run", lossy)
    line = find_enough_states(states_plan(msgspec.structs.replace(SMALL, pool=0, seed=3)))
    assert line["states"] == found
    assert line["tried"][0][0] <= 8 and line["tried"][-1] == (192, floor + 0.009)
    assert len(pools) == 1 and 0 not in pools, "the KV pool stays as it is"


def test_states_are_sought_once_for_all_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, sought = RunLines(tmp_path / "runs.jsonl"), list[int]()

    def noted(plan: Plan) -> dict[str, Any]:
        sought.append(plan.states)
        return {"figures": {"no_state_share": 0.0}}

    monkeypatch.setattr(study, "run", noted)
    wanted = [msgspec.structs.replace(plan, states=states) for plan in plans(2) for states in (8, 16)]
    (found,) = find_states(wanted, lines, processes=1)
    assert found["states"] == 4 and sought == [192, 4]
    assert find_states(wanted, RunLines(tmp_path / "runs.jsonl"), processes=1)[0]["states"] == 4
    assert len(sought) == 2


def test_plan_is_validated_before_it_runs() -> None:
    with pytest.raises(ValueError, match="needs a host tier; give its size with --host-gb"):
        make_simulation(msgspec.structs.replace(SMALL, arm="fcfs+host"))
    with pytest.raises(ValueError, match="no setting chunk"):
        make_simulation(msgspec.structs.replace(SMALL, settings={"chunk": 1}))


def test_plan_settings_reach_the_scheduler() -> None:
    more = {"host_gb": 0.5, "pool": 20_009, "settings": {"page_size": 16, "max_jobs": 7}}
    plan = msgspec.structs.replace(SMALL, arm="lpm+pin+host", **more)
    played = make_simulation(plan)
    config = played.scheduler._config
    assert (config.schedule_policy, config.page_size, config.max_jobs) == ("lpm", 16, 7)
    assert config.max_total_tokens == 20_000  # whole pages
    host = played.engine.host
    assert host is not None and host.allocator.total_tokens == int(0.5e9 / 131072) // 16 * 16
    played.run()
    assert played.scheduler.lease_counts.granted == 6 * 7  # all turns but each job's last
    plain = make_simulation(SMALL)
    plain.run()
    assert plain.engine.host is None and plain.scheduler.lease_counts.granted == 0
