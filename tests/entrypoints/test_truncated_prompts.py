"""vLLM's ``truncate_prompt_tokens``: only the last tokens of a prompt are used, and only they are told of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from baton.runtime.text.prompt_tokenizer import MAX_TOKENS_OF_CALL
from tests.doubles.byte_tokenizer import EOS_ID
from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

TOY_MODEL = Path(__file__).parents[2] / "examples" / "toy_model"
FLAGS = ("--max-total-tokens", "4096", "--dtype", "float32", "--device", "cpu", "--linear-backend", "torch")
CONTEXT = 4096


@pytest.fixture
def client(server: ServerUnderTest) -> Iterator[openai.OpenAI]:
    """A client of a server whose tokens are bytes and whose model repeats the prompt."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def completion(client: openai.OpenAI, prompt: Any, most: int, **fields: Any) -> Any:
    extra: Any = {"truncate_prompt_tokens": most, "return_token_ids": True}
    return client.completions.create(model="echo", prompt=prompt, extra_body=extra, **fields)


def test_truncation_keeps_the_last_tokens_of_each_prompt(client: openai.OpenAI) -> None:
    for prompt in (["abcdef", "x", "ghij"], [[*b"abcdef"], [*b"x"], [*b"ghij"]]):
        answer = completion(client, prompt, 4, max_tokens=5, n=2).model_dump()
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts == ["cdefc", "defcd", "xxxxx", "xxxxx", "ghijg", "hijgh"]
        assert [bytes(c["prompt_token_ids"]) for c in answer["choices"][::2]] == [b"cdef", b"x", b"ghij"]
        assert answer["usage"]["prompt_tokens"] == 4 + 1 + 4


def test_echo_shows_the_truncated_prompt(client: openai.OpenAI) -> None:
    for prompt in ("abcdef", [*b"abcdef"]):
        for most, left in ((2, "ef"), (6, "abcdef"), (9, "abcdef")):
            answer = completion(client, prompt, most, max_tokens=2, echo=True, logprobs=1)
            (choice,) = answer.choices
            assert choice.text == left + left[:2] and choice.logprobs is not None
            assert choice.logprobs.tokens == list(choice.text)
            assert choice.logprobs.text_offset == list(range(len(choice.text)))
    (choice,) = completion(client, "né", 1, max_tokens=1, echo=True).choices
    assert choice.text.startswith("\ufffd"), "half a character"


def test_echo_alone_returns_no_token_ids(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="echo", prompt="abc", echo=True, max_tokens=1, extra_body={"truncate_prompt_tokens": 2}
    )
    assert answer.choices[0].text == "bcb" and "token_ids" not in answer.model_dump_json()


def test_stream_delivers_the_answer_in_chunks(client: openai.OpenAI) -> None:
    chunks = [c.model_dump()["choices"][0] for c in completion(client, "abcd", 2, max_tokens=4, echo=True, stream=True)]
    assert "".join(chunk["text"] for chunk in chunks) == "cdcdcd"
    assert bytes(chunks[0]["prompt_token_ids"]) == b"cd"


def test_prompts_beyond_the_context_are_truncated(client: openai.OpenAI) -> None:
    """Whether they come as a text, which is tokenised in pieces, or as ids."""
    words = "".join(f"{number} " for number in range(3_000))
    for prompt in (words, [*words.encode()]):
        answer = completion(client, prompt, 10, max_tokens=1).model_dump()["choices"][0]
        assert bytes(answer["prompt_token_ids"]).decode() == words[-10:]
        for most_new, left in ((1, CONTEXT - 1), (16, CONTEXT - 16), (0, CONTEXT)):
            answer = completion(client, prompt, -1, max_tokens=most_new).model_dump()
            assert answer["usage"]["prompt_tokens"] == left
            assert bytes(answer["choices"][0]["prompt_token_ids"]).decode() == words[-left:]
        with pytest.raises(openai.BadRequestError, match=r"maximum context length is 4096 tokens") as error:
            completion(client, prompt, CONTEXT, max_tokens=1)
        assert error.value.code == "context_length_exceeded"


def test_output_limit_without_room_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="4096 in the completion") as error:
        completion(client, "abc", -1, max_tokens=CONTEXT)
    assert error.value.param == "max_tokens"


