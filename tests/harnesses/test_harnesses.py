"""Claude Code, Codex and opencode, as npm has them, against a server: each runs a tool that the scripted model calls,
and continues its session. Every request is answered with 200, and all but the first of a session find what came before
in the cache.

`make test-harnesses` installs the programs and says where, in BATON_HARNESSES. They get an empty HOME, a dummy key, and
nothing but the loopback address to talk to.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from baton.runtime.text.tokenizer import Tokenizer
from tests.doubles.server_under_test import ServerUnderTest
from tests.doubles.small_model import write_small_model

PROGRAMS = os.environ.get("BATON_HARNESSES", "")

pytestmark = [
    pytest.mark.harness,
    pytest.mark.skipif(not PROGRAMS, reason="needs programs from npm: make test-harnesses"),
]

MODEL_NAME = "some-model"
SHARE_CACHED = 0.9
SECONDS = 120


@dataclass(frozen=True)
class Harness:
    """write_config: (HOME, the server's URL) -> variables of the environment. begin, go_on: the command, with the words
    of the user left out. tool, argument: what runs a command. more: other arguments."""

    name: str
    write_config: Callable[[Path, str], dict[str, str]]
    begin: list[str]
    go_on: list[str]
    tool: str
    argument: str
    more: dict[str, Any] = field(default_factory=dict)

    def call(self, command: str) -> str:
        arguments = {self.argument: command, **self.more}
        return f"<tool_call>\n{json.dumps({'name': self.tool, 'arguments': arguments})}\n</tool_call>"


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

HARNESSES = [
    Harness(
        "Claude Code", _claude_config, _CLAUDE, [*_CLAUDE, "--continue"], "Bash", "command", {"description": "Greets"}
    ),
    Harness("Codex", _codex_config, _CODEX, [*_CODEX, "resume", "--last"], "exec_command", "cmd"),
    Harness("opencode", _opencode_config, _OPENCODE, [*_OPENCODE, "--continue"], "bash", "command",
            {"description": "Greets"}),
]  # fmt: skip


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
    environment = {"BATON_SCRIPT": json.dumps(SCRIPT)}
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
    before, refused = len(recorded(log)), refusals(server)
    for number, command in ((1, harness.begin), (2, harness.go_on)):
        printed = run(harness, command, words(harness, number), tmp_path, variables)
        assert f"I have greeted {number}." in printed, printed
        assert refusals(server) == refused, server.log
    server.wait_until(lambda: server.running() == 0, "the end of all requests")
    requests = [request for request in recorded(log)[before:] if request["input_tokens"] > 2000]
    for request in requests:
        print({name: request[name] for name in ("input_tokens", "cached_tokens", "output_tokens")})
    assert len(requests) == 4, "a call and an answer, twice"
    for earlier, later in itertools.pairwise(requests):
        assert later["input_tokens"] > earlier["input_tokens"]
        assert later["cached_tokens"] > SHARE_CACHED * earlier["input_tokens"], (earlier, later)


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
