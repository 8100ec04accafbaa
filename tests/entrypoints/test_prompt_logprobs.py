"""``prompt_logprobs`` on the toy model, by OpenAI's own client: the same numbers as /generate's, whatever is cached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

TOY_MODEL = Path(__file__).parents[2] / "examples" / "toy_model"
VOCAB = 1800
FLAGS = ("--max-total-tokens", "4096", "--dtype", "float32", "--device", "cpu", "--linear-backend", "torch")
TEXT = "<|im_start|>user\nHow many lines are in manual.md?<|im_end|>\n<|im_start|>assistant\n"
QUESTION: Any = {"role": "user", "content": "How many lines are in manual.md?"}


@pytest.fixture(scope="module", params=[pytest.param("1", marks=pytest.mark.slow), "16"], ids=["page 1", "page 16"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = (*FLAGS, "--page-size", request.param, "--max-logprobs", str(VOCAB), "--chunked-prefill-size", "16")
    with ServerUnderTest(TOY_MODEL, tmp_path_factory.mktemp("server"), *flags, behaviour=None) as running:
        yield running.wait_ready()


@pytest.fixture
def client(server: ServerUnderTest) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def scored(server: ServerUnderTest, ids: list[int], k: int, salt: str = "apart") -> list[list]:
    """The k best of each position of a prompt, by /generate, and the prompt's own: [own, best, ...]."""
    params = {"max_new_tokens": 0}
    meta = server.generate(
        input_ids=ids, sampling_params=params, return_logprob=True, logprob_start_len=0, top_logprobs_num=k,
        cache_salt=salt,
    ).json()["meta_info"]  # fmt: skip
    return [[own, *(top or [])] for own, top in zip(meta["input_token_logprobs"], meta["input_top_logprobs"])]


def assert_scored(rows: list, server: ServerUnderTest, ids: list[int], k: int) -> None:
    """Check each token's true rank and its k best alternatives, in any order among equal values."""
    assert len(rows) == len(ids) and rows[0] is None
    for row, token_id, (own, *tops) in zip(rows[1:], ids[1:], scored(server, ids, VOCAB)[1:], strict=True):
        mine = row[str(token_id)]
        assert next(iter(row)) == str(token_id) and mine["logprob"] == pytest.approx(own[0], abs=1e-3)
        places = [place for place, top in enumerate(tops, 1) if abs(top[0] - own[0]) < 1e-3]
        assert min(places) <= mine["rank"] <= max(places)
        best = sorted((entry["logprob"] for entry in row.values()), reverse=True)[:k]
        assert best == pytest.approx([top[0] for top in tops[:k]], abs=1e-3)
        assert len(row) == k + (mine["rank"] > k)


