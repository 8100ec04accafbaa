"""LoRA adapters on the trained toy model, by server and engine: loaded, named, refused, unloaded in use."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.entrypoints.engine import Engine
from baton.scheduler.outcome import RequestRefused
from tests.doubles.server_under_test import ServerUnderTest
from tests.doubles.tiny_adapters import EVERY, add_adapter, save_adapter

pytestmark = pytest.mark.process

TOY = Path(__file__).parents[2] / "examples" / "toy_model"
PROMPT = "The capital of France is a town that everyone"
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
FLAGS = ("--max-total-tokens", "4096", "--dtype", "float32", "--device", "cpu")
ADMIN = {"Authorization": "Bearer admin"}
NAMES = ("sql", "poems")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("adapters")
    model: Any = AutoModelForCausalLM.from_pretrained(TOY)
    for seed, name in enumerate(NAMES):
        model = add_adapter(model, name, EVERY, seed, r=4)
    return {name: save_adapter(model, name, folder) for name in NAMES}


@pytest.fixture(scope="module")
def server(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = [*FLAGS, "--lora-paths", f"sql={folders['sql']}", "--admin-api-key", "admin", "--api-key", "key"]
    folder = tmp_path_factory.mktemp("server")
    with ServerUnderTest(TOY, folder, *flags, "--served-model-name", "toy", behaviour=None) as running:
        running.client.headers["Authorization"] = "Bearer key"
        yield running.wait_ready()


@pytest.fixture
def poems(server: ServerUnderTest, folders: dict[str, Path]) -> Iterator[None]:
    """A second adapter, for the time of one test."""
    answer = load(server, "poems", folders["poems"])
    assert answer.json() == {
        "success": True,
        "loaded_adapters": {name: str(folders[name]) for name in NAMES},
    }
    yield
    if "poems" in json.dumps(server.client.get("/lora_adapters").json()):
        assert unload(server, "poems").status_code == 200


def load(server: ServerUnderTest, name: str, folder: Path | str) -> Any:
    return server.client.post("/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder)}, headers=ADMIN)


def unload(server: ServerUnderTest, name: str) -> Any:
    return server.client.post("/unload_lora_adapter", json={"lora_name": name}, headers=ADMIN)


def say(server: ServerUnderTest, **fields: Any) -> Any:
    answer = server.generate(**({"text": PROMPT, "sampling_params": GREEDY} | fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_each_api_names_an_adapter(server: ServerUnderTest, poems: None) -> None:
    """By lora_path, by the adapter's name as the model, and by model:adapter; a batch may name several."""
    plain, sql, verse = say(server, text=[PROMPT] * 3, lora_path=[None, "sql", "poems"])
    assert len({answer["text"] for answer in (plain, sql, verse)}) == 3
    assert say(server, lora_path="sql")["text"] == sql["text"]
    assert say(server, model="toy:sql")["text"] == sql["text"]
    client = openai.OpenAI(base_url=f"{str(server.client.base_url).rstrip('/')}/v1", api_key="key")
    given = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
    for model, expected in (("toy", plain), ("sql", sql), ("toy:poems", verse)):
        completion = client.completions.create(model=model, **given)
        assert (completion.model, completion.choices[0].text) == (model, expected["text"])
    chats = {}
    for model in ("toy", "sql", "poems"):
        chat = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Hello"}], temperature=0, max_tokens=8
        )
        response = client.responses.create(model=model, input="Hello", temperature=0, max_output_tokens=8)
        message = server.client.post(
            "/v1/messages",
            json={
                "model": model,
                "max_tokens": 8,
                "temperature": 0,
                "messages": [{"role": "user", "content": "Hello"}],
            },
        ).json()
        assert chat.model == response.model == message["model"] == model
        chats[model] = chat.choices[0].message.content
        assert response.output_text == chats[model] == message["content"][0]["text"]
    assert len(set(chats.values())) == 3


