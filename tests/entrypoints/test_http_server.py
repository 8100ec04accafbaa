"""The HTTP API over real sockets: answers, errors, streams, disconnects. The worker is a double, all else is real."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from byte_tokenizer import write_byte_tokenizer
from server_under_test import ServerUnderTest

from baton.entrypoints.continuation_fields import CONTINUATION_FIELDS

pytestmark = pytest.mark.process

KEY = "s3cret"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = ["--max-body-mb", "4", "--served-model-name", "echo", "--cors-origin", "https://example.org"]
    behaviour = {"step_s": 0.002, "refuse": ["too-large"]}
    with ServerUnderTest(model, tmp_path_factory.mktemp("server"), *flags, behaviour=behaviour) as running:
        yield running.wait_ready()


def generate(server: ServerUnderTest, max_new_tokens: int = 4, **fields: Any) -> Any:
    fields.setdefault("sampling_params", {})["max_new_tokens"] = max_new_tokens
    response = server.generate(**fields)
    assert response.status_code == 200, response.text
    return response.json()


def events(response: httpx.Response) -> list[dict]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def error_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "code", "param"}
    return body["error"]


# -- answers -----------------------------------------------------------------------------------------------------------


def test_shape_of_an_answer(server: ServerUnderTest) -> None:
    answer = generate(server, text="abc", rid="shape")
    assert answer["text"] == "abca" and answer["output_ids"] == [97, 98, 99, 97]
    meta = answer["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "shape",
        "finish_reason": {"type": "length", "length": 4},
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "cached_tokens": 2,
    }


def test_text_and_ids_are_the_same_prompt(server: ServerUnderTest) -> None:
    assert generate(server, input_ids=[97, 98])["text"] == generate(server, text="ab")["text"] == "abab"


def test_batch_and_samples_come_in_order(server: ServerUnderTest) -> None:
    answers = generate(server, text=["ab", "xyz"], sampling_params={"n": 2}, rid="batch")
    assert [a["text"] for a in answers] == ["abab", "baba", "xyzx", "yzxy"]
    assert [a["meta_info"]["id"] for a in answers] == ["batch_0", "batch_0", "batch_1", "batch_1"]
    assert len(generate(server, text=["a"])) == 1, "a batch of one is a list"
    assert len(generate(server, input_ids=[97], sampling_params={"n": 3})) == 3


def test_batch_with_parameters_of_their_own(server: ServerUnderTest) -> None:
    response = server.generate(
        input_ids=[[97], [98]],
        rid=["one", "two"],
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 3}],
        return_logprob=[True, False],
    )
    first, second = response.json()
    assert (first["text"], second["text"]) == ("a", "bbb")
    assert first["meta_info"]["output_token_logprobs"] == [[pytest.approx(-0.097), 97, None]]
    assert "output_token_logprobs" not in second["meta_info"]


def test_logprobs(server: ServerUnderTest) -> None:
    answer = generate(
        server, 2, text="ab", return_logprob=True, logprob_start_len=0, top_logprobs_num=2, return_text_in_logprobs=True
    )
    meta = answer["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 97, "a"], [pytest.approx(-0.098), 98, "b"]]
    assert meta["output_token_logprobs"] == [[pytest.approx(-0.097), 97, "a"], [pytest.approx(-0.098), 98, "b"]]
    assert meta["input_top_logprobs"] == [None, [[pytest.approx(-0.098), 98, "b"], [pytest.approx(-0.099), 99, "c"]]]
    assert [row[0][1] for row in meta["output_top_logprobs"]] == [97, 98]


def test_stops(server: ServerUnderTest) -> None:
    answer = generate(server, 50, text="hello. ", sampling_params={"stop": "lo"})
    assert answer["text"] == "hel" and answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "lo"}
    assert (
        generate(server, 50, text="hello. ", sampling_params={"stop": ["."], "no_stop_trim": True})["text"] == "hello."
    )
    answer = generate(server, 50, text="hello", sampling_params={"stop_token_ids": [ord("l")]})
    assert answer["text"] == "he" and answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 108}
    assert generate(server, 50, text="hi<eos>")["text"] == "hi"
    assert generate(server, 6, text="hi<eos>", sampling_params={"ignore_eos": True})["text"] == "hihi"
    shown = generate(server, 4, text="h<eos>", sampling_params={"ignore_eos": True, "skip_special_tokens": False})
    assert shown["text"] == "h<eos>h<eos>"


# -- streams -----------------------------------------------------------------------------------------------------------


def test_stream_is_cumulative_whole_characters_and_ends_with_done(server: ServerUnderTest) -> None:
    text = "né 😀 👩‍👩‍👧 中文 "
    ids = list(text.encode())
    got = events(server.generate(text=text, stream=True, sampling_params={"max_new_tokens": len(ids)}))
    for before, after in itertools.pairwise(got):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
    assert all("\ufffd" not in event["text"] for event in got)
    assert got[-1]["text"] == text and got[-1]["output_ids"] == ids
    assert [event["meta_info"]["finish_reason"] for event in got[:-1]] == [None] * (len(got) - 1)
    assert got[-1]["meta_info"]["finish_reason"]["type"] == "length"


def test_stream_never_shows_a_stop_string(server: ServerUnderTest) -> None:
    got = events(server.generate(text="one END two", stream=True, sampling_params={"stop": ["END tw"]}))
    assert got[-1]["text"] == "one "
    assert all("one ".startswith(event["text"]) for event in got)
    plain = generate(server, 128, text="one END two", sampling_params={"stop": ["END tw"]})
    assert plain["text"] == "one "


def test_streamed_batch_carries_an_index(server: ServerUnderTest) -> None:
    got = events(server.generate(text=["ab", "x"], stream=True, sampling_params={"n": 2, "max_new_tokens": 5}))
    last = {event["index"]: event["text"] for event in got}
    assert last == {0: "ababa", 1: "babab", 2: "xxxxx", 3: "xxxxx"}


def test_streamed_logprobs_are_cumulative(server: ServerUnderTest) -> None:
    got = events(server.generate(text="ab", stream=True, return_logprob=True, sampling_params={"max_new_tokens": 3}))
    assert [row[1] for row in got[-1]["meta_info"]["output_token_logprobs"]] == [97, 98, 97]


# -- rids --------------------------------------------------------------------------------------------------------------


def test_request_id_header_is_the_rid(server: ServerUnderTest) -> None:
    response = server.client.post("/generate", json={"text": "a"}, headers={"X-Request-Id": "from-header"})
    assert response.json()["meta_info"]["id"] == response.headers["x-request-id"] == "from-header"
    response = server.client.post("/generate", json={"text": "a", "rid": "body"}, headers={"X-Request-Id": "header"})
    assert response.json()["meta_info"]["id"] == response.headers["x-request-id"] == "body"


def test_a_live_rid_is_taken_a_finished_one_is_free(server: ServerUnderTest) -> None:
    with server.client.stream("POST", "/generate", json=long("dup", stream=True)) as response:
        chunks = response.iter_bytes()  # kept: httpx closes the response with it
        next(chunks)
        error = error_of(server.generate(text="a", rid="dup"), 409)
        assert error["code"] == "duplicate_rid" and "'dup'" in error["message"]
    server.wait_until(lambda: server.generate(text="a", rid="dup").status_code == 200, "the rid is free again")
    assert error_of(server.generate(text=["a", "b"], rid=["same", "same"]), 400)["param"] == "rid"


def long(rid: str, **fields: Any) -> dict:
    return {"text": "abc", "rid": rid, "sampling_params": {"max_new_tokens": 4000}, **fields}


# -- aborts and disconnects --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_aborts_its_request(server: ServerUnderTest, stream: bool) -> None:
    body = json.dumps(long(f"gone-{stream}", stream=stream)).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        server.wait_until(lambda: server.running() == 1, "the request runs")
    server.wait_until(lambda: server.running() == 0, "the request is aborted", 5)
    assert server.client.post("/abort_request", json={"rid": f"gone-{stream}"}).status_code == 404


def test_abort_request(server: ServerUnderTest) -> None:
    async def run() -> tuple[httpx.Response, httpx.Response, httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            one = asyncio.create_task(client.post("/generate", json=long("one")))
            batch = asyncio.create_task(client.post("/generate", json={**long("many"), "text": ["a", "b"]}))
            while len((await client.post("/abort_request", json={"rid": "many"})).json().get("aborted", [])) != 2:
                await asyncio.sleep(0.01)
            while (aborted := await client.post("/abort_request", json={"rid": "one"})).status_code == 404:
                await asyncio.sleep(0.01)
            return await one, await batch, aborted

    one, batch, aborted = asyncio.run(run())
    assert aborted.json() == {"aborted": ["one"]}
    assert one.json()["meta_info"]["finish_reason"] == {"type": "abort", "message": "aborted by request"}
    assert [a["meta_info"]["finish_reason"]["type"] for a in batch.json()] == ["abort", "abort"]


def test_abort_request_refuses(server: ServerUnderTest) -> None:
    post = server.client.post
    assert error_of(post("/abort_request", json={"rid": "nobody"}), 404)["param"] == "rid"
    assert error_of(post("/abort_request", json={}), 400)
    assert error_of(post("/abort_request", json={"rid": "x", "abort_all": True}), 400)
    assert error_of(post("/abort_request", json={"rid": 5}), 400)
    assert error_of(post("/abort_request", json={"ridd": "x"}), 400)["message"].endswith("did you mean rid?")
    assert post("/abort_request", json={"abort_all": True}).json() == {"aborted": []}


def test_a_slow_client_holds_up_nobody_and_gets_everything(server: ServerUnderTest) -> None:
    body = json.dumps(long("slow", stream=True)).encode()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.port))
        slow.sendall(
            f"POST /generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        server.wait_until(lambda: server.running() == 1, "the slow request runs")
        generate(server, text="quick")
        # All 4000 tokens are generated while nothing is read.
        server.wait_until(lambda: server.running() == 0, "the slow request ends", 60)
        received = b""
        while chunk := slow.recv(65536):
            received += chunk
    last = [part for part in received.decode().split("data: ") if '"text"' in part][-1]
    assert json.loads(last[: last.index("\r\n") if "\r\n" in last else None])["meta_info"]["completion_tokens"] == 4000
    assert len(received) < 20_000_000, "one event per token was queued"


def test_two_hundred_at_once(server: ServerUnderTest) -> None:
    async def run() -> list[dict]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
            bodies = [{"text": f"<{i}>", "sampling_params": {"max_new_tokens": 20}} for i in range(200)]
            responses = await asyncio.gather(*(client.post("/generate", json=body) for body in bodies))
            return [response.json() for response in responses]

    for i, answer in enumerate(asyncio.run(run())):
        assert answer["text"] == (f"<{i}>" * 20)[:20]


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "text", "both are missing"),
        ({"text": "a", "input_ids": [1]}, "text", "both are given"),
        ({"text": ""}, "text", "empty"),
        ({"text": []}, "text", "empty"),
        ({"input_ids": []}, "input_ids", "empty"),
        ({"text": ["a", ""]}, "text", "empty"),
        ({"text": 5}, "text", "string"),
        ({"input_ids": [1, 257]}, "input_ids", "257; token ids go from 0 to 256"),
        ({"input_ids": [-1]}, "input_ids", "-1"),
        ({"input_ids": [10**30]}, "input_ids", "token ids go from 0 to 256"),
        ({"input_ids": [1.5]}, "input_ids", "whole numbers"),
        ({"text": "a" * 5000}, "text", "5000 tokens; the context holds 4096"),
        ({"text": "a" * 4096}, "text", "4096 tokens"),
        ({"text": "abc", "sampling_params": {"max_new_tokens": 4094}}, "max_new_tokens", "max_new_tokens <= 4093"),
        ({"text": "a", "sampling_params": {"temperature": -0.5}}, "sampling_params.temperature", "-0.5"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens", "1 or more"),
        ({"text": "a", "sampling_params": {"top_k": 10**30}}, "top_k", "-1"),
        ({"text": "a", "sampling_params": {"max_new_tokens": None, "min_new_tokens": 10**9}}, "min_new_tokens", "4095"),
        ({"text": "a", "sampling_params": {"seed": 10**30}}, "sampling_params.seed", "2**63"),
        ({"text": "a", "sampling_params": {"stop_token_ids": [300]}}, "stop_token_ids", "300"),
        ({"text": "a", "sampling_params": {"logit_bias": {"300": 1}}}, "logit_bias", "300"),
        ({"text": "a", "sampling_params": {"regex": "a+"}}, "sampling_params.regex", "not supported"),
        ({"text": "a", "lora_path": "adapter"}, "lora_path", "not supported"),
        ({"text": "a", "sampling_parms": {}}, "sampling_parms", "did you mean sampling_params?"),
        ({"text": "a", "sampling_params": []}, "sampling_params", "single prompt"),
        ({"text": "a", "sampling_params": "hot"}, "sampling_params", "object"),
        ({"text": "a", "stream": 1}, "stream", "true or false"),
        ({"text": "a", "rid": ""}, "rid", "1 to 512"),
        ({"text": "a", "rid": ["x"]}, "rid", "1 names for 1 prompts"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 1}, "logprob_start_len", "1 tokens"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 10**6}, "top_logprobs_num", "257"),
        ({"text": "a", "rid": "too-large"}, "text", "it can never fit"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_names_the_field(server: ServerUnderTest, fields: dict, param: str, words: str, stream: bool) -> None:
    body = {"stream": stream, **fields}
    error = error_of(server.client.post("/generate", json=body), 400)
    assert error["param"] == param and words in error["message"]
    assert error["type"] == "invalid_request_error"


ENDPOINTS = ["/generate", "/v1/completions", "/abort_request", "/release", "/tokenize", "/detokenize"]


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b'"x"',
        b'{"a": "\\ud800"}',
        b'{"a": "\xff"}',
        b"[" * 100_000,
        b'{"a": NaN}',
        b"\0" * 99,
    ],
)
def test_garbage_is_400(server: ServerUnderTest, path: str, body: bytes) -> None:
    response = server.client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert error_of(response, 400)["code"] == "invalid_json"


def test_random_bodies_never_break_the_server(server: ServerUnderTest) -> None:
    seed = 7
    rng = random.Random(seed)
    names = [
        "text",
        "input_ids",
        "sampling_params",
        "rid",
        "stream",
        "tokens",
        "prompt",
        "abort_all",
        "cache_salt",
        "n",
        "max_tokens",
        "logprobs",
        "echo",
        "stream_options",
        "stop",
        "no_stop_trim",
        "use_beam_search",
        "beam_width",
        "best_of",
        "length_penalty",
        "early_stopping",
        "item_trie",
        *CONTINUATION_FIELDS,
    ]
    values: list[Any] = [
        None,
        True,
        -1,
        0,
        1.5,
        2**63,
        "x",
        "",
        [],
        [[]],
        {},
        [1, [2]],
        ["a", 1],
        {"n": -1},
        [None],
        "é",
    ]
    for turn in range(500):
        body = {rng.choice(names): rng.choice(values) for _ in range(rng.randint(0, 4))}
        path = rng.choice(ENDPOINTS)
        response = server.client.post(path, json=body)
        assert response.status_code in (200, 400, 404), (seed, turn, path, body, response.text)
    assert server.client.get("/health").status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_other_content_types_are_415(server: ServerUnderTest, kind: str) -> None:
    response = server.client.post("/generate", content=b'{"text": "a"}', headers={"Content-Type": kind})
    assert "application/json" in error_of(response, 415)["message"]


def test_wrong_methods_and_paths(server: ServerUnderTest) -> None:
    for method in ("GET", "PUT", "DELETE"):
        response = server.client.request(method, "/generate")
        assert "use POST" in error_of(response, 405)["message"] and response.headers["allow"] == "POST"
    assert server.client.head("/generate").status_code == 405
    assert error_of(server.client.post("/health"), 405)
    assert "/v1/nothing" in error_of(server.client.get("/v1/nothing"), 404)["message"]
    assert server.client.head("/health").status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_too_large_body_is_413(server: ServerUnderTest, chunked: bool) -> None:
    body = json.dumps({"text": "a" * 10_000_000}).encode()
    content: Any = (body[i : i + 100_000] for i in range(0, len(body), 100_000)) if chunked else body
    response = server.client.post("/generate", content=content, headers={"Content-Type": "application/json"})
    assert "--max-body-mb" in error_of(response, 413)["message"]
    assert response.headers["connection"] == "close"
    assert generate(server, text="ab")["text"] == "abab"


def test_a_declared_size_is_refused_unread(server: ServerUnderTest) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(
            b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Expect: 100-continue\r\nContent-Length: 99000000000\r\n\r\n"
        )
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_a_large_prompt_is_tokenised_beside_the_loop(server: ServerUnderTest) -> None:
    error = error_of(server.generate(text="word " * 600_000), 400)
    assert "3000000 tokens" in error["message"]


# -- the other endpoints -----------------------------------------------------------------------------------------------


def test_information(server: ServerUnderTest) -> None:
    get = server.client.get
    assert get("/health").json() == {"status": "ok"}
    assert get("/ready").json() == {"status": "ready"}
    assert get("/health_generate").json() == {"status": "ok"}
    assert get("/model_info").json() == get("/get_model_info").json()
    assert get("/model_info").json()["context_length"] == 4096
    info = get("/server_info").json()
    assert info["served_model_name"] == "echo" and info["max_body_mb"] == 4 and "api_key" not in info
    assert info["internal_states"][0]["vocab_size"] == 257
    assert get("/get_server_info").status_code == 200
    assert get("/v1/models").json()["data"][0]["id"] == "echo"


def test_tokenize_and_detokenize(server: ServerUnderTest) -> None:
    post = server.client.post
    assert post("/tokenize", json={"prompt": "hé"}).json() == {
        "tokens": [104, 195, 169],
        "count": 3,
        "max_model_len": 4096,
    }
    assert post("/tokenize", json={"prompt": ["a", "bc"], "model": "echo"}).json()["count"] == [1, 2]
    assert post("/detokenize", json={"tokens": [104, 195, 169, 256]}).json() == {"text": "hé"}
    assert post("/detokenize", json={"tokens": [[97], [256]], "skip_special_tokens": False}).json()["text"] == [
        "a",
        "<eos>",
    ]
    assert error_of(post("/tokenize", json={"prompt": 5}), 400)["param"] == "prompt"
    assert error_of(post("/tokenize", json={"text": "a"}), 400)["code"] == "unknown_field"
    assert error_of(post("/tokenize", json={"prompt": "a", "model": "other"}), 404)["code"] == "model_not_found"
    for tokens in ("a", [1, "a"], [1, [2]], [-1], [257], [True], None):
        assert error_of(post("/detokenize", json={"tokens": tokens}), 400)["param"] == "tokens"


def test_flush_cache(server: ServerUnderTest) -> None:
    server.wait_until(lambda: server.running() == 0, "nothing runs")
    assert server.client.post("/flush_cache").json()["success"] is True
    assert server.client.get("/flush_cache").status_code == 200
    with server.client.stream("POST", "/generate", json=long("holds", stream=True)) as response:
        chunks = response.iter_bytes()  # kept: httpx closes the response with it
        next(chunks)
        assert error_of(server.client.post("/flush_cache"), 409)["message"] == "requests are running"


def test_profile(server: ServerUnderTest) -> None:
    assert server.client.post("/start_profile").json()["success"] is True
    assert server.client.get("/stop_profile").status_code == 200
    post = server.client.post
    assert post("/start_profile", json={"activities": ["CPU", "GPU"], "num_steps": None}).status_code == 200
    refused = error_of(post("/start_profile", json={"output_dir": "/tmp"}), 400)
    assert refused["code"] == "unsupported_field" and refused["param"] == "output_dir"
    assert error_of(post("/stop_profile", json={"steps": 3}), 400)["code"] == "unknown_field"


def test_metrics(server: ServerUnderTest) -> None:
    def values() -> dict[str, float]:
        lines = server.client.get("/metrics").text.splitlines()
        return {name: float(v) for name, v in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}

    # The worker answers in order: what earlier tests aborted has been counted after this.
    server.wait_until(lambda: server.client.post("/flush_cache").status_code == 200, "nothing runs")
    before = values()
    generate(server, 5, text="abc")
    list(events(server.generate(text="abc", stream=True, sampling_params={"max_new_tokens": 5})))
    error_of(server.generate(text=""), 400)
    after = values()

    def grew(name: str, labels: str = "") -> float:
        key = f'baton:{name}{{{labels}model_name="echo"}}'
        return after[key] - before.get(key, 0)

    assert grew("num_requests_total") == 2 and grew("prompt_tokens_total") == 6
    assert grew("generation_tokens_total") == 10 and grew("cached_tokens_total") == 4
    assert grew("time_to_first_token_seconds_count") == 1
    assert grew("inter_token_latency_seconds_count") == 4
    assert grew("e2e_request_latency_seconds_count") == 2
    assert grew("request_success_total", 'finished_reason="length",') == 2
    key = 'baton:num_errors_total{model_name="echo",status="400"}'
    assert after[key] - before.get(key, 0) == 1
    assert after['baton:kv_cache_usage_perc{model_name="echo"}'] == 0.25, "evictable slots are not in use"


def test_cors(server: ServerUnderTest) -> None:
    headers = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    response = server.client.options("/generate", headers=headers)
    assert response.headers["access-control-allow-origin"] == "https://example.org"
    response = server.client.get("/nope", headers={"Origin": "https://example.org"})
    assert response.status_code == 404 and "access-control-allow-origin" in response.headers
    assert "access-control-allow-origin" not in server.client.get("/health", headers={"Origin": "https://evil"}).headers


def test_api_key(model: Path, tmp_path: Path) -> None:
    with ServerUnderTest(model, tmp_path, "--api-key", KEY, "--incremental-streaming-output", behaviour={}) as server:
        server.wait_ready()
        for given in (None, KEY.encode(), b"Bearer wrong", "Bearer é".encode()):
            headers = httpx.Headers([] if given is None else [(b"Authorization", given)])
            response = server.client.post("/generate", json={"text": "a"}, headers=headers)
            assert error_of(response, 401)["type"] == "authentication_error"
            assert response.headers["www-authenticate"] == "Bearer"
        assert error_of(server.client.get("/server_info"), 401)
        assert server.client.get("/health").status_code == server.client.get("/metrics").status_code == 200
        server.client.headers["Authorization"] = f"Bearer {KEY}"
        assert server.generate(text="a").status_code == 200
        assert KEY not in server.client.get("/server_info").text
        # Here too: each event brings only what is new.
        got = events(server.generate(text="né", stream=True, sampling_params={"max_new_tokens": 6}))
        assert "".join(event["text"] for event in got) == "néné"
        assert [i for event in got for i in event["output_ids"]] == list("néné".encode())
        assert got[-1]["meta_info"]["completion_tokens"] == 6


def test_an_idle_server_sleeps(model: Path, tmp_path: Path) -> None:
    """Context switches say whether something spins, whatever else the machine does."""
    with ServerUnderTest(model, tmp_path, behaviour={}) as server:
        server.wait_ready()
        processes = {"http": server.process.pid, **{role: child.pid for role, child in server.children().items()}}

        def wakeups() -> dict[str, int]:
            return {
                role: sum(
                    int((thread / "status").read_text().split("voluntary_ctxt_switches:")[1].split()[0])
                    for thread in Path(f"/proc/{pid}/task").iterdir()
                )
                for role, pid in processes.items()
            }

        time.sleep(1)
        before = wakeups()
        time.sleep(3)
        per_second = {role: (count - before[role]) / 3 for role, count in wakeups().items()}
        assert all(rate < 60 for rate in per_second.values()), per_second
