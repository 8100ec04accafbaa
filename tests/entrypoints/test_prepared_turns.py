"""A chat template that drops thoughts, on the toy model, nothing doubled: each next turn computes its own new tokens
only, and says what it would have said without preparation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

TOY_MODEL = Path(__file__).parents[2] / "examples" / "toy_model"
TEMPLATE = """{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% if not enable_thinking %}
</think>

{% endif %}{% endif %}"""
"""Without thinking, the prompt ends with an empty thought, which no later prompt has: as Qwen3's does."""
FLAGS = ("--max-total-tokens", "4096", "--dtype", "float32", "--device", "cpu", "--linear-backend", "torch")
QUESTIONS = ["How many lines are in manual.md?", "Which file is the largest?", "And é 漢字 🙂?", "Thanks. Once more."]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "thinking.jinja"
    path.write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module", params=[pytest.param("1", marks=pytest.mark.slow), "16"], ids=["page 1", "page 16"])
def server(
    request: pytest.FixtureRequest, template: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerUnderTest]:
    flags = (*FLAGS, "--chat-template", str(template), "--reasoning-parser", "qwen3", "--page-size", request.param)
    with ServerUnderTest(TOY_MODEL, tmp_path_factory.mktemp("server"), *flags, behaviour=None) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def unprepared(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = (*FLAGS, "--chat-template", str(template), "--reasoning-parser", "qwen3", "--prepare-next-turn", "off")
    with ServerUnderTest(TOY_MODEL, tmp_path_factory.mktemp("unprepared"), *flags, behaviour=None) as running:
        yield running.wait_ready()


@dataclass
class Turn:
    """text: the answer, thoughts included. computed: of the prompt. prepared: tokens."""

    text: str
    computed: int
    prepared: int


def preparations(server: ServerUnderTest) -> dict[str, Any]:
    return server.client.get("/server_info").json()["internal_states"][0]["stats"]["preparations"]


def completed(server: ServerUnderTest) -> int:
    return preparations(server)["completed"]


def play(server: ServerUnderTest, *, waits: bool, think: bool) -> list[Turn]:
    """waits: the client is away until the next turn has been prepared."""
    messages: list[dict[str, Any]] = []
    turns: list[Turn] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        before = completed(server) if waits else 0
        asked = {"messages": messages, "temperature": 0, "max_tokens": 40, "ignore_eos": True}
        asked["chat_template_kwargs"] = {"enable_thinking": think}
        answer = server.client.post("/v1/chat/completions", json=asked).json()
        (choice,), usage = answer["choices"], answer["usage"]
        message, details = choice["message"], usage["prompt_tokens_details"]
        assert choice["baton"].get("prepared_tokens", 0) == details.get("prepared_tokens", 0)
        said = message["content"] or ""
        turns.append(
            Turn(
                (message.get("reasoning_content") or "") + said,
                usage["prompt_tokens"] - details["cached_tokens"],
                details.get("prepared_tokens", 0),
            )
        )
        messages.append({"role": "assistant", "content": said})
        deadline = time.monotonic() + 30
        while waits and completed(server) == before and question is not QUESTIONS[-1]:
            assert time.monotonic() < deadline, preparations(server)
            time.sleep(0.02)
    return turns


def test_next_turn_computes_only_its_new_tokens(server: ServerUnderTest, unprepared: ServerUnderTest) -> None:
    ours, theirs = (play(each, waits=each is server, think=False) for each in (server, unprepared))
    assert [turn.text for turn in ours] == [turn.text for turn in theirs]
    assert theirs[1].prepared == 0 and all(turn.prepared >= 30 for turn in ours[1:])
    for question, our, their in zip(QUESTIONS[1:], ours[1:], theirs[1:]):
        assert our.computed <= len(question.encode()) + 30, "the question, and the marks around it"
        assert their.computed >= our.computed + 30


def test_metrics_count_prepared_tokens(server: ServerUnderTest) -> None:
    play(server, waits=True, think=False)
    deadline = time.monotonic() + 10
    while True:
        text = server.client.get("/metrics").text
        values = {
            line.split("{")[0]: float(line.split()[-1])
            for line in text.splitlines()
            if "prepar" in line and line[0] != "#"
        }
        if values.get("baton:prepared_turns_total", 0) >= 3 and values["baton:prepared_tokens_used_total"] >= 100:
            break
        assert time.monotonic() < deadline, values
        time.sleep(0.1)
    assert values["baton:prepared_tokens_total"] >= values["baton:prepared_tokens_used_total"]
    assert values["baton:preparation_steps_total"] >= 3


def test_flush_meets_no_preparation(server: ServerUnderTest) -> None:
    """A flush between the end of a turn and the next is never refused because of a preparation."""
    for _ in range(5):
        asked = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 40}
        answer = server.client.post("/v1/chat/completions", json=asked)
        assert answer.status_code == 200
        assert server.client.post("/flush_cache").status_code == 200
