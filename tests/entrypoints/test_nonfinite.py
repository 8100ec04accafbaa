"""Weights that give NaN for one token, over HTTP: whoever uses it gets a 500, everybody else an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.common.nan_model import write_nan_model
from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

BAD = 1500
PROMPT = list(range(100, 160))
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module", params=[pytest.param("off", marks=pytest.mark.slow), "on"], ids=["plain", "overlapped"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    folder = tmp_path_factory.mktemp("server")
    flags = ("--max-total-tokens", "8192", "--dtype", "float32", "--device", "cpu")
    flags += ("--overlap-schedule", request.param)
    with ServerUnderTest(write_nan_model(folder, BAD), folder, *flags, behaviour=None) as running:
        yield running.wait_ready()


def test_nonfinite_logits_give_500_and_keep_shared_cache(server: ServerUnderTest) -> None:
    sound: dict[str, Any] = {"input_ids": PROMPT, "sampling_params": GREEDY}
    expected = server.generate(**sound).json()["output_ids"]
    assert server.generate(**sound).json()["meta_info"]["cached_tokens"] > 0
    for fields in (
        {},
        {"return_logprob": True, "logprob_start_len": 0},
        {"sampling_params": GREEDY | {"beam_width": 4}},
    ):
        answer = server.generate(**{"sampling_params": GREEDY, "rid": "bad", **fields}, input_ids=[*PROMPT, BAD, 7])
        assert answer.status_code == 500, answer.text
        error = answer.json()["error"]
        assert error["code"] == "logits_not_finite" and "not finite" in error["message"]
    again = server.generate(**sound).json()
    assert again["meta_info"]["cached_tokens"] == len(PROMPT) - 1, "what comes before the bad token is sound"
    assert again["output_ids"] == expected
    child = server.generate(continuation_of="bad", continuation_ids=[5], sampling_params=GREEDY)
    assert child.status_code == 409 and child.json()["error"]["code"] == "parent_failed"


def test_nonfinite_logits_fail_batches_and_streams(server: ServerUnderTest) -> None:
    answer = server.generate(input_ids=[PROMPT, [BAD]], sampling_params=GREEDY)
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "logits_not_finite"
    answer = server.generate(input_ids=[BAD], sampling_params=GREEDY, stream=True)
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: {")]
    assert answer.status_code == 500 or json.loads(lines[-1])["error"]["code"] == "logits_not_finite"


def test_nonfinite_vectors_give_500(server: ServerUnderTest) -> None:
    for fields in ({"input": [PROMPT, [*PROMPT, BAD]]}, {"input": [BAD], "encoding_format": "base64"}):
        answer = server.client.post("/v1/embeddings", json=fields)
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "logits_not_finite"
    labels = {"query": PROMPT, "items": [[BAD]], "label_token_ids": [5]}
    answer = server.client.post("/v1/score", json=labels)
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "logits_not_finite"
    sound = server.client.post("/v1/embeddings", json={"input": [PROMPT, PROMPT[:9]]}).json()
    assert all(None not in each["embedding"] for each in sound["data"])


def test_nonfinite_requests_are_counted(server: ServerUnderTest) -> None:
    """The worker's own report is up to date; /metrics follows within a second."""

    def counted() -> int:
        return server.client.get("/server_info").json()["internal_states"][0]["stats"]["nonfinite_requests"]

    before = counted()
    assert server.generate(input_ids=[BAD, 5], sampling_params=GREEDY | {"n": 2}).status_code == 500
    assert counted() == before + 1
    server.wait_until(lambda: server.metric("num_nonfinite_total") == before + 1, "the metric")