def test_oversized_text_is_refused_before_truncation(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=f"more than {MAX_TOKENS_OF_CALL} tokens") as error:
        completion(client, "ab " * (MAX_TOKENS_OF_CALL // 3 + 1), 10)
    assert error.value.param == "prompt"


def test_truncated_chat_loses_its_beginning(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": f"Hello {number}"} for number in range(400)]
    asked: Any = {"model": "echo", "messages": messages, "max_tokens": 30}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**asked)
    end = [*b"[user]Hello 399", EOS_ID, *b"\n[assistant]"]
    for most, left in ((20, 20), (-1, CONTEXT - 30)):
        extra: Any = {"truncate_prompt_tokens": most, "return_token_ids": True}
        answer = client.chat.completions.create(**asked, extra_body=extra).model_dump()
        ids = answer["prompt_token_ids"]
        assert len(ids) == left == answer["usage"]["prompt_tokens"]
        assert ids[-20:] == end[-20:]


@pytest.mark.parametrize("value", [0, -2, True, 1.5, "3", [3]])
def test_invalid_values_are_refused(server: ServerUnderTest, value: Any) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    for path, fields in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", chat)):
        answer = server.client.post(path, json=fields | {"truncate_prompt_tokens": value})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "truncate_prompt_tokens"


def test_truncation_of_continuations_is_refused(server: ServerUnderTest) -> None:
    for more in ({}, {"prompt": "ab"}, {"prompt": ["ab", "c"], "continuation_of": [None, "parent"]}):
        fields = {"continuation_of": "parent", "truncate_prompt_tokens": 3} | more
        answer = server.client.post("/v1/completions", json=fields)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "truncate_prompt_tokens"


# -- chats that go on by themselves ------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[pytest.param("1", marks=pytest.mark.slow), "16"], ids=["page 1", "page 16"])
def toy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = (*FLAGS, "--page-size", request.param)
    with ServerUnderTest(TOY_MODEL, tmp_path_factory.mktemp("toy"), *flags, behaviour=None) as running:
        yield running.wait_ready()


def ask(server: ServerUnderTest, messages: list, **fields: Any) -> dict[str, Any]:
    asked = {"messages": messages, "temperature": 0, "max_tokens": 24, "return_token_ids": True}
    answer = server.client.post("/v1/chat/completions", json=asked | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def assert_said_from_these_ids(server: ServerUnderTest, answer: dict[str, Any]) -> None:
    """What is inherited or cached changes nothing: the same ids, computed anew, say the same."""
    params = {"temperature": 0, "max_new_tokens": 24}
    again = server.generate(input_ids=answer["prompt_token_ids"], sampling_params=params, cache_salt="apart").json()
    assert again["output_ids"] == answer["choices"][0]["token_ids"]


@pytest.mark.parametrize("turns", [(None, 30, None), (20, 30, None), (20, None, 40), (500, 500, -1), (20, 40, 41)])
def test_truncated_turns_are_continued_only_from_true_prefixes(
    toy: ServerUnderTest, turns: tuple[int | None, ...]
) -> None:
    """A turn goes on from one before it where its prompt truly begins with that, and nowhere else."""
    said = [
        [{"role": "user", "content": f"How many lines are in manual.md? {turns}"}],
        [{"role": "tool", "tool_call_id": "1", "content": "12 manual.md"}],
        [{"role": "user", "content": "Thanks. Say it once more."}],
    ]
    messages: list[dict] = []
    before: list[list[int]] = []
    for new, most in zip(said, turns, strict=True):
        messages += new
        answer = ask(toy, messages, truncate_prompt_tokens=most)
        ids, (choice,) = answer["prompt_token_ids"], answer["choices"]
        assert_said_from_these_ids(toy, answer)
        assert len(ids) == answer["usage"]["prompt_tokens"] and (most in (None, -1, 500) or len(ids) == most)
        went_on = choice["baton"].get("continuation") is not None
        assert went_on == any(ids[: len(turn)] == turn for turn in before)
        goes_on = turns[0] == 500 or (turns[0] is None and most is None)  # the rest begins somewhere else
        assert not before or went_on == goes_on
        outputs = choice["token_ids"]
        before.append(ids + (outputs[:-1] if choice["finish_reason"] == "stop" else outputs))
        messages.append({"role": "assistant", "content": choice["message"]["content"]})