MISNAMED = [
    ("/generate", {"text": PROMPT}),
    ("/v1/completions", {"prompt": PROMPT}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    ("/v1/responses", {"input": "Hello"}),
    ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Hello"}]}),
    ("/v1/embeddings", {"input": "Hello"}),
]


@pytest.mark.parametrize(("route", "fields"), MISNAMED)
def test_a_mistyped_adapter_is_not_answered_by_the_model(
    server: ServerUnderTest, route: str, fields: dict[str, Any]
) -> None:
    for name in ("sqll", "toy:sqll", "SQL"):
        refused = server.client.post(route, json={"model": name, **fields})
        assert refused.status_code == 404 and name in refused.text, refused.text
    assert server.client.post(route, json={"model": "toy", **fields}).status_code == 200


def test_models_are_listed(server: ServerUnderTest, poems: None, folders: dict[str, Path]) -> None:
    listed = server.client.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["toy", *NAMES]
    assert [model.get("parent") for model in listed] == [None, "toy", "toy"]
    assert server.client.get("/v1/models/poems").json()["root"] == str(folders["poems"])
    adapters = server.client.get("/lora_adapters").json()["adapters"]
    assert [(adapter["name"], adapter["rank"]) for adapter in adapters] == [("sql", 4), ("poems", 4)]
    assert adapters == server.client.get("/server_info").json()["internal_states"][0]["adapters"]


def test_a_continuation_stays_with_its_adapter(server: ServerUnderTest, poems: None) -> None:
    say(server, lora_path="sql", rid="parent", retain_ttl=60)
    child = {"text": None, "continuation_of": "parent", "continuation_suffix": " and then"}
    continued = say(server, lora_path="sql", return_prompt_token_ids=True, **child)
    ids = continued["prompt_token_ids"]
    assert continued["meta_info"]["continuation"]["path"] in ("handoff", "match")
    assert continued["text"] == say(server, text=None, input_ids=ids, lora_path="sql", cache_salt="alone")["text"]
    for other in ("poems", None):
        refused = server.generate(sampling_params=GREEDY, lora_path=other, **child)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "adapter_mismatch"), refused.text
    fallen_back = say(server, lora_path="poems", **child, input_ids=ids)
    assert fallen_back["meta_info"]["continuation"]["path"] == "fallback"
    assert fallen_back["text"] == say(server, text=None, input_ids=ids, lora_path="poems", cache_salt="alone")["text"]


def test_an_adapter_is_unloaded_while_it_answers(server: ServerUnderTest, poems: None) -> None:
    """Open requests keep it; later ones get 404, by whichever name."""
    expected = say(server, lora_path="poems", sampling_params=GREEDY | {"max_new_tokens": 800})
    with ThreadPoolExecutor(1) as pool:
        long = GREEDY | {"max_new_tokens": 800}
        running = pool.submit(say, server, lora_path="poems", sampling_params=long, cache_salt="other")
        server.wait_until(lambda: server.running() == 1, "a running request")
        assert unload(server, "poems").json()["loaded_adapters"].keys() == {"sql"}
        for fields, status in (({"lora_path": "poems"}, 404), ({"model": "toy:poems"}, 404), ({"model": "poems"}, 404)):
            refused = server.generate(text=PROMPT, sampling_params=GREEDY, **fields)
            assert refused.status_code == status, refused.text
        assert unload(server, "poems").status_code == 404
        assert running.result()["text"] == expected["text"]
    assert "poems" not in [model["id"] for model in server.client.get("/v1/models").json()["data"]]


def test_a_load_whose_client_has_left_is_known_all_the_same(server: ServerUnderTest, folders: dict[str, Path]) -> None:
    """Otherwise its name, as a model, would get the answers of the model alone."""
    body = {"lora_name": "poems", "lora_path": str(folders["poems"])}
    with pytest.raises(httpx.TimeoutException):
        server.client.post("/load_lora_adapter", json=body, headers=ADMIN, timeout=0.001)
    server.wait_until(lambda: "poems" in server.client.get("/lora_adapters").text, "the adapter")
    assert say(server, model="poems")["text"] == say(server, lora_path="poems")["text"] != say(server)["text"]
    assert unload(server, "poems").status_code == 200


