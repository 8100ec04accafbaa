"""The whole server, nothing doubled, on the trained toy model."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

TOY_MODEL = Path(__file__).parents[2] / "examples" / "toy_model"
GREEDY = {"temperature": 0, "max_new_tokens": 40}
FLAGS = ("--max-total-tokens", "8192", "--dtype", "float32", "--device", "cpu")
TASK = "<|im_start|>user\nHow many lines are in manual.md?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module", params=[pytest.param("off", marks=pytest.mark.slow), "on"], ids=["plain", "overlapped"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    folder = tmp_path_factory.mktemp("server")
    flags = (*FLAGS, "--max-running-requests", "2", "--overlap-schedule", request.param)
    with ServerUnderTest(TOY_MODEL, folder, *flags, behaviour=None) as running:
        yield running.wait_ready()


def events(response: httpx.Response) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_streamed_and_whole_answers_are_equal(server: ServerUnderTest) -> None:
    # Long enough that no process can be so late that all of it goes into one event.
    long = {**GREEDY, "max_new_tokens": 300, "ignore_eos": True}
    fields: dict[str, Any] = {"text": TASK, "sampling_params": long, "return_logprob": True}
    whole = server.generate(**fields).json()
    got = events(server.generate(stream=True, **fields))
    assert got[-1]["text"] == whole["text"] and got[-1]["output_ids"] == whole["output_ids"]
    assert whole["meta_info"]["completion_tokens"] == len(whole["output_ids"]) >= len(got) > 1
    ids = [row[1] for row in whole["meta_info"]["output_token_logprobs"]]
    assert ids == whole["output_ids"]
    cached = got[-1]["meta_info"]["cached_tokens"]
    assert 0 < cached < got[-1]["meta_info"]["prompt_tokens"], "the second call reused the first one's prefix"


def test_stop_string_found_by_the_worker_is_trimmed(server: ServerUnderTest) -> None:
    whole = server.generate(text=TASK, sampling_params=GREEDY).json()["text"]
    stop = whole[len(whole) // 2 :][:3]
    params = {**GREEDY, "stop": stop}
    for answer in (
        server.generate(text=TASK, sampling_params=params).json(),
        events(server.generate(text=TASK, sampling_params=params, stream=True))[-1],
    ):
        assert answer["text"] == whole[: whole.index(stop)]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_waiting_request_can_be_aborted(server: ServerUnderTest) -> None:
    long = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}
    answers: dict[str, dict] = {}

    def call(rid: str) -> None:
        answers[rid] = httpx.post(
            f"{server.url}/generate", json={"text": TASK, "rid": rid, "sampling_params": long}, timeout=60
        ).json()

    threads = [threading.Thread(target=call, args=(f"r{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    # Two rows: the others wait.
    server.wait_until(lambda: server.metric("num_queue_reqs") == 2, "two wait")
    aborted = server.client.post("/abort_request", json={"abort_all": True}).json()["aborted"]
    assert sorted(aborted) == ["r0", "r1", "r2", "r3"]
    for thread in threads:
        thread.join(60)
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers.values()} == {"abort"}
    server.wait_until(lambda: server.client.post("/flush_cache").status_code == 200, "the worker is idle")


def test_request_too_large_for_the_pool_is_refused(tmp_path: Path) -> None:
    with ServerUnderTest(TOY_MODEL, tmp_path, *FLAGS[2:], "--max-total-tokens", "256", behaviour=None) as server:
        server.wait_ready()
        response = server.generate(text=TASK, sampling_params={"max_new_tokens": 1000})
        assert response.status_code == 400, response.text
        assert "256" in response.json()["error"]["message"]
        assert server.generate(text=TASK, sampling_params=GREEDY).status_code == 200


def broken_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def foreign_architecture(folder: Path) -> None:
    config = {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "found_by"),
    [
        (broken_weights, ""),
        (no_weights, ""),
        (broken_config, ""),
        (foreign_architecture, "the worker ended: "),
    ],
)
def test_damaged_model_is_reported_in_one_line(tmp_path: Path, damage: Any, found_by: str) -> None:
    """Before any process starts, where the folder shows it."""
    folder = tmp_path / "model"
    shutil.copytree(TOY_MODEL, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    damage(folder)
    with ServerUnderTest(folder, tmp_path, *FLAGS, behaviour=None) as server:
        assert server.process.wait(60) == 1
        expected = f"baton: {found_by}{'' if found_by else folder}"
        assert len(lines := lines_but_progress(server.log)) == 1 and lines[0].startswith(expected), server.log


def lines_but_progress(log: str) -> list[str]:
    """The lines of a log without those that the worker writes in any start: its phases, and busy cores."""
    progress = (" INFO worker: starting: ", " INFO worker: other processes use the cores")
    return [line for line in log.splitlines() if not any(begin in line for begin in progress)]


def test_insufficient_memory_is_reported_in_one_line(tmp_path: Path) -> None:
    flags = ("--max-total-tokens", str(10**12), *FLAGS[2:])
    with ServerUnderTest(TOY_MODEL, tmp_path, *flags, behaviour=None) as server:
        assert server.process.wait(60) == 1
        assert len(lines := lines_but_progress(server.log)) == 1, server.log
        assert lines[0].startswith("baton: the worker ended: ") and "--max-total-tokens" in lines[0]
