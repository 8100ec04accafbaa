"""The HTTP API over real sockets: answers, streams, names, aborts, disconnects."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket

import httpx
import pytest

from tests.doubles.http_calls import error_of, events, generate, long, raw_post
from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process


# -- answers -----------------------------------------------------------------------------------------------------------


def test_generate_answer_has_the_documented_shape(server: ServerUnderTest) -> None:
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
        "cached_tokens_details": {"device": 2, "host": 0, "disk": 0, "remote": 0},
    }


def test_text_and_input_ids_give_the_same_answer(server: ServerUnderTest) -> None:
    assert generate(server, input_ids=[97, 98])["text"] == generate(server, text="ab")["text"] == "abab"


def test_batch_and_samples_are_ordered(server: ServerUnderTest) -> None:
    answers = generate(server, text=["ab", "xyz"], sampling_params={"n": 2}, rid="batch")
    assert [a["text"] for a in answers] == ["abab", "baba", "xyzx", "yzxy"]
    assert [a["meta_info"]["id"] for a in answers] == ["batch_0", "batch_0", "batch_1", "batch_1"]
    assert len(generate(server, text=["a"])) == 1, "a batch of one is a list"
    assert len(generate(server, input_ids=[97], sampling_params={"n": 3})) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_zero_new_tokens_gives_an_empty_answer(server: ServerUnderTest, stream: bool) -> None:
    fields = {"text": "abc", "return_logprob": True, "logprob_start_len": 0, "stream": stream}
    response = server.generate(sampling_params={"max_new_tokens": 0}, **fields)
    (answer,) = events(response) if stream else [response.json()]
    assert (answer["text"], answer["output_ids"]) == ("", [])
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 0} and meta["completion_tokens"] == 0
    assert [row[1] for row in meta["input_token_logprobs"]] == [97, 98, 99] and meta["output_token_logprobs"] == []


@pytest.mark.parametrize("stream", [False, True])
def test_echo_without_output_scores_a_text(server: ServerUnderTest, stream: bool) -> None:
    fields = {"prompt": ["ab", "xyz"], "echo": True, "max_tokens": 0, "logprobs": 1, "stream": stream}
    response = server.client.post("/v1/completions", json=fields)
    parts = events(response) if stream else [response.json()]
    choices = {choice["index"]: choice for part in parts for choice in part["choices"]}
    assert {index: choice["text"] for index, choice in choices.items()} == {0: "ab", 1: "xyz"}
    for index, text in enumerate(["ab", "xyz"]):
        choice = choices[index]
        assert choice["finish_reason"] == "length" and choice["logprobs"]["tokens"] == list(text)
        first, *rest = choice["logprobs"]["token_logprobs"]
        assert first is None and rest == [pytest.approx(-ord(letter) / 1000) for letter in text[1:]]
        assert choice["logprobs"]["text_offset"] == list(range(len(text)))


def test_batch_items_have_their_own_parameters(server: ServerUnderTest) -> None:
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
        server,
        2,
        text="ab",
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )
    meta = answer["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 97, "a"], [pytest.approx(-0.098), 98, "b"]]
    assert meta["output_token_logprobs"] == [[pytest.approx(-0.097), 97, "a"], [pytest.approx(-0.098), 98, "b"]]
    assert meta["input_top_logprobs"] == [None, [[pytest.approx(-0.098), 98, "b"], [pytest.approx(-0.099), 99, "c"]]]
    assert [row[0][1] for row in meta["output_top_logprobs"]] == [97, 98]


def test_stop_strings_tokens_and_eos_end_the_output(server: ServerUnderTest) -> None:
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


def test_duplicate_live_rid_is_refused_and_finished_rid_is_free(server: ServerUnderTest) -> None:
    with server.client.stream("POST", "/generate", json=long("dup", stream=True)) as response:
        chunks = response.iter_bytes()  # kept: httpx closes the response with it
        next(chunks)
        error = error_of(server.generate(text="a", rid="dup"), 409)
        assert error["code"] == "duplicate_rid" and "'dup'" in error["message"]
    server.wait_until(lambda: server.generate(text="a", rid="dup").status_code == 200, "the rid is free again")
    assert error_of(server.generate(text=["a", "b"], rid=["same", "same"]), 400)["param"] == "rid"


# -- aborts and disconnects --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_client_disconnect_aborts_its_request(server: ServerUnderTest, stream: bool) -> None:
    body = json.dumps(long(f"gone-{stream}", stream=stream)).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(raw_post(body))
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


def test_invalid_abort_requests_are_refused(server: ServerUnderTest) -> None:
    post = server.client.post
    assert error_of(post("/abort_request", json={"rid": "nobody"}), 404)["param"] == "rid"
    assert error_of(post("/abort_request", json={}), 400)
    assert error_of(post("/abort_request", json={"rid": "x", "abort_all": True}), 400)
    assert error_of(post("/abort_request", json={"rid": 5}), 400)
    assert error_of(post("/abort_request", json={"ridd": "x"}), 400)["message"].endswith("did you mean rid?")
    assert post("/abort_request", json={"abort_all": True}).json() == {"aborted": []}


def test_slow_client_delays_no_other_and_gets_the_whole_answer(server: ServerUnderTest) -> None:
    body = json.dumps(long("slow", stream=True)).encode()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.port))
        slow.sendall(raw_post(body, "Connection: close"))
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


def test_two_hundred_concurrent_requests(server: ServerUnderTest) -> None:
    async def run() -> list[dict]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
            bodies = [{"text": f"<{i}>", "sampling_params": {"max_new_tokens": 20}} for i in range(200)]
            responses = await asyncio.gather(*(client.post("/generate", json=body) for body in bodies))
            return [response.json() for response in responses]

    for i, answer in enumerate(asyncio.run(run())):
        assert answer["text"] == (f"<{i}>" * 20)[:20]
