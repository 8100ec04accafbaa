"""The ids of prompts and outputs beside their text, by vLLM's and SGLang's fields: what is streamed adds up to what is
whole, whatever a parser holds back."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.doubles.byte_tokenizer import EOS_ID
from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
ANSWERS = {
    "Hello": "Good day, 漢字 ü!",
    "Weather?": f"<think>\nI need to look.\n</think>\n\nLet me see.\n{CALL}",
    "Both?": f"{CALL}\n{CALL}",
    "Broken?": CALL[:40],
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
IDS = {"return_token_ids": True}


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = ["--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]
    behaviour = {"says": list(ANSWERS.items())}
    with ServerUnderTest(model, tmp_path_factory.mktemp("server"), *flags, behaviour=behaviour) as running:
        yield running.wait_ready()


@pytest.fixture
def client(server: ServerUnderTest) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def said(text: str, shift: int = 0) -> list[int]:
    """Sample i of the double begins at the i-th byte, and goes round until it meets the end."""
    return [*text.encode()[shift:], EOS_ID]


@pytest.mark.parametrize("words", ANSWERS)
@pytest.mark.parametrize("parallel", [True, False])
def test_chat_and_stream_return_equal_token_ids(client: openai.OpenAI, words: str, parallel: bool) -> None:
    asked: Any = {
        "model": "any", "messages": [{"role": "user", "content": words}], "tools": [WEATHER], "n": 2,
        "parallel_tool_calls": parallel, "extra_body": IDS,
    }  # fmt: skip
    want = {index: said(ANSWERS[words], index) for index in (0, 1)}
    whole = client.chat.completions.create(**asked).model_dump()
    prompt = whole["prompt_token_ids"]
    assert len(prompt) == whole["usage"]["prompt_tokens"] and bytes(i for i in prompt if i != EOS_ID).endswith(
        f"[user]{words}\n[assistant]".encode()
    )
    assert {choice["index"]: choice["token_ids"] for choice in whole["choices"]} == want
    assert not any("prompt_token_ids" in choice for choice in whole["choices"])
    chunks = [chunk.model_dump() for chunk in client.chat.completions.create(**asked, stream=True)]
    told = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
    assert told == [prompt] and "prompt_token_ids" in chunks[0]
    got: defaultdict[int, list[int]] = defaultdict(list)
    for chunk in chunks:
        got[chunk["choices"][0]["index"]] += chunk["choices"][0].get("token_ids", [])
    assert got == want


def test_streamed_token_ids_align_with_logprobs(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": "Weather?"}], tools=[WEATHER], stream=True, logprobs=True,
        extra_body=IDS,
    )  # fmt: skip
    for chunk in stream:
        choice = chunk.choices[0]
        rows = choice.logprobs.content if choice.logprobs is not None else None
        assert len(rows or ()) == len(getattr(choice, "token_ids", ()))


@pytest.mark.parametrize("prompt", [["ab", "né"], [[97, 98], [*"né".encode()]]])
def test_batch_completions_return_token_ids_per_choice(client: openai.OpenAI, prompt: Any) -> None:
    """Each choice has the ids of its own prompt; in a stream they come once."""
    asked: Any = {"model": "any", "prompt": prompt, "n": 2, "max_tokens": 5, "extra_body": IDS}
    prompts = [list(b"ab"), list("né".encode())]
    outputs = [[97, 98, 97, 98, 97], [98, 97, 98, 97, 98]]
    outputs += [(list("né".encode()) * 3)[shift : shift + 5] for shift in (0, 1)]
    whole = client.completions.create(**asked).model_dump()
    assert [choice["token_ids"] for choice in whole["choices"]] == outputs
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [prompts[i] for i in (0, 0, 1, 1)]
    got: defaultdict[int, list[int]] = defaultdict(list)
    told: defaultdict[int, list[list[int]]] = defaultdict(list)
    seen: set[int] = set()
    for chunk in client.completions.create(**asked, stream=True):
        (choice,) = chunk.model_dump()["choices"]
        got[choice["index"]] += choice["token_ids"]
        if "prompt_token_ids" in choice:
            assert choice["index"] not in seen, "not in the first chunk"
            told[choice["index"]].append(choice["prompt_token_ids"])
        seen.add(choice["index"])
    assert [got[i] for i in range(4)] == outputs
    assert [told[i] for i in range(4)] == [[prompts[i]] for i in (0, 0, 1, 1)]


def test_token_ids_are_streamed_before_their_text_is_complete(server: ServerUnderTest) -> None:
    """é has two bytes, which are two tokens here."""
    fields = {"prompt": "é", "max_tokens": 2, "stream": True, **IDS}
    chunks = events(server.client.post("/v1/completions", json=fields))
    assert [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]] == list("é".encode())
    assert chunks[0]["choices"][0]["prompt_token_ids"] == list("é".encode())


def test_token_ids_include_the_trimmed_stop_string(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="any", prompt="abcd", stop="cd", extra_body=IDS).model_dump()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["token_ids"]) == ("ab", list(b"abcd"))


def test_token_ids_are_omitted_by_default(client: openai.OpenAI) -> None:
    bodies: tuple[Any, ...] = ({}, {"extra_body": {"return_token_ids": False}})
    for more in bodies:
        answer = client.completions.create(model="any", prompt="ab", **more)
        chat = client.chat.completions.create(model="any", messages=[{"role": "user", "content": "Hello"}], **more)
        assert "token_ids" not in answer.model_dump_json() + chat.model_dump_json()


def test_prompt_alone_with_zero_max_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="any", prompt="ab", max_tokens=0, extra_body=IDS).model_dump()
    (choice,) = answer["choices"]
    assert choice["token_ids"] == [] and choice["prompt_token_ids"] == list(b"ab")


@pytest.mark.parametrize("value", [1, "true", [True]])
def test_return_token_ids_must_be_boolean(server: ServerUnderTest, value: Any) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    for path, fields in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", chat)):
        answer = server.client.post(path, json=fields | {"return_token_ids": value})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "return_token_ids"
    answer = server.client.post("/generate", json={"text": "a", "return_prompt_token_ids": value})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "return_prompt_token_ids"


# -- /generate ---------------------------------------------------------------------------------------------------------


def events(response: httpx.Response) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_generate_returns_prompt_token_ids(server: ServerUnderTest) -> None:
    fields: dict[str, Any] = {"text": ["ab", "né"], "return_prompt_token_ids": True}
    fields["sampling_params"] = {"max_new_tokens": 3}
    prompts = [list(b"ab"), list("né".encode())]
    assert [answer["prompt_token_ids"] for answer in server.generate(**fields).json()] == prompts
    got = events(server.generate(**fields, stream=True))
    assert got and all(event["prompt_token_ids"] == prompts[event["index"]] for event in got)
    assert "prompt_token_ids" not in server.generate(text="ab").json()


def test_large_answer_has_prompt_token_ids(server: ServerUnderTest) -> None:
    """It is written in pieces, as it is read."""
    ids = [97, 98] * 1500
    fields: dict[str, Any] = {"return_prompt_token_ids": True, "sampling_params": {"max_new_tokens": 2, "n": 9}}
    for answer in server.generate(input_ids=ids, **fields).json():
        assert answer["prompt_token_ids"] == ids
    fields = {"prompt": ids, "n": 9, "max_tokens": 2, "return_token_ids": True}
    for choice in server.client.post("/v1/completions", json=fields).json()["choices"]:
        assert choice["prompt_token_ids"] == ids
