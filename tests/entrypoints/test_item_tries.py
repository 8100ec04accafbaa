"""Item tries on the trained toy model: uploaded, listed, swapped, deleted, refused; and what they make of outputs."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from baton.entrypoints.engine import Engine
from baton.entrypoints.http_statuses import status_of
from baton.runtime.text.tokenizer import Tokenizer
from baton.scheduler.constraints.item_trie import ItemTrieError
from baton.scheduler.outcome import RequestRefused
from tests.doubles.server_under_test import ServerUnderTest

TOY_MODEL = Path(__file__).parents[2] / "examples" / "toy_model"
FLAGS = ("--max-total-tokens", "8192", "--dtype", "float32", "--device", "cpu", "--max-running-requests", "1")
KEY = "s3cret"
SAMPLING = {"max_new_tokens": 8, "temperature": 1.0}


@pytest.fixture(scope="module")
def catalogue() -> np.ndarray:
    """int32 [320, 3]: the token ids of every item that exists."""
    tokenizer = Tokenizer.load(TOY_MODEL)
    items = json.loads((TOY_MODEL / "catalogue.json").read_text())
    return np.array([tokenizer.encode("".join(item["tokens"]), False) for item in items], dtype=np.int32)


def npy(items: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, items)
    return file.getvalue()


def entry(name: str, num_items: int, num_nodes: int, depth: int = 3) -> dict[str, Any]:
    return {"name": name, "num_items": num_items, "min_depth": depth, "max_depth": depth, "num_bytes": 8 * num_nodes}


@pytest.fixture(scope="module")
def server(catalogue: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    folder = tmp_path_factory.mktemp("server")
    np.save(folder / "items.npy", catalogue)
    flags = [*FLAGS, "--item-trie", f"catalogue={folder / 'items.npy'}", "--api-key", KEY, "--max-body-mb", "1"]
    with ServerUnderTest(TOY_MODEL, folder, *flags, behaviour=None) as running:
        running.client.headers["Authorization"] = f"Bearer {KEY}"
        yield running.wait_ready()


def upload(server: ServerUnderTest, name: str, body: bytes, **headers: str) -> httpx.Response:
    headers = {"Content-Type": "application/octet-stream", **headers}
    return server.client.post("/item_tries", params={"name": name}, content=body, headers=headers)


def listed(server: ServerUnderTest) -> list[dict]:
    return server.client.get("/item_tries").json()["item_tries"]


def refusal(response: httpx.Response, status: int, code: str, param: str | None = None) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    return error["message"]


@pytest.mark.process
def test_item_trie_flag_constrains_samples(server: ServerUnderTest, catalogue: np.ndarray) -> None:
    assert [trie for trie in listed(server) if trie["name"] == "catalogue"] == [
        entry("catalogue", 320, 1 + sum(len(np.unique(catalogue[:, :depth], axis=0)) for depth in (1, 2, 3)))
    ]
    items = set(map(tuple, catalogue.tolist()))
    answers = server.generate(
        text="What comes next?", sampling_params={**SAMPLING, "n": 20, "seed": 1, "item_trie": "catalogue"}
    ).json()
    assert all(tuple(answer["output_ids"]) in items for answer in answers)
    assert len({tuple(answer["output_ids"]) for answer in answers}) > 5, "of many items"
    assert {json.dumps(answer["meta_info"]["finish_reason"]) for answer in answers} == {
        '{"type": "stop", "matched": "item"}'
    }


@pytest.mark.process
def test_item_trie_is_uploaded_listed_and_deleted(server: ServerUnderTest, catalogue: np.ndarray) -> None:
    response = upload(server, "one", npy(catalogue[:1].astype(np.int64)))
    assert response.status_code == 200 and response.json() == entry("one", 1, 4)
    assert entry("one", 1, 4) in listed(server)
    params = {**SAMPLING, "item_trie": "one"}
    for _ in range(2):
        assert server.generate(text="x", sampling_params=params).json()["output_ids"] == catalogue[0].tolist()
        assert upload(server, "one", npy(catalogue[:1])).status_code == 200, "the same again replaces it"
    assert server.client.delete("/item_tries/one").json() == {"deleted": "one"}
    assert [trie["name"] for trie in listed(server)] == ["catalogue"]
    message = refusal(
        server.generate(text="x", sampling_params=params), 404, "item_trie_not_found", "sampling_params.item_trie"
    )
    assert message == "there is no item trie 'one'; loaded: 'catalogue'"
    refusal(server.client.delete("/item_tries/one"), 404, "item_trie_not_found", "name")
    refusal(server.client.delete("/item_tries/a%2Fb"), 404, "not_found")


@pytest.mark.process
def test_item_trie_swap_affects_only_new_requests(server: ServerUnderTest, catalogue: np.ndarray) -> None:
    """One row: two requests wait behind others, and between them the trie is swapped, and deleted at last."""
    answers: dict[str, Any] = {}

    def call(rid: str, **params: Any) -> threading.Thread:
        def post() -> None:
            body = {"text": "x", "rid": rid, "sampling_params": {**SAMPLING, **params}}
            headers = {"Authorization": f"Bearer {KEY}"}
            answers[rid] = httpx.post(f"{server.url}/generate", json=body, headers=headers, timeout=60).json()

        thread = threading.Thread(target=post)
        count = server.metric("num_requests_total")
        thread.start()
        server.wait_until(lambda: server.metric("num_requests_total") > count, "the request is on its way")
        return thread

    upload(server, "shop", npy(catalogue[:1]))
    threads = [call("long", max_new_tokens=1500, ignore_eos=True, n=4), call("before", item_trie="shop")]
    assert upload(server, "shop", npy(catalogue[1:2])).status_code == 200
    threads.append(call("after", item_trie="shop"))
    assert server.client.delete("/item_tries/shop").status_code == 200
    assert server.client.post("/abort_request", json={"rid": "long"}).json() == {"aborted": ["long"]}
    for thread in threads:
        thread.join(30)
    assert answers["long"][-1]["meta_info"]["finish_reason"]["type"] == "abort", "so the others did wait"
    assert answers["before"]["output_ids"] == catalogue[0].tolist()
    assert answers["after"]["output_ids"] == catalogue[1].tolist()


@pytest.mark.process
def test_invalid_item_trie_uploads_are_refused(server: ServerUnderTest, catalogue: np.ndarray) -> None:
    before = listed(server)
    vocab = server.client.get("/model_info").json()["vocab_size"]
    message = refusal(upload(server, "t", npy(np.array([[1, 2], [3, vocab]]))), 400, "invalid_item_trie")
    assert message == f"item trie 't': an item has the token {vocab}; the model has {vocab} tokens, 0 to {vocab - 1}"
    for body, words in (
        (b"not a file", "no .npy file"),
        (b"", "no .npy file"),
        (npy(catalogue)[:-5], "bytes of data"),
        (npy(catalogue.astype(float)), "integers"),
        (npy(np.array([[1, 2], [1, -1]])), "item 1 (1 tokens) is the beginning of item 0"),
    ):
        assert words in refusal(upload(server, "t", body), 400, "invalid_item_trie")
    good = npy(catalogue)
    for name in ("", "a b", "é", "a/b", "x" * 129, "..", "a\n"):
        assert "cannot be named" in refusal(upload(server, name, good), 400, "invalid_request", "name")
    post = server.client.post
    octets = {"Content-Type": "application/octet-stream"}
    assert "name is missing" in refusal(
        post("/item_tries", content=good, headers=octets), 400, "invalid_request", "name"
    )
    for headers in ({}, {"Content-Type": "application/x-www-form-urlencoded"}, {"Content-Type": "text/plain"}):
        response = post("/item_tries?name=t", content=good, headers=headers)
        assert "application/octet-stream" in refusal(response, 415, "unsupported_media_type")
    assert "--max-body-mb" in refusal(upload(server, "t", bytes(2**20 + 1)), 413, "body_too_large")
    refusal(upload(server, "t", good, Authorization="Bearer no"), 401, "invalid_api_key")
    assert listed(server) == before


@pytest.mark.process
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"garbage", "this is no .npy file"),
        pytest.param(
            npy(np.array([[10**6]])), "item trie 'shop': an item has the token 1000000", marks=pytest.mark.slow
        ),
    ],
)
def test_unloadable_item_trie_is_reported_in_one_line(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "items.npy"
    file.write_bytes(content)
    with ServerUnderTest(TOY_MODEL, tmp_path, *FLAGS, "--item-trie", f"shop={file}", behaviour=None) as server:
        assert server.process.wait(60) == 1
        errors = [line for line in server.log.splitlines() if " INFO " not in line]
        assert len(errors) == 1 and errors[0].startswith("baton: the worker ended: "), server.log
        assert words in errors[0] and ("token" in words or str(file) in errors[0])


SETTINGS: dict[str, Any] = {"model_path": TOY_MODEL, "max_total_tokens": 8192, "dtype": "float32", "device": "cpu"}


def test_engine_loads_lists_and_deletes_item_tries(catalogue: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "two.npy", catalogue[:2])
    with Engine(item_trie=f"two={tmp_path / 'two.npy'}", **SETTINGS) as engine:
        assert [trie["name"] for trie in engine.list_item_tries()] == ["two"]
        engine.load_item_trie("one", catalogue[2:3])
        answer = engine.generate("x", {**SAMPLING, "item_trie": "one"})
        assert answer["output_ids"] == catalogue[2].tolist()
        answers = engine.generate("x", {**SAMPLING, "item_trie": "two", "n": 8})
        assert {tuple(answer["output_ids"]) for answer in answers} <= set(map(tuple, catalogue[:2].tolist()))
        with pytest.raises(RequestRefused, match="item 0 begins with -1"):
            engine.load_item_trie("bad", np.array([[-1, 2]]))
        with pytest.raises(RequestRefused, match=r"cannot read .*none.npy"):
            engine.load_item_trie("bad", tmp_path / "none.npy")
        with pytest.raises(RequestRefused, match="an item has the token 99999"):
            engine.load_item_trie("bad", np.array([[99999]]))
        assert engine.delete_item_trie("one") and not engine.delete_item_trie("one")
        with pytest.raises(RequestRefused, match="there is no item trie 'one'; loaded: 'two'") as refused:
            engine.generate("x", {**SAMPLING, "item_trie": "one"})
        assert status_of(refused.value) == 404

        async def asyncio_too() -> None:
            await engine.async_load_item_trie("three", tmp_path / "two.npy")
            assert [trie["name"] for trie in await engine.async_list_item_tries()] == ["two", "three"]
            assert await engine.async_delete_item_trie("three")

        asyncio.run(asyncio_too())


def test_engine_with_unloadable_item_trie_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ItemTrieError, match=r"cannot read .*none.npy"):
        Engine(item_trie=[f"shop={tmp_path / 'none.npy'}"], **SETTINGS)
