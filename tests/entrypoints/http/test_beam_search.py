"""Beam searches over real sockets: one call, as many answers as there are results. The worker is a double."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.doubles.byte_tokenizer import write_byte_tokenizer
from tests.doubles.http_calls import raw_post
from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    model, folder = write_byte_tokenizer(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("server")
    with ServerUnderTest(model, folder, "--served-model-name", "echo", behaviour={"step_s": 0.002}) as running:
        yield running.wait_ready()


def search(server: ServerUnderTest, **fields: Any) -> Any:
    params = {"beam_width": 3, "max_new_tokens": 2, **fields.pop("sampling_params", {})}
    response = server.generate(sampling_params=params, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def complete(server: ServerUnderTest, **fields: Any) -> httpx.Response:
    return server.client.post("/v1/completions", json={"max_tokens": 2, **fields})


def events(response: httpx.Response) -> list[dict]:
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


# The double's token t has the logprob -t / 1000, so "ab" is likelier than "bc".
AB, BC, CA = -0.195, -0.197, -0.196


def test_beam_results_are_listed_best_first(server: ServerUnderTest) -> None:
    answers = search(server, text="abc", rid="s", sampling_params={"n": 3, "length_penalty": 2})
    assert [answer["text"] for answer in answers] == ["ab", "ca", "bc"]
    assert [answer["output_ids"] for answer in answers] == [[97, 98], [99, 97], [98, 99]]
    for answer, total in zip(answers, (AB, CA, BC)):
        meta = answer["meta_info"]
        assert meta["cumulative_logprob"] == pytest.approx(total)
        assert meta["sequence_score"] == pytest.approx(total / 4)
        assert meta["id"] == "s" and meta["finish_reason"] == {"type": "length", "length": 2}
        assert "beam_search" not in meta


def test_single_beam_result_is_not_a_list(server: ServerUnderTest) -> None:
    assert search(server, text="abc")["text"] == "ab"
    assert [answer["text"] for answer in search(server, text=["abc", "xa"])] == ["ab", "xa"]


def test_beam_results_carry_logprobs(server: ServerUnderTest) -> None:
    fields: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    for answer in search(server, text="abc", sampling_params={"n": 2}, **fields):
        meta = answer["meta_info"]
        assert [row[1] for row in meta["output_token_logprobs"]] == answer["output_ids"]
        assert len(meta["input_token_logprobs"]) == 3 and len(meta["output_top_logprobs"]) == 2
        assert sum(row[0] for row in meta["output_token_logprobs"]) == pytest.approx(meta["cumulative_logprob"])


def test_missing_beam_results_are_explained(server: ServerUnderTest) -> None:
    answers = search(server, text=["ab", "abc"], sampling_params={"n": 3})
    assert [answer["text"] for answer in answers] == ["ab", "ba", "ab", "ca", "bc"]
    few = {"results": 2, "reason": "2 of 3 sequences"}
    assert [answer["meta_info"].get("beam_search") for answer in answers] == [few, few, None, None, None]


def test_beam_items_are_complete_and_stop_strings_trimmed(server: ServerUnderTest) -> None:
    params = {"n": 3, "max_new_tokens": 9, "stop": ["cc", "ca"]}
    item, stopped, other = search(server, text="abc", sampling_params={**params, "item_trie": "pairs"})
    assert (item["text"], item["meta_info"]["finish_reason"]) == ("ab", {"type": "stop", "matched": "item"})
    # The double looks for stop strings first.
    assert other["text"] == "bc"
    assert (stopped["text"], stopped["meta_info"]["finish_reason"]) == ("", {"type": "stop", "matched": "ca"})


def test_beam_search_without_results_is_aborted(server: ServerUnderTest) -> None:
    answers = search(server, text="abc", sampling_params={"n": 2, "item_trie": "empty"})
    assert [answer["meta_info"]["finish_reason"] for answer in answers] == [
        {"type": "abort", "message": "no item is left"}
    ] * 2
    assert all(answer["text"] == "" and "sequence_score" not in answer["meta_info"] for answer in answers)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("params", "status", "param"),
    [
        ({"beam_width": 258}, 400, "beam_width"),
        ({"beam_width": 2, "n": 3}, 400, "sampling_params.n"),
        ({"beam_width": 2, "temperature": 0.6}, 400, "sampling_params.temperature"),
        ({"beam_width": 2, "item_trie": "unknown"}, 404, "sampling_params.item_trie"),
        ({"item_trie": "unknown"}, 404, "sampling_params.item_trie"),
    ],
)
def test_errors(server: ServerUnderTest, params: dict, status: int, param: str, stream: bool) -> None:
    response = server.generate(text="a", sampling_params=params, stream=stream)
    assert response.status_code == status and response.json()["error"]["param"] == param


def test_beam_stream_has_one_event_per_result(server: ServerUnderTest) -> None:
    params = {"beam_width": 3, "n": 3, "max_new_tokens": 4}
    got = events(server.generate(text=["abc", "ab"], sampling_params=params, stream=True))
    assert [(event["index"], event["text"]) for event in got] == [
        (0, "abca"), (1, "bcab"), (2, "cabc"), (3, "abab"), (4, "baba"),
    ]  # fmt: skip
    assert all(event["meta_info"]["finish_reason"] for event in got)


def test_beam_completions_have_the_vllm_shape(server: ServerUnderTest) -> None:
    fields = {"prompt": "abc", "use_beam_search": True, "n": 3, "temperature": 0, "logprobs": 2, "rid": "v"}
    whole = complete(server, **fields)
    assert whole.status_code == 200, whole.text
    choices = whole.json()["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "ab"), (1, "ca"), (2, "bc")]
    assert [choice["baton"]["sequence_score"] for choice in choices] == [
        pytest.approx(total / 2) for total in (AB, CA, BC)
    ]
    assert [choice["logprobs"]["tokens"] for choice in choices] == [["a", "b"], ["c", "a"], ["b", "c"]]
    usage = whole.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 6, 9)
    chunks = events(complete(server, **fields, stream=True, stream_options={"include_usage": True}))
    assert [chunk["choices"][0] for chunk in chunks[:-1]] == choices
    assert chunks[-1]["usage"] == usage


def test_beam_completions_with_fewer_results(server: ServerUnderTest) -> None:
    fields = {"prompt": ["ab", "abc"], "use_beam_search": True, "n": 3, "rid": "few"}
    answer = complete(server, **fields).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "ab"), (1, "ba"), (3, "ab"), (4, "ca"), (5, "bc"),
    ]  # fmt: skip
    assert answer["choices"][0]["baton"]["beam_search"] == {"results": 2, "reason": "2 of 3 sequences"}
    assert answer["usage"]["completion_tokens"] == 10 and answer["usage"]["prompt_tokens"] == 5
    chunks = events(complete(server, **fields, stream=True))
    assert sorted((chunk["choices"][0] for chunk in chunks), key=lambda choice: choice["index"]) == answer["choices"]


def test_beam_completion_errors_use_completion_field_names(server: ServerUnderTest) -> None:
    error = complete(server, prompt="a", use_beam_search=True, n=2, item_trie="x").json()["error"]
    assert error["param"] == "item_trie"
    assert complete(server, prompt="a", use_beam_search=True, n=2, best_of=1).status_code == 400
    assert complete(server, prompt="a", use_beam_search=True, n=258).json()["error"]["param"] == "beam_width"


LONG = {"beam_width": 3, "n": 2, "max_new_tokens": 4000}


@pytest.mark.parametrize("stream", [False, True])
def test_client_disconnect_aborts_beam_search(server: ServerUnderTest, stream: bool) -> None:
    body = json.dumps({"text": "abc", "rid": "gone", "stream": stream, "sampling_params": LONG}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(raw_post(body))
        server.wait_until(lambda: server.running() == 1, "the search runs")
    server.wait_until(lambda: server.running() == 0, "the search is aborted", 5)
    assert server.client.post("/abort_request", json={"rid": "gone"}).status_code == 404
