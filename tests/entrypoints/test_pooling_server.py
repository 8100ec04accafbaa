"""Embeddings and scores over HTTP: OpenAI's client, the forms of vLLM and SGLang, hostile bodies, aborts, salts."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from tests.doubles import pooled_models
from tests.doubles.http_calls import error_of
from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

FLAGS = ("--max-total-tokens", "8192", "--device", "cpu", "--dtype", "float32", "--linear-backend", "torch")
TEXTS = ["yes", "A longer text — with café and 世界.", "three"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    """A language model, which embeds without a flag."""
    folder = tmp_path_factory.mktemp("model")
    pooled_models.write_language_model(folder)
    flags = (*FLAGS, "--page-size", "16", "--chunked-prefill-size", "64", "--max-prompts-per-request", "200")
    with ServerUnderTest(folder, tmp_path_factory.mktemp("server"), *flags, behaviour=None) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    """A model without a head."""
    folder = tmp_path_factory.mktemp("embedder")
    pooled_models.write_embedder(folder)
    with ServerUnderTest(folder, tmp_path_factory.mktemp("server"), *FLAGS, behaviour=None) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    folder = tmp_path_factory.mktemp("classifier")
    pooled_models.write_classifier(folder, 3)
    with ServerUnderTest(folder, tmp_path_factory.mktemp("server"), *FLAGS, behaviour=None) as running:
        yield running.wait_ready()


@pytest.fixture
def client(server: ServerUnderTest) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(server: ServerUnderTest, path: str, **fields: Any) -> Any:
    response = server.client.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_openai_client_embeds(server: ServerUnderTest, client: openai.OpenAI) -> None:
    """It asks for base64 unless told otherwise, and decodes it."""
    answer = client.embeddings.create(model="any", input=TEXTS)
    plain = client.embeddings.create(model="any", input=TEXTS, encoding_format="float")
    assert [each.index for each in answer.data] == [0, 1, 2]
    for one, other in zip(answer.data, plain.data, strict=True):
        assert len(one.embedding) == 48
        np.testing.assert_allclose(one.embedding, other.embedding, atol=1e-6)
        assert np.linalg.norm(one.embedding) == pytest.approx(1, abs=1e-5)
    lengths = [len(post(server, "/tokenize", prompt=text)["tokens"]) for text in TEXTS]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(lengths)
    short = client.embeddings.create(model="any", input=TEXTS[0], dimensions=5, user="someone")
    whole = np.array(answer.data[0].embedding)
    np.testing.assert_allclose(short.data[0].embedding, whole[:5] / np.linalg.norm(whole[:5]), atol=1e-5)
    ids = post(server, "/tokenize", prompt=TEXTS[1])["tokens"]
    for given in (ids, [ids]):
        same = client.embeddings.create(model="any", input=given)
        np.testing.assert_allclose(same.data[0].embedding, answer.data[1].embedding, atol=1e-5)


def test_base64_is_little_endian_float32(server: ServerUnderTest) -> None:
    coded = post(server, "/v1/embeddings", input="yes", encoding_format="base64")["data"][0]["embedding"]
    numbers = post(server, "/v1/embeddings", input="yes")["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(coded), "<f4").tolist() == pytest.approx(numbers, abs=1e-7)


def test_large_answer_comes_in_pieces(server: ServerUnderTest) -> None:
    """More numbers than are encoded at once, and more prompts than run at a time."""
    texts = [f"text {i}" for i in range(200)]
    answer = post(server, "/v1/embeddings", input=texts, normalize=False)
    alone = post(server, "/v1/embeddings", input=texts[123], normalize=False)
    assert [each["index"] for each in answer["data"]] == list(range(200))
    np.testing.assert_allclose(answer["data"][123]["embedding"], alone["data"][0]["embedding"], atol=1e-4)


def test_sglang_forms(server: ServerUnderTest, classifier: ServerUnderTest) -> None:
    single = post(server, "/encode", text=TEXTS[1], rid="mine")
    assert single["meta_info"]["id"] == "mine" and len(single["embedding"]) == 48
    several = post(server, "/encode", input_ids=[[1, 2], [3]])
    assert [each["meta_info"]["prompt_tokens"] for each in several] == [2, 1]
    scored = post(server, "/v1/score", query="x ", items=["a", "b"], label_token_ids=[5, 6], apply_softmax=True)
    assert scored["object"] == "scoring" and [sum(row) for row in scored["scores"]] == pytest.approx([1, 1], abs=1e-5)
    rewards = post(classifier, "/classify", text=TEXTS)
    logits = post(classifier, "/pooling", input=TEXTS, use_activation=False)
    for one, other in zip(rewards, logits["data"], strict=True):
        np.testing.assert_allclose(one["embedding"], other["data"], atol=1e-5)


def test_vllm_forms(server: ServerUnderTest, classifier: ServerUnderTest) -> None:
    ranked = post(server, "/v1/rerank", query="q", documents=["a", {"text": "b"}, "c"], top_n=2)
    assert ranked["id"].startswith("rerank-") and len(ranked["results"]) == 2
    assert all(result["document"]["text"] == "abc"[result["index"]] for result in ranked["results"])
    scored = post(server, "/score", text_1="q", text_2=["a", "b", "c"])
    by_index = {each["index"]: each["score"] for each in scored["data"]}
    for result in ranked["results"]:
        assert result["relevance_score"] == pytest.approx(by_index[result["index"]], abs=1e-5)
    classes = post(classifier, "/v1/classify", input=TEXTS)
    assert [each["label"] for each in classes["data"]] == [
        f"class {int(np.argmax(each['probs']))}" for each in classes["data"]
    ]
    assert all(sum(each["probs"]) == pytest.approx(1, abs=1e-5) for each in classes["data"])


def test_headless_model_serves_health_and_refuses_generation(
    embedder: ServerUnderTest, classifier: ServerUnderTest
) -> None:
    for running in (embedder, classifier):
        assert running.client.get("/health_generate").status_code == 200
        for path, body in (
            ("/generate", {"text": "x"}),
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            error = error_of(running.client.post(path, json=body), 400)
            assert error["code"] == "unsupported_by_model" and "generates no text" in error["message"]
        assert len(post(running, "/v1/embeddings", input="x")["data"][0]["embedding"]) == 48


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": ["x", ""]}, "input"),
        ("/v1/embeddings", {"input": ["x", 1]}, "input"),
        ("/v1/embeddings", {"input": [[1], []]}, "input"),
        ("/v1/embeddings", {"input": [[1.5]]}, "input"),
        ("/v1/embeddings", {"input": [True]}, "input"),
        ("/v1/embeddings", {"input": [10**30]}, "input"),
        ("/v1/embeddings", {"input": [-1]}, "input"),
        ("/v1/embeddings", {"input": ["x"] * 10_000}, "input"),
        ("/v1/embeddings", {"input": "x" * 5000}, "input"),
        ("/v1/embeddings", {"input": [1] * 5000}, "input"),
        ("/v1/embeddings", {"input": "x", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "x", "dimensions": 49}, "dimensions"),
        ("/v1/embeddings", {"input": "x", "dimensions": 10**30}, "dimensions"),
        ("/v1/embeddings", {"input": "x", "dimensions": 2.0}, "dimensions"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "x", "messages": [{"role": "user"}]}, "messages"),
        ("/v1/embeddings", {"input": "x", "inptu": 1}, "inptu"),
        ("/encode", {}, "text"),
        ("/encode", {"text": "x", "input_ids": [1]}, "text"),
        ("/encode", {"text": [1, 2]}, "text"),
        ("/pooling", {"input": "x", "task": "token_embed"}, "task"),
        ("/v1/score", {"text_1": "x"}, "text_1"),
        ("/v1/score", {"text_1": ["x", "y"], "text_2": ["x"]}, "text_1"),
        ("/v1/score", {"text_1": "x", "text_2": "y", "query": "z"}, "text_1"),
        ("/v1/score", {"query": "x", "items": ["y"]}, "label_token_ids"),
        ("/v1/score", {"query": "x", "items": ["y"], "label_token_ids": [10**12]}, "label_token_ids"),
        ("/v1/score", {"query": "x", "items": [[1]], "label_token_ids": [1]}, "items"),
        ("/v1/score", {"text_1": "x", "text_2": "y", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ("/v1/rerank", {"query": "x", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "x", "documents": [{"title": "y"}]}, "documents"),
        ("/v1/rerank", {"query": "x", "documents": ["y"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "x", "documents": ["y" * 5000]}, "documents"),
        ("/v1/classify", {"input": "x"}, None),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_hostile_bodies_are_refused_by_name(server: ServerUnderTest, path: str, body: dict, param: str | None) -> None:
    error = error_of(server.client.post(path, json=body), 400)
    assert error["param"] == param, error
    assert server.client.get("/health").status_code == 200


def test_infinity_in_body_is_no_json(server: ServerUnderTest) -> None:
    answer = server.client.post(
        "/v1/embeddings", content=b'{"input": [NaN]}', headers={"Content-Type": "application/json"}
    )
    assert error_of(answer, 400)["code"] == "invalid_json"


def test_aborted_call_answers_with_an_error(server: ServerUnderTest) -> None:
    """The worker is paused, so that the call is there to be aborted."""
    assert server.client.post("/pause_generation", json={}).status_code == 200
    answers: list[Any] = []
    body = {"input": ["a text"] * 20, "rid": "gone"}
    asking = threading.Thread(target=lambda: answers.append(server.client.post("/v1/embeddings", json=body)))
    asking.start()
    while server.client.post("/abort_request", json={"rid": "gone"}).status_code != 200:
        time.sleep(0.02)
    asking.join(20)
    assert server.client.post("/continue_generation", json={}).status_code == 200
    assert error_of(answers[0], 499)["code"] == "aborted"
    assert len(post(server, "/v1/embeddings", input="a text")["data"]) == 1


def test_salts_share_no_cache(server: ServerUnderTest) -> None:
    """Found tokens tell what others have embedded: only those of the same salt may be found."""
    text = "a text that only this test embeds, of many pages of tokens"

    def cached(**fields: Any) -> int:
        usage = post(server, "/v1/embeddings", input=text, **fields)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [cached(cache_salt="a"), cached(cache_salt="b"), cached()] == [0, 0, 0]
    assert cached(cache_salt="a") == cached() == len(text) // 16 * 16 - (16 if len(text) % 16 == 0 else 0)
