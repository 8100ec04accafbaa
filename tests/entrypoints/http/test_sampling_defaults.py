"""A server of a model whose generation_config.json recommends how to sample: what it uses of it, and where it says so.
The worker is a double."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.byte_tokenizer import write_byte_tokenizer
from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

RECOMMENDED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 5}

TALK = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_byte_tokenizer(tmp_path_factory.mktemp("model"))
    (folder / "generation_config.json").write_text(json.dumps(RECOMMENDED | {"do_sample": True}))
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = ["--max-num-seqs", "8", "--enable-metrics"]  # vLLM's, SGLang's
    with ServerUnderTest(model, tmp_path_factory.mktemp("server"), *flags, behaviour={}) as running:
        yield running.wait_ready()


def test_server_info_reports_model_sampling_defaults(server: ServerUnderTest) -> None:
    for page in ("/model_info", "/server_info"):
        assert server.client.get(page).json()["default_sampling_params"] == RECOMMENDED
    assert server.client.get("/server_info").json()["sampling_defaults"] == "model"
    assert (
        "sampling defaults of the model's generation_config.json: temperature 0.6, top_p 0.95, top_k 20" in server.log
    )


def test_foreign_flags_are_logged(server: ServerUnderTest) -> None:
    assert server.client.get("/server_info").json()["max_running_requests"] == 8
    assert "flag of another server: --max-num-seqs is --max-running-requests here" in server.log
    assert "flag of another server: --enable-metrics has no effect: GET /metrics is always there" in server.log


def test_chat_apis_use_model_sampling_defaults(server: ServerUnderTest) -> None:
    post = server.client.post
    chat = post("/v1/chat/completions", json={"messages": TALK, "ignore_eos": True}).json()
    assert chat["usage"]["completion_tokens"] == 5 and chat["choices"][0]["finish_reason"] == "length"
    response = post("/v1/responses", json={"input": "Hello", "ignore_eos": True}).json()
    assert (response["temperature"], response["top_p"], response["max_output_tokens"]) == (0.6, 0.95, 5)
    assert response["usage"]["output_tokens"] == 5
    response = post("/v1/responses", json={"input": "Hello", "temperature": 0, "max_output_tokens": 3}).json()
    assert (response["temperature"], response["top_p"], response["max_output_tokens"]) == (0.0, 0.95, 3)


def test_sampling_defaults_flag_disables_model_defaults(model: Path, tmp_path: Path) -> None:
    with ServerUnderTest(model, tmp_path, "--sampling-defaults", "openai", behaviour={}) as running:
        running.wait_ready()
        assert running.client.get("/model_info").json()["default_sampling_params"] == {}
        answer = running.client.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 3}).json()
        assert (answer["temperature"], answer["top_p"]) == (1.0, 1.0)
        assert "sampling defaults of" not in running.log


def test_broken_generation_config_aborts_startup(tmp_path: Path) -> None:
    folder = write_byte_tokenizer(tmp_path / "model")
    (folder / "generation_config.json").write_text('{"temperature": "warm"}')
    with ServerUnderTest(folder, tmp_path, behaviour={}) as running:
        assert running.process.wait(30) == 1
        assert "generation_config.json: temperature is 'warm'" in running.log
