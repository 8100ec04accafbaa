"""The command line, from flags to files."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from baton.entrypoints.simulate.__main__ import main
from baton.entrypoints.simulate.arguments import parse, plans
from baton.entrypoints.simulate.cost_model import CARDS, MODELS
from baton.entrypoints.simulate.work.tool_shapes import SHAPES
from baton.entrypoints.simulate.work.workloads import WORKLOADS

HOST = ["--host-gb", "1", "--policies", "fcfs", "fcfs+host"]
SMALL = ["--gpu", "RTX6000", "--pool-tokens", "3000", "--scale", "0.2", "--num-jobs", "8", "--rate", "2"]


def test_simulate_writes_reports_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*SMALL, "--seeds", "2", "--policies", "fcfs", "continuum", "lpm+host", "--host-gb", "1"]
    flags += ["--out", str(tmp_path)]
    assert main([*flags, "--check", "50", "--limit", "4"]) == 0
    assert "2 of 6 runs remain" in capsys.readouterr().out
    assert main([*flags, "--check", "50"]) == 0
    said = capsys.readouterr().out
    assert "RTX6000, llama-3.1-8b, pool 3000: agents, shell tools × 0.2, 2 jobs/s" in said
    assert "lpm+host 1 GB" in said and "recommended" in said
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["runs"]) == 6 and all(run["figures"]["jobs_done"] == 8 for run in report["runs"])
    assert len(report["recommended"]) >= 1
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 6


def test_simulate_replays_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = {"prompt_tokens": 20, "output_tokens": 5, "tool": "ls", "tool_s": 1}
    jobs = [{"job_id": n, "arrival": i, "turns": [first, first | {"prompt_tokens": 40}]} for i, n in enumerate("abcd")]
    trace = tmp_path / "jobs.jsonl"
    trace.write_text("".join(json.dumps(job) + "\n" for job in jobs))
    assert main([str(trace), "--policies", "fcfs", "lpm", "--rate", "1", "2", "--trim", "0"]) == 0
    said = capsys.readouterr().out
    assert "jobs.jsonl, 1 ×" in said and "jobs.jsonl, 2 ×" in said
    trace.write_text(trace.read_text() + "{\n")
    assert main([str(trace)]) == 2
    assert "jobs.jsonl, line 5" in capsys.readouterr().err


LATENTS = {
    "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "kv_lora_rank": 20, "q_lora_rank": 14, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 6,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1, "norm_topk_prob": True,
}  # fmt: skip
HYBRID = {
    "architectures": ["Lfm2ForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512, "norm_eps": 1e-5,
    "layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "said"),
    [(LATENTS, "keeps latents, all in one pool; leave it out"), (HYBRID, "with recurrent states all layers share")],
)
def test_windows_that_contradict_the_model_are_refused(
    config: dict[str, object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit):
        parse(["--model", str(tmp_path), "--window", "64", "--pool-tokens", "9999"])
    assert said in " ".join(capsys.readouterr().err.split())


def test_model_folder_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    flags = ["--model", str(tmp_path), "--pool-tokens", "5000", "--max-states", "4", "64", "--scale", "0.2"]
    flags += ["--num-jobs", "8", "--rate", "2", "--seeds", "1", "--policies", "fcfs", "--trim", "0"]
    assert main([*flags, "--out", str(tmp_path), "--find-states"]) == 0
    said = capsys.readouterr().out
    assert "again   no state  leases" in said and "no window  leases" not in said
    (states,) = json.loads((tmp_path / "report.json").read_text())["states"]
    assert f"{states['states']} states are enough for fcfs; prompt tokens lost to no_state: with 4 states " in said
    assert f"H200, {tmp_path}, pool 5000, 4 states: agents" in said and "pool 5000, 64 states" in said
    few, enough = json.loads((tmp_path / "report.json").read_text())["runs"]
    assert few["figures"]["no_state_share"] > 0.1 > 0.01 > enough["figures"]["no_state_share"]
    assert few["pools"] == {
        "tokens": 5000, "page_size": 1, "bytes_per_token": 64 * 4 * 2, "states": 4, "bytes_per_state": 64 * 2 * 4
    }  # fmt: skip


def test_pools_of_a_trace_stand_for_those_of_the_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"tokens": 4096, "page_size": 16, "bytes_per_token": 8, "states": 5, "bytes_per_state": 96}
    events = [{"event": "start", "time": 0.0}, {"event": "pools", "time": 0.0, **sizes, "host_tokens": 8192}]
    for at, rid, prompt in ((1.0, "1", 50), (4.0, "2", 90)):
        names = {"job_id": "a", "rid": rid}
        events.append({"event": "arrival", "time": at, **names, "prompt_tokens": prompt})
        events.append({"event": "departure", "time": at + 1, **names, "output_tokens": 9})
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert main([str(trace), "--policies", "fcfs", "fcfs+host", "--trim", "0", "--out", str(tmp_path)]) == 0
    assert "H200, llama-3.1-8b, the trace's pools: " in capsys.readouterr().out
    plain, host = (run["pools"] for run in json.loads((tmp_path / "report.json").read_text())["runs"])
    assert plain == sizes and host == sizes | {"host_tokens": 8192, "host_states": 10}
    (plan,) = plans(parse([str(trace), "--gpu", "H100", "--policies", "fcfs"]), {})
    assert plan.recorded is None, "a card was asked for"
    with pytest.raises(SystemExit):
        parse([str(trace), "--window", "64"])
    assert "with recurrent states all layers share one pool" in " ".join(capsys.readouterr().err.split())


def test_grid_has_every_combination_once() -> None:
    flags = ["--gpu", "A100-40", "H200", "--rate", "1", "2", "--seeds", "3", "--host-gb", "0", "10", "50"]
    found = plans(parse([*flags, "--policies", "fcfs", "lmcache-like", "handoff+pin"]), {})
    assert len({plan.key for plan in found}) == len(found) == 2 * 2 * 3 * (1 + 2 + 1)
    assert {plan.host_gb for plan in found if plan.arm == "lmcache-like"} == {10, 50}
    assert {(plan.arm, plan.pin_s) for plan in found if plan.arm != "lmcache-like"} == {("fcfs", 0), ("handoff+pin", 2)}
    assert {plan.num_jobs for plan in found} == {600, 1200}  # ten minutes


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--policies", "best"], "'best' is not POLICY[@TIME][+pin][+chat][+plain][+bare][+host]"),
        (["--policies", "fcfs+host"], "fcfs+host needs a host tier; give its size with --host-gb"),
        (["--trim", "0.5"], "--trim is 0.5"),
        (["--rate", "0"], "0 is not a number above 0"),
        (["--seeds", "0"], "0 is not a whole number of at least 1"),
        (["--burst", "0"], "0 is not a whole number of at least 1"),
        (["--jobs", "0"], "0 is not a whole number of at least 1"),
        (["--check", "-1"], "--check is -1"),
        (["--set", "page_size"], "not NAME=VALUE"),
        (["--set", "page_sizes=1"], "with a name among"),
        (["--set", "page_size=big"], "should be of type int"),
        (["--set", "enable_mixed_chunk=1"], "should be of type bool"),
        (["--set", "random_seed=x"], "should be of type int | None"),
        (["--set", "radix_eviction_policy=best"], "should be one of lru, "),
        (["--set", "page_size=0"], "--set: --page-size is 0; use a power of two"),
        (["--set", "max_running_requests=-1"], "--set: --max-running-requests is -1; use 1 or more"),
        (["--set", "schedule_policy=lpm"], "with a name among"),
        (["--set", "max_states=4"], "with a name among"),
        (["--model", "best"], "--model best is no folder, and none of llama-3.2-1b, "),
        (["--model", "qwen3-8b", "--max-states", "8"], "--max-states: qwen3-8b keeps no recurrent states"),
        (
            ["--max-states", "8", "--window", "64", "--pool-tokens", "9999"],
            "with recurrent states all layers share one",
        ),
        (
            ["--window", "64"],
            "--window: how much memory it saves depends on how many layers have it; give --pool-tokens",
        ),
        (["--find-states"], "--find-states is for models with recurrent states; name one, or give --max-states"),
        (["--swa-full-tokens-ratio", "0.3"], "--swa-full-tokens-ratio is for layers with a sliding window"),
        (["--window", "64", "--pool-tokens", "9999", *HOST], "with a host tier (fcfs+host) all layers share one pool"),
        (["trace.jsonl", "--load", "90"], "--load is for generated workloads"),
        (["--rate", "1", "--load", "90"], "not allowed with"),
        (["trace.jsonl", "--tools", "heavy"], "--tools is for generated workloads; a trace has its own"),
        (["trace.jsonl", "--minutes", "5"], "--minutes is for generated workloads"),
        (["trace.jsonl", "--one-shots", "0.5"], "--one-shots is for generated workloads"),
        (["--one-shots", "1.5"], "1.5 is not a share, 0 to 1"),
        (["--policies", "fcfs+chat+plain"], "turns are sent in one way only; keep one of +chat, +plain"),
        (["--host-gb", "10", "--policies", "fcfs", "handoff"], "none of --policies has one; add +host"),
        (["--out", "/proc/nope"], "--out /proc/nope: No such file or directory"),
    ],
)
def test_invalid_simulate_flags_are_refused(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(flags)
    assert said in " ".join(capsys.readouterr().err.split())


def test_model_too_large_for_the_card_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gpu", "RTX6000", "--model", "qwen2.5-14b", "--policies", "fcfs", "--rate", "1"]) == 2
    assert "Choose a larger card or a smaller model" in capsys.readouterr().err


def test_jobs_too_long_for_memory_are_an_error_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "jobs.jsonl"
    turn = {"prompt_tokens": 10**13, "output_tokens": 5}
    trace.write_text(json.dumps({"job_id": "a", "arrival": 0, "turns": [turn]}) + "\n")
    assert main([str(trace), "--policies", "fcfs"]) == 2
    assert "too long for this machine's memory" in capsys.readouterr().err


def test_simulate_imports_no_torch() -> None:
    program = "import sys, baton.entrypoints.simulate.__main__ as m; m.parse([]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_runs_end_with_the_command(number: signal.Signals) -> None:
    """Each of these runs takes many minutes. From a terminal, Ctrl-C goes to every process."""
    flags = ["--minutes", "10000", "--policies", "fcfs", "--seeds", "4", "--jobs", "2"]
    command = subprocess.Popen(
        [sys.executable, "-m", "baton.entrypoints.simulate", *flags],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    started: list[psutil.Process] = []
    try:
        while len(started := runs_of(command.pid)) < 2:
            assert command.poll() is None
            time.sleep(0.05)
        os.killpg(command.pid, number) if number == signal.SIGINT else command.send_signal(number)
        _, left = psutil.wait_procs(started, timeout=60)
        assert not left
        output, errors = command.communicate(timeout=60)
        if number == signal.SIGINT:
            assert (command.returncode, output, errors) == (130, "", "baton simulate: interrupted\n")
    finally:
        for process in (command, *started):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        command.wait()


def runs_of(pid: int) -> list[psutil.Process]:
    """The processes of a command that have begun to compute: they leave Ctrl-C to it."""
    found = []
    for child in psutil.Process(pid).children():
        status = Path(f"/proc/{child.pid}/status").read_text()
        ignored = int(status.split("SigIgn:")[1].split()[0], 16)
        if ignored & 1 << (signal.SIGINT - 1) and "spawn_main" in " ".join(child.cmdline()):
            found.append(child)
    return found


def test_simulator_page_names_every_choice() -> None:
    page = (Path(__file__).parents[3] / "docs" / "simulator.md").read_text()
    for name in (*CARDS, *MODELS, *WORKLOADS, *SHAPES):
        assert f"`{name}`" in page, name


def test_no_recommendation_when_no_job_completes(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--pool-tokens", "20", "--num-jobs", "5", "--rate", "1", "--seeds", "1", "--policies", "fcfs", "handoff"]
    assert main([*flags, "--gpu", "H200", "RTX6000"]) == 0
    assert capsys.readouterr().out.count("no job was completed, so there is no recommendation") == 2


def test_recommendation_warns_about_few_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-jobs", "8", "--rate", "1", "--seeds", "2", "--policies", "fcfs", "handoff"]
    assert main(flags) == 0
    assert "8 jobs per run are few" in capsys.readouterr().out
