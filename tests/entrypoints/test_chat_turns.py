"""Chats on the toy model, nothing doubled: each turn goes on from the KV of the last, and says what it would have said
without."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.runtime.text.tokenizer import Tokenizer
from tests.doubles.server_under_test import ServerUnderTest
from tests.doubles.transcripts import TRANSCRIPTS, play, said_by_ids, tool, user

pytestmark = pytest.mark.process

TOY_MODEL = Path(__file__).parents[2] / "examples" / "toy_model"
FLAGS = ("--max-total-tokens", "4096", "--dtype", "float32", "--device", "cpu", "--linear-backend", "torch")


@pytest.fixture(scope="module", params=[pytest.param("1", marks=pytest.mark.slow), "16"], ids=["page 1", "page 16"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = (*FLAGS, "--page-size", request.param)
    with ServerUnderTest(TOY_MODEL, tmp_path_factory.mktemp("server"), *flags, behaviour=None) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    """It renders and tokenises every chat from its first message."""
    flags = (*FLAGS, "--no-auto-continue")
    with ServerUnderTest(TOY_MODEL, tmp_path_factory.mktemp("forgetful"), *flags, behaviour=None) as running:
        yield running.wait_ready()


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_every_turn_after_the_first_is_a_handoff(
    server: ServerUnderTest, forgetful: ServerUnderTest, name: str
) -> None:
    first, *others = turns = play(server, TRANSCRIPTS[name])
    assert first.path is None and [turn.path for turn in others] == ["handoff"] * 4
    assert all(turn.recomputed <= 1 for turn in others)
    for before, turn in zip(turns, others):
        assert turn.cached >= before.prompt
    assert [turn.text for turn in turns] == said_by_ids(forgetful, TRANSCRIPTS[name], Tokenizer.load(TOY_MODEL))
    assert [turn.path for turn in play(forgetful, TRANSCRIPTS[name])] == [None] * 5


def test_leased_turn_survives_a_flood_of_requests(server: ServerUnderTest) -> None:
    """Others compute more than the pool holds; the lease stays."""
    transcript = TRANSCRIPTS["files"]
    messages = list(transcript[0])
    asked = {"temperature": 0, "max_tokens": 24}
    for said in transcript[1:3]:
        asks = asked | {"messages": messages}
        text = server.client.post("/v1/chat/completions", json=asks).json()["choices"][0]["message"]["content"]
        for number in range(8):
            other = {"input_ids": [5 + number] * 700, "sampling_params": {"max_new_tokens": 1}}
            assert server.client.post("/generate", json=other).status_code == 200
        messages = [*messages, {"role": "assistant", "content": text}, *said]
    answer = server.client.post("/v1/chat/completions", json=asked | {"messages": messages}).json()
    assert answer["choices"][0]["baton"]["continuation"]["path"] == "handoff"


def test_streamed_turn_is_continued_by_handoff(server: ServerUnderTest) -> None:
    messages = [user("How many lines are in notes.txt?")]
    asked = {"messages": messages, "temperature": 0, "max_tokens": 24, "stream": True}
    events = server.client.post("/v1/chat/completions", json=asked).text.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event and "[DONE]" not in event]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    messages += [{"role": "assistant", "content": text}, tool("7 notes.txt")]
    answer = server.client.post("/v1/chat/completions", json=asked | {"stream": False, "messages": messages}).json()
    assert answer["choices"][0]["baton"]["continuation"]["path"] == "handoff"


def test_truncated_answer_is_continued_to_the_same_text(server: ServerUnderTest) -> None:
    messages = [user("How many lines are in paper.txt?")]
    whole = {"messages": messages, "temperature": 0, "max_tokens": 12}
    expected = server.client.post("/v1/chat/completions", json=whole).json()["choices"][0]["message"]["content"]
    text = ""
    for number in range(4):
        so_far = [*messages, {"role": "assistant", "content": text}] if text else messages
        asked = {"messages": so_far, "temperature": 0, "max_tokens": 3, "continue_final_message": bool(text)}
        (choice,) = server.client.post("/v1/chat/completions", json=asked).json()["choices"]
        text += choice["message"]["content"]
        if number:
            assert choice["baton"]["continuation"]["path"] == "handoff"
            assert choice["baton"]["continuation"]["recomputed_tokens"] <= 1
    assert text == expected


def test_concurrent_next_turns_use_one_handoff_and_matches(server: ServerUnderTest) -> None:
    """The first takes the lease, the others find the KV in the tree; all say the same."""
    messages = [user("How many lines are in draft.md?")]
    asked = {"messages": messages, "temperature": 0, "max_tokens": 24}
    text = server.client.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": text}, tool("31 draft.md")]
    found: list[tuple[str, str]] = []

    def ask() -> None:
        (choice,) = server.client.post("/v1/chat/completions", json=asked | {"messages": messages}).json()["choices"]
        found.append((choice["message"]["content"], choice["baton"]["continuation"]["path"]))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({text for text, _ in found}) == 1
    assert sorted(path for _, path in found) == ["handoff", "match", "match", "match"]


def test_each_sample_can_be_continued(server: ServerUnderTest) -> None:
    messages = TRANSCRIPTS["code"][0]
    asked = {"messages": messages, "temperature": 1, "seed": 3, "n": 3, "max_tokens": 24}
    choices = server.client.post("/v1/chat/completions", json=asked).json()["choices"]
    # At this temperature some say special tokens, which are not shown: those cannot be gone on from.
    choices = [choice for choice in choices if "assistant" not in choice["message"]["content"]]
    assert len({choice["message"]["content"] for choice in choices}) > 1
    for choice in reversed(choices):
        following = [*messages, {"role": "assistant", "content": choice["message"]["content"]}, tool("3 report.md")]
        answer = server.client.post("/v1/chat/completions", json={"messages": following, "max_tokens": 4}).json()
        assert answer["choices"][0]["baton"]["continuation"]["path"] in ("handoff", "match")


def test_salted_chats_share_no_cache(server: ServerUnderTest) -> None:
    transcript = TRANSCRIPTS["files"][:2]
    play(server, transcript[:1], cache_salt="mine")
    theirs = play(server, transcript, cache_salt="theirs")
    assert theirs[0].cached == 0 and theirs[1].path == "handoff"
