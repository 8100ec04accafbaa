"""What the HTTP API says to bad input, and that none of it breaks the server."""

from __future__ import annotations

import json
import random
import socket
from typing import Any

import pytest

from baton.entrypoints.fields.continuation import CONTINUATION
from tests.doubles.http_calls import error_of, generate
from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process


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
        ({"text": "a" * 5000}, "text", "(5000 tokens) is longer than the model's context length (4096 tokens)"),
        ({"text": "a" * 4096}, "text", "4096 tokens"),
        ({"text": "abc", "sampling_params": {"max_new_tokens": 4094}}, "max_new_tokens", "max_new_tokens <= 4093"),
        ({"text": "a", "sampling_params": {"temperature": -0.5}}, "sampling_params.temperature", "-0.5"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens", "1 or more"),
        ({"text": "a", "sampling_params": {"top_k": 10**30}}, "sampling_params.top_k", "-1"),
        ({"text": "a", "sampling_params": {"max_new_tokens": None, "min_new_tokens": 10**9}}, "min_new_tokens", "4095"),
        ({"text": "a", "sampling_params": {"seed": 10**30}}, "sampling_params.seed", "64 bits"),
        ({"text": "a", "sampling_params": {"stop_token_ids": [300]}}, "stop_token_ids", "300"),
        ({"text": "a", "sampling_params": {"logit_bias": {"300": 1}}}, "logit_bias", "300"),
        ({"text": "a", "sampling_params": {"structural_tag": "x"}}, "sampling_params.structural_tag", "not valid JSON"),
        ({"text": "a", "lora_path": ["a", "b"]}, "lora_path", "one"),
        ({"text": "a", "lora_path": 5}, "lora_path", "string"),
        ({"text": "a", "sampling_parms": {}}, "sampling_parms", "did you mean sampling_params?"),
        ({"text": "a", "sampling_params": []}, "sampling_params", "single prompt"),
        ({"text": "a", "sampling_params": "hot"}, "sampling_params", "object"),
        ({"text": "a", "stream": 1}, "stream", "true or false"),
        ({"text": "a", "rid": ""}, "rid", "1 to 512"),
        ({"text": "a", "rid": ["x"]}, "rid", "1 names for 1 prompts"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 1}, "logprob_start_len", "1 tokens"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 10**6}, "top_logprobs_num", "257"),
        ({"continuation_of": "x", "continuation_index": 10**30}, "continuation_index", "64 bits"),
        ({"text": "a", "retain_n": 10**30}, "retain_n", "64 bits"),
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
def test_invalid_json_is_400(server: ServerUnderTest, path: str, body: bytes) -> None:
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
        *CONTINUATION,
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


def test_wrong_methods_are_405_and_unknown_paths_404(server: ServerUnderTest) -> None:
    for method in ("GET", "PUT", "DELETE"):
        response = server.client.request(method, "/generate")
        assert "use POST" in error_of(response, 405)["message"] and response.headers["allow"] == "POST"
    assert server.client.head("/generate").status_code == 405
    assert error_of(server.client.post("/health"), 405)
    assert "/v1/nothing" in error_of(server.client.get("/v1/nothing"), 404)["message"]
    assert server.client.head("/health").status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_oversized_body_is_413(server: ServerUnderTest, chunked: bool) -> None:
    body = json.dumps({"text": "a" * 10_000_000}).encode()
    content: Any = (body[i : i + 100_000] for i in range(0, len(body), 100_000)) if chunked else body
    response = server.client.post("/generate", content=content, headers={"Content-Type": "application/json"})
    assert "--max-body-mb" in error_of(response, 413)["message"]
    assert generate(server, text="ab")["text"] == "abab"


def test_oversized_content_length_is_refused_before_reading(server: ServerUnderTest) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(
            b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Expect: 100-continue\r\nContent-Length: 99000000000\r\n\r\n"
        )
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/generate", {"x" * 10**6: 1}), ("/tokenize", {"x" * 10**6: 1}), ("/flush_cache", {"x" * 10**6: 1}),
     ("/generate", {"text": "a", "sampling_params": {"x" * 10**6: 1}}),
     ("/generate", {"text": "a", "sampling_params": {"stop": ["", "x" * 10**4]}}),
     ("/tokenize", {"prompt": "a", "model": "x" * 10**6}), ("/detokenize", {"tokens": ["x" * 10**6]})],
)  # fmt: skip
def test_error_bodies_stay_short(server: ServerUnderTest, path: str, fields: dict) -> None:
    response = server.client.post(path, json=fields)
    assert 400 <= response.status_code < 500 and len(response.content) < 5_000


def test_detokenize_list_is_limited_to_the_context_length(server: ServerUnderTest) -> None:
    assert server.client.post("/detokenize", json={"tokens": [[97] * 4096] * 2}).status_code == 200
    error = error_of(server.client.post("/detokenize", json={"tokens": [[97] * 4097]}), 400)
    assert error["param"] == "tokens" and "4097 ids; the context has 4096" in error["message"]


def test_text_that_cannot_fit_is_refused_before_tokenization(server: ServerUnderTest) -> None:
    error = error_of(server.generate(text="word " * 600_000), 400)
    assert error["code"] == "context_length_exceeded" and "at least 4097 tokens" in error["message"]
    error = error_of(server.client.post("/tokenize", json={"prompt": "word " * 600_000}), 400)
    assert error["param"] == "prompt" and "at least 4097 tokens" in error["message"]
