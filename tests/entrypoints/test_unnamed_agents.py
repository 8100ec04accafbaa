"""Agents that name no job, on a real server: their tool calls reach the worker, whatever API they use."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

TOY_MODEL = Path(__file__).parents[2] / "examples" / "toy_model"
SYSTEM = "You are a shell agent. Do not think aloud."
TASK = "How many lines are in {}?"
SAMPLING = {"model": "toy", "temperature": 0, "max_tokens": 60}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = ("--max-total-tokens", "8192", "--schedule-policy", "handoff")
    with ServerUnderTest(TOY_MODEL, tmp_path_factory.mktemp("server"), *flags, behaviour=None) as running:
        yield running.wait_ready()


def post(server: ServerUnderTest, path: str, body: dict[str, Any], stream: bool) -> None:
    """Send a request and read its answer to the end."""
    with server.client.stream("POST", path, json={**body, "stream": stream}) as answer:
        text = "".join(answer.iter_text())
        assert answer.status_code == 200, text


def send_chat(server: ServerUnderTest, task: str, stream: bool) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]
    post(server, "/v1/chat/completions", {**SAMPLING, "messages": messages}, stream)


def send_response(server: ServerUnderTest, task: str, stream: bool) -> None:
    body = {"model": "toy", "temperature": 0, "max_output_tokens": 60, "instructions": SYSTEM, "input": task}
    post(server, "/v1/responses", body, stream)


def send_message(server: ServerUnderTest, task: str, stream: bool) -> None:
    post(
        server, "/v1/messages", {**SAMPLING, "system": SYSTEM, "messages": [{"role": "user", "content": task}]}, stream
    )


def rendered(task: str) -> str:
    return f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{task}<|im_end|>\n<|im_start|>assistant\n"


def send_completion(server: ServerUnderTest, task: str, stream: bool) -> None:
    post(server, "/v1/completions", {**SAMPLING, "prompt": rendered(task)}, stream)


def send_generate(server: ServerUnderTest, task: str, stream: bool) -> None:
    body = {"text": rendered(task), "sampling_params": {"temperature": 0, "max_new_tokens": 60}}
    post(server, "/generate", body, stream)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "send", [send_chat, send_response, send_message, send_completion, send_generate], ids=lambda send: send.__name__
)
def test_calls_of_unnamed_jobs_reach_the_worker(
    server: ServerUnderTest, send: Callable[[ServerUnderTest, str, bool], None], stream: bool
) -> None:
    before = {job["job_id"] for job in server.client.get("/jobs").json()["jobs"]}
    send(server, TASK.format("notes.txt"), stream)
    (job,) = [job for job in server.client.get("/jobs").json()["jobs"] if job["job_id"] not in before]
    assert (job["last_calls"], job["waits_for"], job["turns"]) == (["wc"], "wc", 1)
    assert len(job["pins"]) == 1


def test_history_sent_again_as_text_or_ids_continues_its_job(server: ServerUnderTest) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 60}
    first = server.generate(text=rendered(TASK.format("a.txt")), sampling_params=sampling).json()
    assert "retained" not in first["meta_info"]
    prompt = rendered(TASK.format("a.txt")) + first["text"]
    prompt += "<|im_end|>\n<|im_start|>tool\n12 a.txt<|im_end|>\n<|im_start|>assistant\n"
    second = server.generate(text=prompt, sampling_params=sampling).json()["meta_info"]
    assert second["continuation"]["path"] == "handoff" and second["continuation"]["recomputed_tokens"] <= 1

    ids = server.client.post("/tokenize", json={"prompt": rendered(TASK.format("b.txt"))}).json()["tokens"]
    first = server.generate(input_ids=ids, sampling_params=sampling).json()
    ids += first["output_ids"] + ids[:5]
    second = server.generate(input_ids=ids, sampling_params=sampling).json()["meta_info"]
    assert second["continuation"]["path"] == "handoff" and second["cached_tokens"] >= len(ids) - 7
    job = server.client.get("/jobs").json()["jobs"][-1]
    assert job["turns"] == 2
    assert json.dumps(server.client.get("/metrics").text).count("baton:tool_returns_total") >= 1


def test_user_is_shown_by_name(server: ServerUnderTest) -> None:
    server.client.post(
        "/v1/chat/completions",
        json={**SAMPLING, "max_tokens": 2, "messages": [{"role": "user", "content": "Hello"}]},
    )
    job = server.client.get("/jobs").json()["jobs"][-1]
    assert (job["last_calls"], job["waits_for"]) == ([], "the user")
