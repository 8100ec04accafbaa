"""Both programs against a real server of the toy model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.agents.step_costs import Measured, Meter
from benchmarks.agents.verify_pin import parse_arguments, verify
from tests.doubles.benchmark_runs import run_benchmark
from tests.doubles.server_under_test import ServerUnderTest

pytestmark = [pytest.mark.process, pytest.mark.slow]

TOY_MODEL = Path(__file__).parents[3] / "examples" / "toy_model"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    """Pins last for as long as a slow machine may need."""
    flags = ("--max-total-tokens", "8192", "--schedule-policy", "continuum", "--default-retain-ttl", "60")
    with ServerUnderTest(TOY_MODEL, tmp_path_factory.mktemp("server"), *flags, behaviour=None) as running:
        yield running.wait_ready()


def test_verify_pin_passes_when_pins_hold(server: ServerUnderTest, capsys: pytest.CaptureFixture[str]) -> None:
    assert server.client.get("/health_generate").status_code == 200, "and it leaves nothing behind"
    words = ["--url", server.url, "--workload", "toy", "--turns", "3", "--jobs", "2"]
    assert asyncio.run(verify(parse_arguments(words))) == []
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 1 + 2 * 3
    assert asyncio.run(verify(parse_arguments([*words[:-1], "1", "--seed", "1"]))) == []


def test_kv_held_by_another_client_is_reported(server: ServerUnderTest) -> None:
    held = server.generate(text="held", sampling_params={"max_new_tokens": 1}, retain_ttl=60)
    assert held.status_code == 200
    found = asyncio.run(verify(parse_arguments(["--url", server.url, "--jobs", "1", "--turns", "2"])))
    assert "other requests hold KV" in found[0]
    assert server.client.post("/release", json={"rid": held.json()["meta_info"]["id"]}).status_code == 200


@pytest.mark.parametrize("plain", [False, True])
def test_agent_jobs_report_durations_and_cached_tokens(server: ServerUnderTest, plain: bool, tmp_path: Path) -> None:
    words = ["--url", server.url, "--policy", "continuum", "--workload", "toy", "--turns", "3", "--time-scale", "0.02"]
    words += ["--jps", "4", "--duration", "2", "--seed", "5", *(["--plain"] if plain else [])]
    known = {job["job_id"] for job in server.client.get("/jobs").json()["jobs"]}
    done = run_benchmark("agents.agent_jobs", *words, out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads((tmp_path / "agents_continuum_toy_4jps_0.json").read_text())
    assert run["jobs"] == run["jobs_done"] == len(run["job_durations"]) > 3 and run["errors"] == {}
    assert all(0 < service < whole for service, whole in zip(run["job_service_times"], run["job_durations"]))
    assert run["recomputed_tokens"] == 0 and run["per_turn_avg_cached_tokens"]["3"] > 0
    assert run["per_turn_avg_prompt_tokens"]["1"] < run["per_turn_avg_prompt_tokens"]["3"]
    assert 0 <= run["kv_usage"]["max"] <= 1 and run["followed"] > 0.5  # the server reports it once a second
    jobs = [job for job in server.client.get("/jobs").json()["jobs"] if job["job_id"] not in known]
    named = [job for job in jobs if not job["job_id"].startswith("chat-")]
    if plain:
        assert not named
    else:
        own = [job for job in named if not job["job_id"].startswith("words-")]
        assert len(own) == run["jobs"] and all(job["is_over"] and job["turns"] == 3 for job in own)


def test_step_meter_counts_context_and_new_tokens(server: ServerUnderTest) -> None:
    async def measure() -> tuple[Measured, Measured, Measured]:
        async with Meter(server.url, seed=3) as meter:
            return await meter.prompt(40, 0), await meter.prompt(40, 400), await meter.decode(3, 100)

    new, going_on, decoding = asyncio.run(measure())
    assert new.context - new.prompt_tokens < 30 and new.context > 30  # what all prompts begin with
    assert going_on.context > 400 and going_on.prompt_tokens < 100
    assert decoding.rows == 3 and 3 * 100 < decoding.context < 3 * 250 and decoding.seconds > 0
