"""Claude Code, Codex and opencode, as npm has them, against a server: each runs a tool that the scripted model calls,
and continues its session; and each passes tasks on to subagents. Every request is answered with 200, and each later one
of an agent computes its own new tokens only.

`make test-harnesses` installs the programs and says where, in BATON_HARNESSES. They get an empty HOME, a dummy key, and
nothing but the loopback address to talk to.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from baton.runtime.text.tokenizer import Tokenizer
from tests.doubles.foreign_envs import ROOT
from tests.doubles.page_flood import PageFlood
from tests.doubles.pressed_tools import measure_fill_time, traced_jobs
from tests.doubles.server_under_test import ServerUnderTest, free_port
from tests.doubles.small_model import write_small_model
from tests.doubles.tool_loops import TurnUsage

PROGRAMS = os.environ.get("BATON_HARNESSES", "")

pytestmark = [
    pytest.mark.harness,
    pytest.mark.skipif(not PROGRAMS, reason="needs programs from npm: make test-harnesses"),
]

MODEL_NAME = "some-model"
SECONDS = 120
SIDE_TASK = 2000
"""Requests with fewer tokens, such as for a session's title or in a flood, are no turns of an agent."""
PAGE, PAGES = 1024, 96
DEVICE = {"prompt_token_s": 0.0001}
"""A slower device, emulated by sleeps: the break-even time, that of computing a whole pool, is 10 s or more."""
SHARE = 0.9
"""Share of the requests after tools that take less than the break-even time, during a flood, that must compute only
their own new tokens."""


@dataclass(frozen=True)
class Harness:
    """write_config: (HOME, the server's URL) -> variables of the environment. begin, go_on: the command, with the words
    of the user left out. tool, argument: what runs a command. more: other arguments. delegate: a call that passes a
    task on to a subagent. nests: its subagents have subagents. job: its main agent's job, and subagent_job, as regular
    expressions of /jobs."""

    name: str
    write_config: Callable[[Path, str], dict[str, str]]
    begin: list[str]
    go_on: list[str]
    tool: str
    argument: str
    delegate: Callable[[str], str]
    job: str
    subagent_job: str
    more: dict[str, Any] = field(default_factory=dict)
    nests: bool = False

    @property
    def subagents(self) -> int:
        """Subagents of a delegated task."""
        return 3 if self.nests else 2

    def call(self, command: str) -> str:
        return tool_call(self.tool, **{self.argument: command, **self.more})


def tool_call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _claude_config(home: Path, url: str) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "dummy",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
    }


def _codex_config(home: Path, url: str) -> dict[str, str]:
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(
        f'model = "{MODEL_NAME}"\nmodel_provider = "baton"\n\n[model_providers.baton]\nname = "Baton"\n'
        f'base_url = "{url}/v1"\nenv_key = "BATON_API_KEY"\nwire_api = "responses"\n'
    )
    return {"BATON_API_KEY": "dummy"}


