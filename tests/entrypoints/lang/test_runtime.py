"""Servers by SGLang's names: one that runs already (RuntimeEndpoint), and one of the program's own (Runtime)."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.entrypoints.engine import Engine
from baton.entrypoints.lang import (
    BackendError,
    ProgramState,
    Runtime,
    RuntimeEndpoint,
    flush_cache,
    function,
    gen,
    get_server_info,
)
from baton.entrypoints.lang.backends import as_backend
from baton.entrypoints.lang.backends import runtime as runtime_module
from baton.entrypoints.lang.backends.runtime import command_line
from baton.entrypoints.server_args import compose, parse_command_line
from baton.entrypoints.server_config import UsageError
from tests.doubles.server_under_test import ServerUnderTest, free_port

TOY_MODEL = Path(__file__).parents[3] / "examples" / "toy_model"
PROMPT = "<|im_start|>user\nHow many lines are in poem.txt?<|im_end|>\n<|im_start|>assistant\n"
GREEDY = {"temperature": 0, "max_new_tokens": 24}
SMALL = {"max_total_tokens": 4096, "dtype": "float32", "device": "cpu", "linear_backend": "torch"}


@function
def count(s: ProgramState) -> None:
    s += PROMPT + gen("command", max_tokens=24)


# -- RuntimeEndpoint ---------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_runtime_endpoint_reports_and_controls_its_server(toy_server: ServerUnderTest, toy_engine: Engine) -> None:
    endpoint = RuntimeEndpoint(toy_server.url + "/", "secret")
    assert endpoint.get_model_name() == endpoint.model_info["model_path"] == str(TOY_MODEL)
    assert endpoint.base_url == toy_server.url
    assert get_server_info(endpoint)["max_total_tokens"] == 8192
    command = count.run(backend=endpoint, temperature=0)["command"]
    assert command == toy_engine.generate(PROMPT, GREEDY)["text"]
    endpoint.cache_prefix(PROMPT)
    cached = toy_server.generate(text=PROMPT + "a", sampling_params=GREEDY).json()["meta_info"]["cached_tokens"]
    assert cached == len(toy_engine.encode(PROMPT))
    flush_cache(endpoint)
    answer = toy_server.generate(text=PROMPT + "a", sampling_params=GREEDY).json()
    assert answer["meta_info"]["cached_tokens"] == 0
    endpoint.start_profile()
    assert endpoint.stop_profile()["steps"] == 0


@pytest.mark.process
def test_runtime_endpoint_refuses_bad_arguments_immediately(toy_server: ServerUnderTest) -> None:
    with pytest.raises(BackendError, match="API key") as caught:
        RuntimeEndpoint(toy_server.url)
    assert caught.value.status == 401
    with pytest.raises(BackendError, match="did not answer: URLError"):
        RuntimeEndpoint(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(
        ValueError, match="chat_template_name is 'vicuna'; roles are written by the model's own template"
    ):
        RuntimeEndpoint(toy_server.url, "secret", None, "vicuna")
    with pytest.raises(FileNotFoundError):
        RuntimeEndpoint(toy_server.url, "secret", verify="/nowhere.pem")


# -- Runtime -----------------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_runtime_starts_and_stops_its_server(toy_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = toy_engine.generate(PROMPT, GREEDY)["text"]
    commands: list[list[str]] = []

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, command: list[str], **options: Any) -> None:
            commands.append(command)
            super().__init__(command, **options)

    monkeypatch.setattr(runtime_module.subprocess, "Popen", Popen)
    with Runtime(model_path=TOY_MODEL, api_key="own-key", **SMALL) as runtime:
        assert runtime.pid is not None and not any("own-key" in word for word in commands[0]), "all users can read it"
        assert as_backend(runtime) is runtime.endpoint
        assert count.run(backend=runtime, temperature=0)["command"] == expected
        assert runtime.generate_url == runtime.url + "/generate"
        answers = json.loads(runtime.generate([PROMPT, "a"], GREEDY, return_logprob=True, top_logprobs_num=2))
        assert answers[0]["text"] == expected
        assert [len(row) for row in answers[0]["meta_info"]["output_top_logprobs"]] == [2] * 12
        runtime.cache_prefix(PROMPT)
        flush_cache(runtime)

        async def stream() -> tuple[list[str], dict[str, Any]]:
            pieces = [piece async for piece in runtime.async_generate(PROMPT, GREEDY)]
            async for _ in runtime.async_generate(PROMPT, {"max_new_tokens": 1900, "ignore_eos": True}):
                break
            return pieces, await runtime.get_server_info()

        pieces, info = asyncio.run(stream())
        assert "".join(pieces) == expected  # in how many pieces: those that wait at once are one
        assert info["log_level"] == "error"
        runtime.start_profile()
        runtime.stop_profile()
        children = psutil.Process(runtime.pid).children()
    assert runtime.pid is None and not any(child.is_running() for child in children)
    runtime.shutdown()


@pytest.mark.process
def test_runtime_startup_failure_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="unknown setting 'max_totl_tokens'; did you mean max_total_tokens"):
        Runtime(model_path=str(TOY_MODEL), max_totl_tokens=4096)
    with pytest.raises(ValueError, match="ssl_certfile and port=0 are for servers of their own"):
        Runtime(model_path=str(TOY_MODEL), port=0)
    with pytest.raises(
        RuntimeError, match=r"the server ended with status 1: baton: --model-path .* is an empty folder"
    ):
        Runtime(model_path=str(tmp_path))
    assert "is an empty folder" in capsys.readouterr().err, "its log is shown"
    with pytest.raises(TimeoutError, match=r"not ready within 0.0 s; raise launch_timeout"):
        Runtime("error", 0.0, model_path=str(TOY_MODEL), **SMALL)


@pytest.mark.process
def test_runtime_server_ends_with_its_program(tmp_path: Path) -> None:
    """Even where the program is killed, and cannot end it."""
    program = (
        "import sys, time\nfrom baton.entrypoints.lang import Runtime\n"
        f"runtime = Runtime(model_path={str(TOY_MODEL)!r}, **{SMALL!r})\n"
        "print(runtime.pid, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program + "time.sleep(60)"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        server = psutil.Process(int(process.stdout.readline()))
        process.send_signal(signal.SIGKILL)
    server.wait(60)
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True, timeout=60)
    assert not psutil.pid_exists(int(done.stdout))


def test_runtime_settings_become_flags() -> None:
    settings: dict[str, Any] = {
        "model_path": TOY_MODEL,
        "max_total_tokens": 4096,
        "disable_radix_cache": True,
        "incremental_streaming_output": False,
        "item_trie": ["a=b.npy", "c=d.npy"],
        "random_seed": None,
        "schedule_policy": "lpm",
    }
    flags = command_line(settings)
    assert parse_command_line(flags) == compose(settings)
    assert flags == [
        f"--model-path={TOY_MODEL}",
        "--max-total-tokens=4096",
        "--disable-radix-cache",
        "--item-trie=a=b.npy",
        "--item-trie=c=d.npy",
        "--schedule-policy=lpm",
    ]
