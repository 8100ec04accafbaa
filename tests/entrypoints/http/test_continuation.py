"""Continuations over HTTP, native and OpenAI's, on the real server with the toy model."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

TOY = Path(__file__).parents[3] / "examples" / "toy_model"
PROMPT = "<|im_start|>user\nHow many lines are in manual.md?<|im_end|>\n<|im_start|>assistant\n"
SUFFIX = "<|im_end|>\n<|im_start|>tool\n12 manual.md<|im_end|>\n<|im_start|>assistant\n"
GREEDY = {"temperature": 0, "max_new_tokens": 24}
LONG = {"temperature": 0, "max_new_tokens": 1800, "ignore_eos": True}

_names = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "4096", "--served-model-name", "toy"]
    flags += ["--overlap-schedule", "on"]  # test_continuation.py has the plain loop
    flags += ["--schedule-policy", "fcfs"]  # leases are those that requests ask for
    folder = tmp_path_factory.mktemp("server")
    with ServerUnderTest(TOY, folder, *flags, "--max-finished-requests", "3", behaviour=None) as running:
        yield running.wait_ready()


def name(kind: str) -> str:
    return f"{kind}-{next(_names)}"


def start(server: ServerUnderTest, **fields: Any) -> tuple[str, dict]:
    rid = name("parent")
    body = {"text": PROMPT, "sampling_params": GREEDY, "rid": rid, "retain_ttl": 60, **fields}
    response = server.client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return rid, response.json()


def post(server: ServerUnderTest, path: str, **fields: Any) -> Any:
    response = server.client.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def error_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    return response.json()["error"]


def events(response: httpx.Response) -> list[dict]:
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def replayed(server: ServerUnderTest, parent: dict) -> str:
    """What the model says to parent + suffix, tokenised apart, as plain ids."""
    ids = post(server, "/tokenize", prompt=PROMPT)["tokens"] + parent["output_ids"][:-1]
    ids += post(server, "/tokenize", prompt=SUFFIX, add_special_tokens=False)["tokens"]
    assert parent["meta_info"]["finish_reason"]["type"] == "stop"
    plain = post(server, "/generate", input_ids=ids, sampling_params=GREEDY, cache_salt=name("salt"))
    return plain["text"]


def test_native_continuation_matches_replay(server: ServerUnderTest) -> None:
    rid, parent = start(server)
    fields = {"continuation_of": rid, "continuation_suffix": SUFFIX, "sampling_params": GREEDY, "keep_parent": True}
    whole = post(server, "/generate", **fields)
    streamed = events(server.client.post("/generate", json={**fields, "stream": True}))[-1]
    for child in (whole, streamed):
        got = child["meta_info"]["continuation"]
        assert got["path"] == "handoff" and got["recomputed_tokens"] <= 1 and got["trimmed_tokens"] == 1
        assert child["text"] == replayed(server, parent)
    assert post(server, "/release", rid=rid) == {"released": True}
    assert post(server, "/release", rid=rid) == {"released": False}
    assert post(server, "/generate", **fields)["meta_info"]["continuation"]["path"] == "match"


def test_openai_continuation_matches_replay(server: ServerUnderTest) -> None:
    common = {"model": "toy", "temperature": 0, "max_tokens": 24}
    first = post(server, "/v1/completions", prompt=PROMPT, retain_ttl=60, **common)
    (choice,) = first["choices"]
    assert choice["finish_reason"] == "stop" and choice["baton"]["retained"]["tokens"] > 0
    assert first["id"] == f"cmpl-{choice['baton']['rid']}"
    _, parent = start(server)
    assert choice["text"] == parent["text"]

    fields = {**common, "prompt": "", "continuation_of": first["id"], "continuation_suffix": SUFFIX}
    whole = post(server, "/v1/completions", **fields, keep_parent=True)
    (choice,) = whole["choices"]
    assert choice["text"] == replayed(server, parent)
    assert choice["baton"]["continuation"]["path"] == "handoff"
    usage = whole["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= choice["baton"]["continuation"]["inherited_tokens"] - 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]

    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(server.client.post("/v1/completions", json={**fields, **options}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    assert chunks[-1]["choices"][0]["baton"]["continuation"]["path"] == "handoff"
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == usage["completion_tokens"]


def test_openai_completions_return_logprobs_and_echo(server: ServerUnderTest) -> None:
    fields = {"prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": 8, "temperature": 0, "n": 2}
    whole = post(server, "/v1/completions", **fields)
    native = post(
        server, "/generate", text=PROMPT, sampling_params={"temperature": 0, "max_new_tokens": 8},
        return_logprob=True, logprob_start_len=0,
    )  # fmt: skip
    meta = native["meta_info"]
    want = [row[0] for row in (*meta["input_token_logprobs"], *meta["output_token_logprobs"])]
    for choice in whole["choices"]:
        logprobs = choice["logprobs"]
        assert choice["text"] == PROMPT + native["text"] == "".join(logprobs["tokens"])
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:] == pytest.approx(want[1:], abs=1e-4)
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert choice["text"][offset:].startswith(token)
    pieces: dict[int, str] = {0: "", 1: ""}
    for chunk in events(server.client.post("/v1/completions", json={**fields, "stream": True})):
        for choice in chunk["choices"]:
            pieces[choice["index"]] += "".join(choice["logprobs"]["tokens"]) if choice["logprobs"] else ""
            assert choice["logprobs"] is None or len(set(map(len, choice["logprobs"].values()))) == 1
    assert pieces == {0: PROMPT + native["text"], 1: PROMPT + native["text"]}


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_continuation_refusals_have_their_status_even_when_streaming(
    server: ServerUnderTest, path: str, stream: bool
) -> None:
    def refused(status: int, **fields: Any) -> dict:
        return error_of(server.client.post(path, json={"stream": stream, **fields}), status)

    rid, _ = start(server, cache_salt="mine")
    unknown = refused(404, continuation_of="nobody")
    foreign = refused(404, continuation_of=rid)
    assert unknown["code"] == "parent_not_found" and unknown["param"] == "continuation_of"
    assert foreign["message"] == unknown["message"].replace("nobody", rid)
    mine = {"continuation_of": rid, "cache_salt": "mine"}
    assert refused(400, **mine, continuation_index=1)["param"] == "continuation_index"
    one = {"sampling_params": {"max_new_tokens": 1}} if path == "/generate" else {"max_tokens": 1}
    assert refused(400, **mine, **one, continuation_ids=[1] * 2030)["param"] == "continuation_ids"
    limit = "max_new_tokens" if path == "/generate" else "max_tokens"
    many = {"sampling_params": {limit: 40}} if path == "/generate" else {limit: 40}
    error = refused(400, **mine, **many, continuation_ids=[1] * 2000)
    said = "40 tokens for the output" if path == "/generate" else "40 in the completion"
    assert error["param"] == limit and said in error["message"]
    assert refused(400, **mine, continuation_ids=[10**6])["param"] == "continuation_ids"
    assert refused(400, **mine, continuation_suffix="a", continuation_ids=[1])["param"] == "continuation_suffix"
    assert refused(400, **mine, retain_ttl=-1)["param"] == "retain_ttl"
    prompt = {"text": "a"} if path == "/generate" else {"prompt": "a"}
    assert refused(400, **prompt, continuation_suffix="a")["param"] == "continuation_suffix"
    assert post(server, "/release", rid=rid) == {"released": True}, "no refused child took anything"
    for _ in range(4):
        start(server, retain_ttl=0, cache_salt="mine")
    error = refused(410, **mine)
    assert error["code"] == "parent_forgotten"
    assert ("text or input_ids" if path == "/generate" else "as prompt too") in error["message"]


def test_forgotten_parent_falls_back_to_the_given_prompt(server: ServerUnderTest) -> None:
    rid, _ = start(server, retain_ttl=0)
    for _ in range(4):
        start(server, retain_ttl=0)
    child = post(server, "/v1/completions", prompt=PROMPT, continuation_of=rid, temperature=0, max_tokens=24)
    assert child["choices"][0]["baton"]["continuation"]["path"] == "fallback"
    assert child["choices"][0]["text"] == start(server, retain_ttl=0)[1]["text"]


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_aborted_parent_fails_its_waiting_child(server: ServerUnderTest, path: str, stream: bool) -> None:
    rid = name("parent")
    answers: list[httpx.Response] = []

    def call() -> None:
        body = {"continuation_of": rid, "stream": stream}
        answers.append(httpx.post(f"{server.url}{path}", json=body, timeout=60))

    thread = threading.Thread(target=call)
    body = {"text": PROMPT, "rid": rid, "sampling_params": LONG, "stream": True}
    with server.client.stream("POST", "/generate", json=body) as response:
        chunks = response.iter_bytes()
        next(chunks)
        thread.start()
        time.sleep(0.2)  # the child waits; if it came too late, the tombstone answers the same
    thread.join(30)
    error = error_of(answers[0], 409)
    assert error["code"] == "parent_failed" and error["param"] == "continuation_of"
    assert error_of(server.client.post(path, json={"continuation_of": f"cmpl-{rid}"}), 409)["code"] == "parent_failed"


def test_batch_of_continuations_is_handed_off(server: ServerUnderTest) -> None:
    parents = post(server, "/v1/completions", prompt=[PROMPT, PROMPT], temperature=0, max_tokens=24, retain_ttl=60)
    rids = [choice["baton"]["rid"] for choice in parents["choices"]]
    assert [f"cmpl-{rid}" for rid in rids] == [f"{parents['id']}_{i}" for i in (0, 1)]
    children = post(
        server, "/v1/completions", continuation_of=rids, continuation_suffix=SUFFIX, temperature=0, max_tokens=24
    )
    assert [choice["baton"]["continuation"]["path"] for choice in children["choices"]] == ["handoff", "handoff"]
    assert len({choice["text"] for choice in children["choices"]}) == 1


@pytest.mark.parametrize("body", [{}, {"rid": ""}, {"rid": 5}, {"rid": None}, {"ridd": "x"}, {"rid": ["a"]}])
def test_invalid_release_requests_are_refused(server: ServerUnderTest, body: dict) -> None:
    assert error_of(server.client.post("/release", json=body), 400)


def test_metrics(server: ServerUnderTest) -> None:
    names = ("leases_granted", "leases_handed_off", "leases_expired", "leases_broken")

    def stats() -> dict:
        return server.client.get("/server_info").json()["internal_states"][0]["stats"]

    before = stats()
    rid, _ = start(server)
    post(server, "/generate", continuation_of=rid, sampling_params=GREEDY)
    start(server, retain_ttl=0.01)
    rid, parent = start(server)
    server.wait_until(lambda: stats()["leases_expired"] > before["leases_expired"], "the lease expires")
    after = stats()
    assert [after[name] - before[name] for name in names] == [3, 1, 1, 0]
    for name in names:
        server.wait_until(lambda name=name: server.metric(f"{name}_total") == after[name], f"{name} is counted")
    assert server.metric("leased_tokens") == after["leased_tokens"] >= parent["meta_info"]["retained"]["tokens"]
    post(server, "/release", rid=rid)


def test_leases_are_listed_in_pages(server: ServerUnderTest) -> None:
    others = server.client.get("/cache/leases", params={"limit": 1000}).json()["leases"]
    last = max((lease["serial"] for lease in others), default=-1)
    rids = [start(server)[0] for _ in range(3)]
    first = server.client.get("/cache/leases", params={"after": last, "limit": 2}).json()
    rest = server.client.get("/cache/leases", params={"after": first["next"]}).json()
    leases = [*first["leases"], *rest["leases"]]
    assert [lease["rid"] for lease in leases] == rids and first["live"] >= 3 and rest["next"] is None
    assert all(0 < lease["expires_in_s"] <= 60 and lease["tokens"] > 20 for lease in leases)
    for query in (
        "limit=0",
        "limit=1001",
        "limit=x",
        "limit=--5",
        "after=-2",
        "after=1e3",
        "limit=+1",
        f"after={10**30}",
    ):
        assert error_of(server.client.get(f"/cache/leases?{query}"), 400)["param"] == query.split("=")[0]
    assert error_of(server.client.get("/cache/leases?offset=1"), 400)["code"] == "unknown_field"
    for rid in rids:
        post(server, "/release", rid=rid)
    assert server.client.get("/cache/leases", params={"after": last}).json()["leases"] == []
