"""Beam searches over HTTP, native and OpenAI's, on the real server with the toy model."""

from __future__ import annotations

import io
import itertools
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.doubles.http_calls import raw_post
from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

TOY = Path(__file__).parents[2] / "examples" / "toy_model"
TASK = "<|im_start|>user\nHow many lines are in manual.md?<|im_end|>\n<|im_start|>assistant\n"
HISTORY = "".join(f"<|sid_begin|><s_a_1><s_b_{i}><s_c_{i}><|sid_end|>" for i in range(1, 8))
SHOP = (
    f"<|im_start|>user\nThe user looked at: {HISTORY}\nWhat comes next?<|im_end|>\n<|im_start|>assistant\n<|sid_begin|>"
)
ITEMS = {"beam_width": 8, "n": 8, "max_new_tokens": 3}
COMMANDS = {"beam_width": 4, "n": 4, "max_new_tokens": 16}
LONG = {"beam_width": 4, "n": 3, "max_new_tokens": 900, "ignore_eos": True}

_names = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "8192", "--served-model-name", "toy"]
    flags += ["--max-running-requests", "32"]
    with ServerUnderTest(TOY, tmp_path_factory.mktemp("server"), *flags, behaviour=None) as running:
        yield running.wait_ready()


def name() -> str:
    return f"search-{next(_names)}"


def post(server: ServerUnderTest, path: str, **fields: Any) -> Any:
    response = server.client.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def search(server: ServerUnderTest, text: str, params: dict, **fields: Any) -> Any:
    return post(server, "/generate", text=text, sampling_params=params, **fields)


def events(response: httpx.Response) -> list[dict]:
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def ids_of(server: ServerUnderTest, text: str) -> list[int]:
    return post(server, "/tokenize", prompt=text)["tokens"]


def scored(server: ServerUnderTest, prompt: list[int], output: list[int]) -> float:
    """Log-probability of ``output`` behind ``prompt``, as the prompt of another request."""
    answer = post(
        server, "/generate", input_ids=prompt + output, sampling_params={"max_new_tokens": 1},
        return_logprob=True, logprob_start_len=len(prompt),
    )  # fmt: skip
    return sum(row[0] for row in answer["meta_info"]["input_token_logprobs"])


@pytest.mark.parametrize("length_penalty", [0, 1, 2])
@pytest.mark.parametrize(("text", "params"), [(TASK, COMMANDS), (SHOP, ITEMS)], ids=["commands", "items"])
def test_beam_scores_match_model_logprobs(
    server: ServerUnderTest, text: str, params: dict, length_penalty: float
) -> None:
    results = search(server, text, {**params, "length_penalty": length_penalty}, return_logprob=True)
    assert len(results) == params["n"] == len({tuple(result["output_ids"]) for result in results})
    prompt = ids_of(server, text)
    for result in results:
        meta, ids = result["meta_info"], result["output_ids"]
        assert meta["cumulative_logprob"] == pytest.approx(scored(server, prompt, ids), abs=1e-3)
        assert meta["sequence_score"] == pytest.approx(
            meta["cumulative_logprob"] / len(ids) ** length_penalty, rel=1e-5
        )
        assert [row[1] for row in meta["output_token_logprobs"]] == ids
        assert sum(row[0] for row in meta["output_token_logprobs"]) == pytest.approx(
            meta["cumulative_logprob"], abs=1e-4
        )
        assert meta["completion_tokens"] == len(ids) and meta["prompt_tokens"] == len(prompt)
    scores = [result["meta_info"]["sequence_score"] for result in results]
    assert scores == sorted(scores, reverse=True)


def test_wide_beam_finds_the_best_item(server: ServerUnderTest) -> None:
    """A search as wide as there are first tokens with a chance cannot lose the best item on its way."""
    wide = search(server, SHOP, {**ITEMS, "beam_width": 32, "n": 1, "length_penalty": 0})
    narrow = search(server, SHOP, {**ITEMS, "length_penalty": 0})
    greedy = search(server, SHOP, {"temperature": 0, "max_new_tokens": 3})
    best = wide["meta_info"]["sequence_score"]
    assert best >= narrow[0]["meta_info"]["sequence_score"] - 1e-4
    assert best >= scored(server, ids_of(server, SHOP), greedy["output_ids"]) - 1e-4
    one = search(server, SHOP, {"beam_width": 1, "max_new_tokens": 3})
    assert one["output_ids"] == greedy["output_ids"]


