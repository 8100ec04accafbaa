"""The command as an operator calls it, on a real server with the toy model."""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.entrypoints import command
from baton.entrypoints.bench import __main__ as bench
from tests.doubles.server_under_test import ServerUnderTest, free_port

ROOT = Path(__file__).parents[3]
FLAGS = ("--max-total-tokens", "16384", "--dtype", "float32", "--device", "cpu", "--api-key", "sesame")
SHORT = ["--random-input-len", "48", "--random-output-len", "6"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    folder = tmp_path_factory.mktemp("server")
    with ServerUnderTest(ROOT / "examples/toy_model", folder, *FLAGS, behaviour=None) as running:
        running.client.headers["Authorization"] = "Bearer sesame"
        yield running.wait_ready()


def run(server: ServerUnderTest, *flags: str, key: str = "sesame") -> int:
    return command.main(["bench", "--base-url", server.url, "--api-key", key, *SHORT, *flags])


@pytest.mark.process
@pytest.mark.parametrize("backend", ["openai", "openai-chat", "baton"])
def test_every_backend_measures_the_requests_that_the_server_counts(
    backend: str, server: ServerUnderTest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    before = server.metric("generation_tokens_total")
    flags = ("--backend", backend, "--num-prompts", "5", "--max-concurrency", "3", "--output-file", str(file))
    assert run(server, *flags) == 0
    report = json.loads(file.read_text())
    part = report["runs"]["prefix"]
    assert (part["completed"], part["failed"], part["not_sent"]) == (5, 0, 0)
    assert part["total_output_tokens"] == 30, "no end token ended an answer"
    assert server.metric("generation_tokens_total") - before == 30 + 2, "those of the two probes, too"
    mean = part["total_input_tokens"] / 5
    assert 0.6 * 48 < mean < 1.4 * 48, "about the wanted length"
    assert 0 < part["median_ttft_ms"] <= part["p99_ttft_ms"] < part["p99_e2e_latency_ms"]
    for request in part["requests"]:
        assert request["output_tokens"] == 6 and 0 < request["ttft_ms"] <= request["e2e_latency_ms"]
        assert len(request["itl_ms"]) <= 5
    assert report["model"] == "examples/toy_model" or report["model"].endswith("toy_model")
    assert "sesame" not in file.read_text()
    printed = capsys.readouterr()
    for words in ("TTFT, ms", "ITL, ms", "TPOT, ms", "E2E, ms", "median", "p99", "output tokens/s", "failed requests"):
        assert words in printed.out
    assert "5 prompts, 48 + 6 tokens" in printed.err, "progress goes to stderr"


@pytest.mark.process
def test_continuations_inherit_what_prefixes_send_again(
    server: ServerUnderTest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    flags = ("--backend", "baton", "--num-prompts", "3", "--turns", "3", "--output-file", str(file), "--flush-cache")
    assert run(server, *flags) == 0
    report = json.loads(file.read_text())
    for way in ("prefix", "continuation"):
        rows = report["runs"][way]["turns"]
        assert [row["completed"] for row in rows] == [3, 3, 3]
        assert rows[0]["mean_cached_tokens"] < 5 < rows[1]["mean_cached_tokens"] < rows[2]["mean_cached_tokens"]
        for earlier, later in itertools.pairwise(rows):
            assert later["mean_input_tokens"] > earlier["mean_input_tokens"] + 6
    for row in report["runs"]["continuation"]["turns"][1:]:
        assert row["paths"] == {"handoff": 3}
    inherited = report["runs"]["continuation"]["turns"]
    # All of the turn before, of whose answer the last token was sampled but never computed.
    assert inherited[2]["mean_cached_tokens"] >= inherited[1]["mean_input_tokens"] + 5
    assert set(report["savings"]) == {"prefix", "continuation"}
    printed = capsys.readouterr().out
    assert "handoff 3" in printed and "a continuation instead of the whole conversation" in printed


@pytest.mark.process
def test_same_seed_sends_the_same_prompts(server: ServerUnderTest, tmp_path: Path) -> None:
    def cached(name: str, *flags: str) -> list[int]:
        file = tmp_path / name
        assert run(server, "--num-prompts", "3", "--max-concurrency", "1", "--output-file", str(file), *flags) == 0
        requests = json.loads(file.read_text())["runs"]["prefix"]["requests"]
        return [request["input_tokens"] - request["cached_tokens"] for request in requests]

    assert min(cached("a", "--seed", "7")) > 10
    assert cached("b", "--seed", "7") == [1, 1, 1], "all but the last token, which gives the first logits"
    assert min(cached("c", "--seed", "8")) > 10
    assert min(cached("d", "--seed", "7", "--flush-cache")) > 10


@pytest.mark.process
def test_refusals_are_shown_in_one_line_each(server: ServerUnderTest, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(server, key="wrong") == 2
    said = capsys.readouterr()
    assert not said.out
    assert said.err == (
        f"baton bench: {server.url}/v1/models answered 401: the API key is missing or wrong; send Authorization: "
        "Bearer KEY, or x-api-key: KEY\n"
    )
    assert run(server, "--random-output-len", "100000", "--num-prompts", "2", "--backend", "baton") == 1
    said = capsys.readouterr()
    assert said.out.count("1 × ") == 2 and "answered 400" in said.out and "TTFT, ms               -" in said.out


@pytest.mark.process
def test_program_of_its_own_ends_with_its_status(server: ServerUnderTest) -> None:
    line = [sys.executable, "-m", "baton.entrypoints.command", "bench", "--base-url", server.url, *SHORT]
    environment = {**os.environ, "OPENAI_API_KEY": "sesame"}
    done = subprocess.run([*line, "--num-prompts", "1"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "completed requests" in done.stdout


def test_server_that_is_not_there_is_an_error_of_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    assert bench.main(["--base-url", f"http://127.0.0.1:{port}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"baton bench: cannot connect to http://127.0.0.1:{port}: ") and said.count("\n") == 1
    assert bench.main(["--base-url", "localhost:1"]) == 2
    assert "is no address of the form http://HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--num-prompts", "0"], "--num-prompts: 0 is not a whole number of at least 1"),
        (["--request-rate", "0"], "--request-rate: 0 is not a number above 0, or inf"),
        (["--request-rate", "nan"], "--request-rate: nan is not a number above 0, or inf"),
        (["--turns-by", "prefix"], "--turns-by needs --turns of at least 2"),
        (["--turns", "2", "--turns-by", "continuation"], "--turns-by continuation needs --backend baton"),
        (["--output-file", "/no/such/folder/a.json"], "there is no folder /no/such/folder"),
        (["--output-file", "/tmp"], "it is a folder; give the name of a file"),
        (["--api-key", "a\nb"], "a key has only printable ASCII characters"),
        (["--num-prompt", "3"], "unrecognized arguments: --num-prompt 3"),
        (["--backend", "vllm"], "invalid choice: 'vllm'"),
    ],
)
def test_wrong_flags_say_what_they_take(flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(flags)
    assert ended.value.code == 2 and reason in capsys.readouterr().err


@pytest.mark.process
def test_open_files_suffice_for_all_requests_at_once(server: ServerUnderTest) -> None:
    """A shell's usual soft limit is 1024; here it is a hundred."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, limit[1]))
    try:
        assert run(server, "--num-prompts", "150", "--random-input-len", "4", "--random-output-len", "2") == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_hard_limit_on_open_files_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (50, 80))
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
    bench._allow_connections(100)
    assert set_to == [(80, 80)]
    assert "only 80 files may be open, too few for 100 requests at once" in capsys.readouterr().err
    bench._allow_connections(16)
    assert set_to == [(80, 80), (80, 80)] and not capsys.readouterr().err


def test_interrupt_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def interrupted(_: object) -> dict:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "bench", interrupted)
    assert bench.main([]) == 130
    assert capsys.readouterr().err == "baton bench: interrupted\n"


def test_key_comes_from_the_environment_like_openais(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    assert bench.parse([]).api_key == "sesame" and bench.parse(["--api-key", "mine"]).api_key == "mine"


def test_ways_follow_from_backend_and_turns() -> None:
    assert bench.parse(["--turns", "2"]).turns_by == ["prefix"] == bench.parse(["--backend", "baton"]).turns_by
    assert bench.parse(["--turns", "2", "--backend", "baton"]).turns_by == ["prefix", "continuation"]
    both = ["--turns", "2", "--backend", "baton", "--turns-by", "continuation", "continuation"]
    assert bench.parse(both).turns_by == ["continuation"]