@pytest.mark.parametrize("k", [0, 3])
def test_completions(server: ServerUnderTest, client: openai.OpenAI, k: int) -> None:
    """Also the second time, with the prompt in the cache, and in a batch of two samples each."""
    prompts = [TEXT, "12 manual.md"]
    extra: Any = {"prompt_logprobs": k, "return_token_ids": True}
    for _ in range(2):
        answer = client.completions.create(model="toy", prompt=prompts, n=2, max_tokens=2, extra_body=extra)
        for choice in answer.model_dump()["choices"]:
            assert choice["logprobs"] is None
            ids, rows = choice["prompt_token_ids"], choice["prompt_logprobs"]
            assert_scored(rows, server, ids, k)
            words = "".join(row[str(token_id)]["decoded_token"] for row, token_id in zip(rows[1:], ids[1:]))
            assert prompts[choice["index"] // 2].endswith(words)


def test_prompt_logprobs_and_echo_logprobs_have_separate_counts(server: ServerUnderTest, client: openai.OpenAI) -> None:
    extra: Any = {"prompt_logprobs": 1, "return_token_ids": True}
    both = client.completions.create(
        model="toy", prompt=TEXT, max_tokens=2, temperature=0, echo=True, logprobs=3, extra_body=extra
    ).model_dump()["choices"][0]
    assert_scored(both["prompt_logprobs"], server, both["prompt_token_ids"], 1)
    alone = client.completions.create(
        model="toy", prompt=TEXT, max_tokens=2, temperature=0, echo=True, logprobs=3
    ).model_dump()["choices"][0]
    assert both["logprobs"]["tokens"] == alone["logprobs"]["tokens"] and both["text"] == alone["text"]
    for mine, theirs in zip(both["logprobs"]["top_logprobs"], alone["logprobs"]["top_logprobs"], strict=True):
        assert (mine is None and theirs is None) or (mine and list(mine) == list(theirs or ()))
    plain = client.completions.create(
        model="toy", prompt=TEXT, max_tokens=2, temperature=0, logprobs=3, extra_body=extra
    ).model_dump()["choices"][0]
    assert len(plain["logprobs"]["tokens"]) == 2, "without an echo these are the output's alone"


def test_prompt_alone_with_zero_max_tokens(server: ServerUnderTest, client: openai.OpenAI) -> None:
    extra: Any = {"prompt_logprobs": 2, "return_token_ids": True}
    (choice,) = client.completions.create(model="toy", prompt=TEXT, max_tokens=0, extra_body=extra).model_dump()[
        "choices"
    ]
    assert choice["text"] == "" and choice["finish_reason"] == "length"
    assert_scored(choice["prompt_logprobs"], server, choice["prompt_token_ids"], 2)


def test_continued_chat_returns_prompt_logprobs(server: ServerUnderTest, client: openai.OpenAI) -> None:
    """The KV of the turn before is there, but who is asked for logprobs computes it again."""
    extra: Any = {"prompt_logprobs": 2, "return_token_ids": True}
    asked: Any = {"model": "toy", "temperature": 0, "max_tokens": 24, "n": 2}
    first = client.chat.completions.create(messages=[QUESTION], **asked)
    messages: Any = [
        QUESTION, {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "tool", "tool_call_id": "1", "content": "12 manual.md"},
    ]  # fmt: skip
    answer = client.chat.completions.create(messages=messages, **asked, extra_body=extra).model_dump()
    assert not any("prompt_logprobs" in choice for choice in answer["choices"])
    assert_scored(answer["prompt_logprobs"], server, answer["prompt_token_ids"], 2)
    again = client.chat.completions.create(messages=messages, **asked)
    assert [c.message.content for c in again.choices] == [c["message"]["content"] for c in answer["choices"]]


def test_continuation_returns_prompt_logprobs(server: ServerUnderTest, client: openai.OpenAI) -> None:
    client.completions.create(
        model="toy", prompt=TEXT, max_tokens=24, temperature=0, extra_body={"rid": "parent", "retain_ttl": 60}
    )
    extra: Any = {"continuation_of": "parent", "continuation_suffix": "\n12", "prompt_logprobs": 2}
    (choice,) = client.completions.create(
        model="toy", prompt="", extra_body=extra | {"return_token_ids": True}
    ).model_dump()["choices"]
    assert choice["baton"]["continuation"]["inherited_tokens"] > 20
    assert_scored(choice["prompt_logprobs"], server, choice["prompt_token_ids"], 2)


def test_beam_results_have_prompt_logprobs(server: ServerUnderTest, client: openai.OpenAI) -> None:
    extra: Any = {"prompt_logprobs": 2, "return_token_ids": True, "use_beam_search": True}
    answer = client.completions.create(model="toy", prompt=TEXT, n=3, max_tokens=3, extra_body=extra).model_dump()
    assert len(answer["choices"]) == 3
    for choice in answer["choices"]:
        assert_scored(choice["prompt_logprobs"], server, choice["prompt_token_ids"], 2)


def test_prompt_logprobs_above_the_limit_are_refused(client: openai.OpenAI) -> None:
    for k in (VOCAB + 1, 10**6):
        with pytest.raises(openai.BadRequestError, match=f"prompt_logprobs is {k}") as error:
            client.completions.create(model="toy", prompt="a", extra_body={"prompt_logprobs": k})
        assert error.value.param == "prompt_logprobs"