def test_fewer_results_are_the_best_of_the_beam(server: ServerUnderTest) -> None:
    every, few = search(server, SHOP, ITEMS), search(server, SHOP, {**ITEMS, "n": 3})
    assert [result["text"] for result in few] == [result["text"] for result in every[:3]]


def test_streams_and_completions_equal_native_beam_results(server: ServerUnderTest) -> None:
    results = search(server, TASK, COMMANDS)
    streamed = events(server.generate(text=TASK, sampling_params=COMMANDS, stream=True))
    assert [(event["index"], event["text"]) for event in streamed] == list(
        enumerate(result["text"] for result in results)
    )
    fields = {"model": "toy", "prompt": TASK, "use_beam_search": True, "n": 4, "max_tokens": 16, "temperature": 0}
    whole = post(server, "/v1/completions", **fields, logprobs=2)
    assert [choice["text"] for choice in whole["choices"]] == [result["text"] for result in results]
    for choice, result in zip(whole["choices"], results):
        meta = result["meta_info"]
        assert choice["baton"]["sequence_score"] == pytest.approx(meta["sequence_score"], abs=1e-5)
        assert len(choice["logprobs"]["tokens"]) == meta["completion_tokens"]
        assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(meta["cumulative_logprob"], abs=1e-4)
        assert all(2 <= len(tops) <= 3 for tops in choice["logprobs"]["top_logprobs"])
    total = sum(result["meta_info"]["completion_tokens"] for result in results)
    assert whole["usage"]["completion_tokens"] == total
    *chunks, last = events(
        server.client.post(
            "/v1/completions", json={**fields, "stream": True, "stream_options": {"include_usage": True}}
        )
    )
    assert [chunk["choices"][0]["text"] for chunk in chunks] == [result["text"] for result in results]
    assert last["usage"]["completion_tokens"] == total


def test_concurrent_beam_searches_and_samples_match_sequential_ones(server: ServerUnderTest) -> None:
    alone = search(server, SHOP, ITEMS), search(server, TASK, COMMANDS)
    sample = search(server, TASK, {"temperature": 0, "max_new_tokens": 16})

    def again(kind: int) -> Any:
        if kind == 0:
            return search(server, SHOP, ITEMS)
        if kind == 1:
            return search(server, TASK, {"temperature": 0, "max_new_tokens": 16})
        fields = {"text": [SHOP, TASK], "sampling_params": [ITEMS, COMMANDS]}
        return post(server, "/generate", **fields)

    with ThreadPoolExecutor(9) as threads:
        answers = list(threads.map(again, [0, 1, 2] * 3))
    for shop, single, both in zip(answers[0::3], answers[1::3], answers[2::3]):
        assert [result["text"] for result in shop] == [result["text"] for result in alone[0]]
        assert single["text"] == sample["text"]
        assert [result["text"] for result in both] == [result["text"] for result in (*alone[0], *alone[1])]
    server.wait_until(lambda: server.metric("kv_cache_private_tokens") == 0, "nothing is left")


def test_stop_strings_end_beam_results(server: ServerUnderTest) -> None:
    results = search(server, TASK, {**COMMANDS, "stop": ["manual", "\n```"]}, rid=(rid := name()))
    stopped = [result for result in results if result["meta_info"]["finish_reason"].get("matched") == "manual"]
    assert stopped
    for result in stopped:
        assert "manual" not in result["text"] and result["text"].startswith("```bash\n")
    rank = results.index(stopped[0])
    child = post(
        server, "/generate", continuation_of=rid, continuation_index=rank, continuation_suffix="manual.md",
        sampling_params={"temperature": 0, "max_new_tokens": 4},
    )  # fmt: skip
    assert child["text"].startswith("\n```"), child
    assert child["meta_info"]["continuation"]["trimmed_tokens"] >= 1


# -- continuations -----------------------------------------------------------------------------------------------------


SUFFIX = "<|im_end|>\n<|im_start|>tool\n12 manual.md<|im_end|>\n<|im_start|>assistant\n"
GREEDY = {"temperature": 0, "max_new_tokens": 12}