def _opencode_config(home: Path, url: str) -> dict[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Baton",
        "options": {"baseURL": f"{url}/v1", "apiKey": "dummy"},
        "models": {MODEL_NAME: {"name": "Baton", "limit": {"context": 65536, "output": 4096}}},
    }
    config = {
        "autoupdate": False,
        "share": "disabled",
        "enabled_providers": ["baton"],
        "model": f"baton/{MODEL_NAME}",
        "provider": {"baton": provider},
    }
    (home / ".config" / "opencode").mkdir(parents=True)
    (home / ".config" / "opencode" / "opencode.json").write_text(json.dumps(config))
    return {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1"}


_CLAUDE = ["claude", "--print", "--allowedTools", "Bash", "--model", MODEL_NAME, "--output-format", "json"]
_CODEX = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
_OPENCODE = ["opencode", "run", "--format", "json"]

_UUID = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"

HARNESSES = [
    Harness(
        "Claude Code",
        _claude_config,
        _CLAUDE,
        [*_CLAUDE, "--continue"],
        tool="Bash",
        argument="command",
        delegate=lambda task: tool_call("Agent", description="Greets", prompt=task, subagent_type="general-purpose"),
        job=f"claude-code:{_UUID}",
        subagent_job=f"claude-code:{_UUID}/[0-9a-f]+",
        more={"description": "Greets"},
        nests=True,
    ),
    Harness(
        "Codex",
        _codex_config,
        _CODEX,
        [*_CODEX, "resume", "--last"],
        tool="exec_command",
        argument="cmd",
        more={"yield_time_ms": 1000 * SECONDS},
        delegate=lambda task: tool_call("multi_agent_v1__spawn_agent", message=task),
        job=f"codex:{_UUID}",
        subagent_job=f"codex:{_UUID}",
    ),
    Harness(
        "opencode",
        _opencode_config,
        _OPENCODE,
        [*_OPENCODE, "--continue"],
        tool="bash",
        argument="command",
        delegate=lambda task: tool_call("task", description="Greets", prompt=task, subagent_type="general"),
        job="session:ses_[0-9A-Za-z]+",
        subagent_job="session:ses_[0-9A-Za-z]+",
        more={"description": "Greets"},
    ),
]


def words(harness: Harness, number: int) -> str:
    return f"Greet number {number} with a tool, {harness.name}"


SCRIPT = [
    entry
    for harness in HARNESSES
    for number in (1, 2)
    for entry in (
        [words(harness, number), harness.call(f"echo greeting-$((40+{number}))-{harness.tool}")],
        [f"greeting-{40 + number}-{harness.tool}", f"I have greeted {number}."],
    )
]
"""The number in a result is the shell's: a call that was not run has none."""

IN_NAMESPACE = "Close the agent that is not there"
CLOSE = '<tool_call>\n{"name": "multi_agent_v1__close_agent", "arguments": {"target": "nobody"}}\n</tool_call>'
SCRIPT += [[IN_NAMESPACE, CLOSE], ["nobody", "There is none."]]

# Codex goes on at once, and has to wait for its agent, which it names.
NAMED_AGENT = ['"nickname"', tool_call("multi_agent_v1__wait_agent", targets=["FOUND"]), '"agent_id":"([0-9a-f-]+)"']


def delegated(harness: Harness, first: str = "") -> Iterator[list[str]]:
    """The script of a task in parts, one after the other, each by a subagent that runs a tool. With subagents of
    subagents the last part is passed on by the one that has the second. first: a command that the tool runs first."""

    def task(part: str) -> str:
        return f"Do part {part} for {harness.name}"

    def end(part: str) -> str:
        return f"Part {part} is done by {harness.tool}"

    said = {"one": f"{end('one')}.", "two": f"{end('two')}."}
    if harness.nests:
        said |= {"two": harness.delegate(task("three")), "three": f"{end('three')}."}
        yield [end("three"), f"{end('two')}."]
    for part, answer in said.items():
        yield [task(part), harness.call(f"{first}echo {part}-$((41+1))-{harness.tool}")]
        yield [f"{part}-42-{harness.tool}", answer]
    yield [f"Delegate it, {harness.name}", harness.delegate(task("one"))]
    yield [end("one"), harness.delegate(task("two"))]
    yield [end("two"), f"All is done by {harness.tool}."]


DELEGATED = [entry for harness in HARNESSES for entry in delegated(harness)]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A line for each request."""
    return tmp_path_factory.mktemp("log") / "requests.jsonl"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path, log: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = [
        *("--load-format", "dummy", "--device", "cpu", "--dtype", "float32", "--max-total-tokens", "262144"),
        *("--served-model-name", "small", "--serve-any-model-name", "--record-requests", str(log)),
        *("--normalize-prefix", "claude-code-billing,dates"),
    ]
    environment = {"BATON_SCRIPT": json.dumps([*SCRIPT, NAMED_AGENT, *DELEGATED])}
    folder, launcher = tmp_path_factory.mktemp("server"), "scripted_server.py"
    with ServerUnderTest(model, folder, *flags, behaviour={}, launcher=launcher, environment=environment) as running:
        yield running.wait_ready()


def run(harness: Harness, command: list[str], said: str, home: Path, variables: dict[str, str]) -> str:
    """What the program prints."""
    folder = home / "work"
    folder.mkdir(exist_ok=True)
    program = Path(PROGRAMS).resolve() / "node_modules" / ".bin" / command[0]
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), **variables}
    done = subprocess.run(
        [program, *command[1:], said],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, f"{harness.name} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def recorded(log: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line for line in lines if "input_tokens" in line]


def turns_of_agents(log: Path, start: int) -> list[dict[str, Any]]:
    """The requests behind the first ``start`` that are no side tasks."""
    return [request for request in recorded(log)[start:] if request["input_tokens"] > SIDE_TASK]


def computed_twice(requests: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """The requests that extend an earlier one, as (number, the tokens they computed beyond their new ones and the last
    of the answer before: that was sampled and never computed)."""
    found: list[tuple[int, int]] = []
    for number, request in enumerate(requests):
        ids = request["input_ids"]
        begun = [each for each in requests[:number] if ids[: each["input_tokens"]] == each["input_ids"]]
        if before := max(begun, key=lambda each: each["input_tokens"], default=None):
            new = len(ids) - before["input_tokens"] - before["output_tokens"]
            computed = len(ids) - request["cached_tokens"]
            print(f"{len(ids)} tokens, {new} new, {computed} computed")
            found.append((number, max(0, computed - new - 1)))
    return found


def jobs(server: ServerUnderTest) -> dict[str, str | None]:
    """The parent of each job."""
    return {job["job_id"]: job["parent_job_id"] for job in server.client.get("/jobs").json()["jobs"]}


def refusals(server: ServerUnderTest) -> list[str]:
    return [
        line for line in server.client.get("/metrics").text.splitlines() if line.startswith("baton:num_errors_total")
    ]


@pytest.mark.timeout(4 * SECONDS)
@pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: harness.name)
def test_harness_session_calls_a_tool_and_continues(
    harness: Harness, server: ServerUnderTest, log: Path, tmp_path: Path
) -> None:
    variables = harness.write_config(tmp_path, server.url)
    before, refused, known = len(recorded(log)), refusals(server), set(jobs(server))
    for number, command in ((1, harness.begin), (2, harness.go_on)):
        printed = run(harness, command, words(harness, number), tmp_path, variables)
        assert f"I have greeted {number}." in printed, printed
        assert refusals(server) == refused, server.log
    server.wait_until(lambda: server.running() == 0, "the end of all requests")
    requests = turns_of_agents(log, before)
    assert len(requests) == 4, "a call and an answer, twice"
    assert computed_twice(requests) == [(1, 0), (2, 0), (3, 0)]
    ((job, parent),) = [(job, parent) for job, parent in jobs(server).items() if job not in known]
    assert re.fullmatch(harness.job, job) and parent is None


def delegate(harness: Harness, server: ServerUnderTest, log: Path, home: Path) -> list[tuple[dict[str, Any], int]]:
    """The later requests, each with the tokens it computed twice (see `computed_twice`)."""
    variables = harness.write_config(home, server.url)
    before, refused = len(recorded(log)), refusals(server)
    printed = run(harness, harness.begin, f"Delegate it, {harness.name}", home, variables)
    assert f"All is done by {harness.tool}." in printed, printed
    server.wait_until(lambda: server.running() == 0, "the end of all requests")
    assert refusals(server) == refused, server.log
    requests = turns_of_agents(log, before)
    later = computed_twice(requests)
    assert len(requests) - len(later) == 1 + harness.subagents, "first turns, of the main agent and each subagent"
    assert len(later) >= 2 + harness.subagents, "turns behind results, of the main agent and each subagent"
    return [(requests[number], tokens) for number, tokens in later]


@pytest.mark.timeout(4 * SECONDS)
@pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: harness.name)
def test_subagents_compute_only_their_new_tokens(
    harness: Harness, server: ServerUnderTest, log: Path, tmp_path: Path
) -> None:
    """Each is a job, with the job of the agent that started it as its parent."""
    known = set(jobs(server))
    more = [tokens for _, tokens in delegate(harness, server, log, tmp_path)]
    assert not any(more), more
    parents = {job: parent for job, parent in jobs(server).items() if job not in known}
    print(parents)
    (main,) = [job for job, parent in parents.items() if parent is None]
    subagents = parents.keys() - {main}
    assert re.fullmatch(harness.job, main) and len(subagents) == harness.subagents
    assert all(re.fullmatch(harness.subagent_job, job) for job in subagents)
    of_main = {job for job in subagents if parents[job] == main}
    assert len(of_main) == 2 and all(parents[job] in of_main for job in subagents - of_main)


@pytest.mark.timeout(6 * SECONDS)
@pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: harness.name)
def test_subagents_keep_their_kv_in_a_flood(
    harness: Harness, model: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Each tool of a subagent runs for a share of the break-even time, as the server measures it, and ends with prompts
    of others that take all memory which nothing keeps."""
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    log, trace = folder / "requests.jsonl", folder / "jobs.jsonl"
    tool = f"{sys.executable} -m tests.doubles.pressed_tools http://127.0.0.1:{port} {PAGES}"
    script = [NAMED_AGENT, *delegated(harness, f"PYTHONPATH={ROOT} {tool} && ")]
    flags = [
        *("--load-format", "dummy", "--device", "cpu", "--dtype", "float32", "--max-total-tokens", str(PAGES * PAGE)),
        *("--page-size", str(PAGE), "--served-model-name", "small", "--serve-any-model-name"),
        *("--max-running-requests", str(2 * PAGES)),
        *("--record-requests", str(log), "--scheduler-trace", str(trace)),
        *("--schedule-policy", "auto", "--max-leased-ratio", "0.9"),
    ]
    environment = {"BATON_SCRIPT": json.dumps(script), "BATON_DEVICE": json.dumps(DEVICE)}
    with ServerUnderTest(
        model, folder, *flags, behaviour={}, port=port, launcher="scripted_server.py", environment=environment
    ) as server:
        measure_fill_time(server.wait_ready().url, PageFlood(server.url, "first", PAGES))
        later = delegate(harness, server, log, tmp_path)
        fill_s = server.metric("fill_time_seconds")
    away_s = [
        (turn, seconds) for job in traced_jobs(trace) for turn, seconds in zip(job.turns, job.away_s) if seconds > 0
    ]
    more: list[int] = []
    for request, tokens in later:
        turn = TurnUsage(request["input_tokens"], request["cached_tokens"], request["output_tokens"])
        seconds = away_s.pop([each for each, _ in away_s].index(turn))[1]
        print(f"{seconds:.2f} of {fill_s:.2f} s: {tokens}")
        more += [tokens] if seconds < fill_s else []
    assert len(more) >= harness.subagents, "this machine is too busy for tools shorter than that"
    assert sum(not tokens for tokens in more) >= SHARE * len(more), more


@pytest.mark.timeout(2 * SECONDS)
def test_codex_accepts_a_namespaced_call(server: ServerUnderTest, model: Path, log: Path, tmp_path: Path) -> None:
    codex = next(harness for harness in HARNESSES if harness.name == "Codex")
    printed = run(codex, codex.begin, IN_NAMESPACE, tmp_path, codex.write_config(tmp_path, server.url))
    assert "There is none." in printed
    server.wait_until(lambda: server.running() == 0, "the end of all requests")
    prompt = Tokenizer.load(model).decode(recorded(log)[-1]["input_ids"], skip_special_tokens=False)
    _, _, result = prompt.rpartition("<tool_response>")
    print(result)
    assert CLOSE.splitlines()[1] in prompt and "unsupported call" not in result and "nobody" in result
