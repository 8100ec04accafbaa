"""Turns by ``previous_response_id`` on the toy model, nothing doubled, on a server that finds no turns by itself: so it
is the named parent whose KV is handed over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from baton.runtime.text.tokenizer import Tokenizer
from tests.doubles.server_under_test import ServerUnderTest
from tests.doubles.transcripts import TRANSCRIPTS, Message, said_by_ids

pytestmark = pytest.mark.process

TOY_MODEL = Path(__file__).parents[2] / "examples" / "toy_model"
FLAGS = ("--max-total-tokens", "4096", "--dtype", "float32", "--device", "cpu", "--linear-backend", "torch")
QUESTION = "How many lines are in manual.md?"
RESULT: Any = [{"type": "function_call_output", "call_id": "call", "output": "12 manual.md"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = (*FLAGS, "--no-auto-continue")
    with ServerUnderTest(TOY_MODEL, tmp_path_factory.mktemp("server"), *flags, behaviour=None) as running:
        yield running.wait_ready()


@pytest.fixture
def client(server: ServerUnderTest) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client


def ask(client: openai.OpenAI, said: Any, before: Response | None = None, **fields: Any) -> Response:
    asked: dict[str, Any] = {"model": "any", "temperature": 0, "max_output_tokens": 24, **fields}
    if before is not None:
        asked["previous_response_id"] = before.id
    return client.responses.create(input=said, **asked)


def items(messages: list[Message]) -> list[Any]:
    return [
        {"type": "function_call_output", "call_id": "call", "output": message["content"]}
        if message["role"] == "tool"
        else message
        for message in messages
    ]


def details(response: Response) -> dict[str, Any]:
    return (response.model_extra or {})["baton"]


def path(response: Response) -> str:
    """Path of its continuation, for which ``metadata`` and ``baton`` must agree."""
    went_on, metadata = details(response)["continuation"], response.metadata or {}
    names = {"baton_path": "path", "baton_inherited_tokens": "inherited_tokens",
             "baton_recomputed_tokens": "recomputed_tokens"}  # fmt: skip
    assert {key: metadata[key] for key in names} == {key: str(went_on[name]) for key, name in names.items()}
    return went_on["path"]


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_every_turn_after_the_first_is_a_handoff(server: ServerUnderTest, client: openai.OpenAI, name: str) -> None:
    turns: list[Response] = []
    for said in TRANSCRIPTS[name]:
        turns.append(ask(client, items(said), turns[-1] if turns else None))
    first, *others = turns
    assert first.metadata == {} and "continuation" not in details(first)
    assert [path(turn) for turn in others] == ["handoff"] * 4
    for before, turn in zip(turns, others):
        went_on = details(turn)["continuation"]
        assert before.usage is not None and turn.usage is not None
        assert went_on["recomputed_tokens"] <= 1 and went_on["inherited_tokens"] >= before.usage.input_tokens
        cached = turn.usage.input_tokens_details.cached_tokens
        assert cached == went_on["inherited_tokens"] - went_on["recomputed_tokens"], "all else is the new text"
    assert [turn.output_text for turn in turns] == said_by_ids(server, TRANSCRIPTS[name], Tokenizer.load(TOY_MODEL))


def test_streamed_response_is_continued_by_handoff(client: openai.OpenAI) -> None:
    with client.responses.stream(model="any", input=QUESTION, temperature=0, max_output_tokens=24) as stream:
        first = stream.get_final_response()
    fields: Any = {"temperature": 0, "max_output_tokens": 24, "previous_response_id": first.id}
    with client.responses.stream(model="any", input=RESULT, **fields) as stream:
        second = stream.get_final_response()
    assert path(second) == "handoff" and path(ask(client, "Thanks.", second)) == "handoff"


def test_incomplete_response_is_continued_by_handoff(client: openai.OpenAI) -> None:
    first = ask(client, QUESTION, max_output_tokens=3)
    assert first.status == "incomplete" and first.incomplete_details is not None
    assert first.incomplete_details.reason == "max_output_tokens"
    assert path(ask(client, RESULT, first)) == "handoff"


def test_second_branch_matches_the_cached_prefix(client: openai.OpenAI) -> None:
    first = ask(client, QUESTION)
    one, other = ask(client, RESULT, first), ask(client, RESULT, first)
    assert (path(one), path(other)) == ("handoff", "match") and one.output_text == other.output_text


def test_new_instructions_force_the_fallback_path(client: openai.OpenAI) -> None:
    first = ask(client, QUESTION, instructions="Be brief.")
    assert path(ask(client, RESULT, first, instructions="Be kind.")) == "fallback"
    again = ask(client, QUESTION, instructions="Be brief.")
    assert path(ask(client, RESULT, again, instructions="Be brief.")) == "handoff"


def test_unstored_response_is_not_leased_and_retain_ttl_is_respected(client: openai.OpenAI) -> None:
    assert details(ask(client, QUESTION))["retained"]["ttl"] == 60
    assert "retained" not in details(ask(client, QUESTION, store=False))
    assert details(ask(client, QUESTION, extra_body={"retain_ttl": 5}))["retained"]["ttl"] == 5
    unleased = ask(client, QUESTION, extra_body={"retain_ttl": 0})
    assert "retained" not in details(unleased) and path(ask(client, RESULT, unleased)) == "match"


def test_delete_releases_the_lease(server: ServerUnderTest, client: openai.OpenAI) -> None:
    kept, deleted = ask(client, QUESTION), ask(client, QUESTION)
    client.responses.delete(deleted.id)
    released = [server.client.post("/release", json={"rid": each.id}).json() for each in (kept, deleted)]
    assert released == [{"released": True}, {"released": False}]


def test_background_response_is_continued_by_handoff(server: ServerUnderTest, client: openai.OpenAI) -> None:
    first = ask(client, QUESTION, background=True)

    def done() -> bool:
        return client.responses.retrieve(first.id).status == "completed"

    server.wait_until(done, "the end in the background")
    assert path(ask(client, RESULT, first)) == "handoff"


def test_response_can_be_continued_by_completions(server: ServerUnderTest, client: openai.OpenAI) -> None:
    first = ask(client, QUESTION)
    suffix = "<|im_end|>\n<|im_start|>tool\n12 manual.md<|im_end|>\n<|im_start|>assistant\n"
    fields = {"continuation_of": first.id, "continuation_suffix": suffix, "max_tokens": 24, "temperature": 0}
    answer = json.loads(server.client.post("/v1/completions", json=fields).text)
    assert answer["choices"][0]["baton"]["continuation"]["path"] == "handoff"