def test_each_beam_result_can_be_continued(server: ServerUnderTest) -> None:
    rid = name()
    results = search(server, TASK, COMMANDS, rid=rid, retain_ttl=60)
    prompt, suffix = ids_of(server, TASK), ids_of(server, SUFFIX)
    for rank, result in enumerate(results):
        kept, meta = result["output_ids"], result["meta_info"]
        if meta["finish_reason"]["type"] == "stop":
            kept = kept[:-1]
        assert 0 < meta["retained"]["ttl"] <= 60 and meta["retained"]["tokens"] in (
            len(prompt) + len(kept) - 1,
            len(prompt) + len(kept),
        )
        fields = {"continuation_of": rid, "continuation_suffix": SUFFIX, "sampling_params": GREEDY}
        child = post(server, "/generate", **fields, continuation_index=rank)
        came = child["meta_info"]["continuation"]
        assert came["path"] == "handoff" and came["recomputed_tokens"] <= 1
        assert came["inherited_tokens"] == len(prompt) + len(kept)
        ids = [*prompt, *kept, *suffix]
        replay = post(server, "/generate", input_ids=ids, sampling_params=GREEDY, cache_salt=name())
        assert child["output_ids"] == replay["output_ids"]
    error = server.generate(continuation_of=rid, continuation_index=4, sampling_params=GREEDY)
    assert error.status_code == 400 and error.json()["error"]["param"] == "continuation_index"
    server.wait_until(lambda: server.metric("leased_tokens") == 0, "every lease was handed off")


def test_beam_search_continues_a_request_by_handoff(server: ServerUnderTest) -> None:
    rid = name()
    parent = search(server, TASK, GREEDY, rid=rid, retain_ttl=60)
    results = post(server, "/generate", continuation_of=rid, continuation_suffix=SUFFIX, sampling_params=COMMANDS)
    kept = parent["output_ids"]
    if parent["meta_info"]["finish_reason"]["type"] == "stop":
        kept = kept[:-1]
    ids = [*ids_of(server, TASK), *kept, *ids_of(server, SUFFIX)]
    replay = post(server, "/generate", input_ids=ids, sampling_params=COMMANDS, cache_salt=name())
    assert [result["output_ids"] for result in results] == [result["output_ids"] for result in replay]
    for result in results:
        came = result["meta_info"]["continuation"]
        assert came["path"] == "handoff" and came["recomputed_tokens"] <= 1


def test_child_waits_for_a_running_beam_search(server: ServerUnderTest) -> None:
    rid, answers = name(), {}
    running = {**LONG, "max_new_tokens": 400}

    def run(key: str, **fields: Any) -> None:
        answers[key] = server.client.post("/generate", json=fields)

    parent = threading.Thread(
        target=run, args=("parent",), kwargs={"text": TASK, "rid": rid, "sampling_params": running}
    )
    parent.start()
    child = {"continuation_of": rid, "continuation_suffix": SUFFIX, "sampling_params": GREEDY}

    def is_undecided() -> bool:
        now = server.generate(**child, continuation_at="now")
        return now.status_code == 409 and now.json()["error"]["code"] == "parent_undecided"

    server.wait_until(is_undecided, "the search runs")
    assert server.generate(**child, continuation_index=3).status_code == 400
    run("child", **child, continuation_index=2)
    parent.join(60)
    third = answers["parent"].json()[2]
    ids = [*ids_of(server, TASK), *third["output_ids"], *ids_of(server, SUFFIX)]
    replay = post(server, "/generate", input_ids=ids, sampling_params=GREEDY, cache_salt=name())
    assert answers["child"].json()["output_ids"] == replay["output_ids"]
    assert answers["child"].json()["meta_info"]["continuation"]["path"] == "handoff"