def test_refused_calls(server: ServerUnderTest, folders: dict[str, Path], tmp_path: Path) -> None:
    """Each with a reason, and the server answers on."""

    def changed(name: str, change: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Path:
        folder = tmp_path / name
        shutil.copytree(folders["sql"], folder)
        config = json.loads((folder / "adapter_config.json").read_text()) | change
        (folder / "adapter_config.json").write_text(json.dumps(config))
        if tensors is not None:
            save_file(tensors, folder / "adapter_model.safetensors")
        return folder

    found = load_file(folders["sql"] / "adapter_model.safetensors")
    first = next(iter(found))
    stem = first.replace("lora_A", "lora_{}")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "adapter_config.json").write_text("{")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "adapter_config.json")
    cases = [
        ("a", tmp_path / "pipe", "no regular file"),
        ("a", changed("slow", {"alpha_pattern": {"([a-z0-9._]+)+!": 1, "(": 1}}), "no pattern"),
        ("a", "/nowhere", "is no folder"),
        ("a", tmp_path, "adapter_config.json cannot be read"),
        ("a", tmp_path / "broken", "is not JSON"),
        ("a", changed("dora", {"use_dora": True}), "DoRA"),
        ("a", changed("saved", {"modules_to_save": ["lm_head"]}), "modules_to_save"),
        ("a", changed("ia3", {"peft_type": "IA3"}), "only LORA"),
        ("a", changed("rank", {"lora_alpha": float("nan")}), "lora_alpha"),
        ("a", changed("nan", {}, found | {first: found[first] * torch.nan}), "not finite"),
        ("a", changed("half", {}, {first: found[first]}), "lacks lora_B"),
        ("a", changed("none", {}, {}), "holds no tensor"),
        ("a", changed("head", {}, {**found, "base_model.model.lm_head.weight": torch.ones(2, 2)}), "lm_head.weight"),
        ("a", changed("deep", {}, {key.replace("layers.0", "layers.99"): v for key, v in found.items()}), "layers.99"),
        ("a", changed("wide", {}, found | {first: torch.ones(4, 7)}), "another base model"),
        ("a", changed("odd", {}, found | {stem.format("B"): torch.ones(len(found[stem.format("B")]), 3)}), "rank"),
        ("a b", folders["sql"], "use letters"),
        ("toy", folders["sql"], "the name of the model"),
        ("sql", folders["poems"], "already"),
    ]
    for name, folder, reason in cases:
        answer = load(server, name, folder)
        assert answer.status_code == 400 and reason in answer.text, (reason, answer.text)
    path = str(folders["sql"])
    assert server.client.post("/load_lora_adapter", json={"lora_name": "b", "lora_path": path}).status_code == 403
    assert server.client.post("/unload_lora_adapter", json={"lora_name": "sql"}).status_code == 403
    for fields, status in (
        ({"lora_path": "nobody"}, 404),
        ({"lora_path": ""}, 400),
        ({"lora_path": 3}, 400),
        ({"lora_path": "x" * 300}, 400),
        ({"lora_path": ["sql", "sql"]}, 400),
        ({"lora_path": "sql\0"}, 404),
        ({"model": "toy:nobody"}, 404),
        ({"model": "sql", "lora_path": "poems"}, 400),
    ):
        answer = server.generate(text=PROMPT, sampling_params=GREEDY, **fields)
        assert answer.status_code == status and answer.json()["error"]["message"], (fields, answer.text)
    assert load(server, "sql", folders["sql"]).status_code == 200  # it is loaded: nothing to do
    assert say(server, lora_path="sql")["text"]


def test_engine(folders: dict[str, Path]) -> None:
    with Engine(model_path=TOY, device="cpu", dtype="float32", max_total_tokens=2048, max_loaded_loras=1) as engine:
        plain = engine.generate(PROMPT, GREEDY)["text"]
        engine.load_lora_adapter("sql", folders["sql"])
        with pytest.raises(RequestRefused, match="the maximum"):
            engine.load_lora_adapter("poems", folders["poems"])
        adapted = engine.generate(PROMPT, GREEDY, lora_path="sql")["text"]
        assert adapted != plain and [adapter["name"] for adapter in engine.list_lora_adapters()] == ["sql"]
        engine.unload_lora_adapter("sql")
        engine.load_lora_adapter("poems", folders["poems"])
        assert engine.generate(PROMPT, GREEDY, lora_path="poems")["text"] not in (plain, adapted)
        with pytest.raises(RequestRefused, match="there is no adapter 'sql'"):
            engine.generate(PROMPT, GREEDY, lora_path="sql")
        assert engine.generate(PROMPT, GREEDY)["text"] == plain