# -- trouble -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("params", "status", "param", "words"),
    [
        ({"beam_width": 513}, 400, "sampling_params.beam_width", "1 to 512"),
        ({"beam_width": 33}, 400, "beam_width", "--max-running-requests"),
        ({"beam_width": 4, "n": 5}, 400, "sampling_params.n", "at most beam_width (4)"),
        ({"beam_width": 4, "temperature": 0.7}, 400, "sampling_params.temperature", "does not sample"),
        ({"beam_width": 4, "frequency_penalty": 1}, 400, "sampling_params.frequency_penalty", "leave it out"),
        ({"beam_width": 4, "length_penalty": 99}, 400, "sampling_params.length_penalty", "[-10, 10]"),
        ({"beam_width": 4, "early_stopping": "no"}, 400, "sampling_params.early_stopping", "never"),
        ({"length_penalty": 2}, 400, "sampling_params.length_penalty", "needs a beam_width"),
        ({"beam_width": 4, "max_new_tokens": 2040}, 400, "max_new_tokens", "maximum context length"),
        ({"beam_width": 32, "max_new_tokens": 1000}, 400, None, "can never fit"),
        ({"beam_width": 4, "item_trie": "unknown"}, 404, "sampling_params.item_trie", "unknown"),
    ],
)
def test_unsupported_beam_parameters_are_refused(
    server: ServerUnderTest, params: dict, status: int, param: str | None, words: str, stream: bool
) -> None:
    response = server.generate(text=TASK, sampling_params=params, stream=stream)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert words in error["message"] and (param is None or error["param"] == param), error


def test_beam_over_fewer_items_returns_all_items(server: ServerUnderTest) -> None:
    codes = [ids_of(server, f"<s_a_{a}><s_b_{b}><s_c_{c}>") for a, b, c in ((0, 1, 2), (0, 1, 3), (1, 4, 2))]
    assert {len(code) for code in codes} == {3}
    table = io.BytesIO()
    np.save(table, np.array(codes, dtype=np.int32))
    loaded = server.client.post(
        "/item_tries?name=three", content=table.getvalue(), headers={"Content-Type": "application/octet-stream"}
    )
    assert loaded.status_code == 200, loaded.text
    try:
        results = search(server, SHOP, {**ITEMS, "item_trie": "three"})
        assert sorted(result["output_ids"] for result in results) == sorted(codes)
        for result in results:
            assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": "item"}
            few = result["meta_info"]["beam_search"]
            assert few["results"] == 3 and few["reason"].startswith("3 of 8 sequences") and "three" in few["reason"]
        prompt = {"prompt": SHOP, "max_tokens": 3, "use_beam_search": True, "n": 8, "item_trie": "three"}
        answer = post(server, "/v1/completions", **prompt)
        assert [choice["text"] for choice in answer["choices"]] == [result["text"] for result in results]
        assert answer["usage"]["completion_tokens"] == 9
        short = server.generate(text=SHOP, sampling_params={**ITEMS, "max_new_tokens": 2, "item_trie": "three"})
        assert short.status_code == 400 and "shortest item" in short.json()["error"]["message"]
    finally:
        server.client.delete("/item_tries/three")


def test_abort_ends_all_beam_results(server: ServerUnderTest) -> None:
    rid, answers = name(), []
    thread = threading.Thread(target=lambda: answers.append(search(server, TASK, LONG, rid=rid)))
    server.wait_until(lambda: server.running() == 0, "nothing runs")
    thread.start()
    server.wait_until(lambda: server.running() == 1, "the search runs")
    assert post(server, "/abort_request", rid=rid) == {"aborted": [rid]}
    thread.join(60)
    assert [result["meta_info"]["finish_reason"]["type"] for result in answers[0]] == ["abort"] * 3
    assert [result["text"] for result in answers[0]] == [""] * 3
    server.wait_until(lambda: server.client.post("/flush_cache").status_code == 200, "the worker is idle")
    server.wait_until(lambda: server.metric("kv_cache_free_tokens") == 8192, "all of the pool is free")


@pytest.mark.parametrize("stream", [False, True])
def test_client_disconnect_aborts_beam_search(server: ServerUnderTest, stream: bool) -> None:
    server.wait_until(lambda: server.running() == 0, "nothing runs")
    body = json.dumps({"text": TASK, "rid": name(), "stream": stream, "sampling_params": LONG}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(raw_post(body))
        server.wait_until(lambda: server.running() == 1, "the search runs")
    server.wait_until(lambda: server.running() == 0, "the search is aborted")
    server.wait_until(lambda: server.metric("kv_cache_private_tokens") == 0, "its beams are free")
