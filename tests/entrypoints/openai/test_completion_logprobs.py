"""OpenAI's logprobs object: tokens, alternatives and where each token's text begins."""

from __future__ import annotations

import pytest

from baton.entrypoints.openai.completion_response import LogprobsBuilder
from baton.runtime.answer import Output, TokenLogprob
from baton.runtime.text.token_bytes import TokenBytes
from baton.runtime.text.tokenizer import Tokenizer
from baton.scheduler.outcome import FoundTokens
from tests.doubles.byte_tokenizer import write_byte_tokenizer
from tests.doubles.packed_logprobs import packed
from tests.doubles.prompts import make_prompt

EOS = 256


@pytest.fixture(scope="module")
def token_bytes(tmp_path_factory: pytest.TempPathFactory) -> TokenBytes:
    return Tokenizer.load(write_byte_tokenizer(tmp_path_factory.mktemp("model"))).token_bytes


def rows(*entries: tuple[float | None, int, str], top: list[TokenLogprob] | None = None) -> list[TokenLogprob]:
    return [TokenLogprob(*entry, top) for entry in entries]


def news(output: list[TokenLogprob], prompt: list[TokenLogprob] | None = None) -> Output:
    return Output(
        make_prompt(rid="r"), 0, 0, "", [], prompt_tokens=0, completion_tokens=0, found=FoundTokens(0),
        input_logprobs=packed(prompt or []), output_logprobs=packed(output),
    )  # fmt: skip


def test_output_logprobs_have_tokens_and_offsets(token_bytes: TokenBytes) -> None:
    builder = LogprobsBuilder(token_bytes, "", num_top=20, skip_special_tokens=True)
    assert builder.add_output(news(rows((-0.5, 97, "a"), (None, 98, "b")))) == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, None],
        "top_logprobs": [{"a": -0.5}, None],
        "text_offset": [0, 1],
    }
    got = builder.add_output(news(rows((-1.0, 99, "c"))))
    assert got is not None and got["text_offset"] == [2], "a stream goes on where it was"
    assert builder.add_output(news([])) is None


def test_top_logprobs_include_the_chosen_token_and_merge_equal_texts(token_bytes: TokenBytes) -> None:
    builder = LogprobsBuilder(token_bytes, "", num_top=20, skip_special_tokens=True)
    top = rows((-0.125, 200, "\ufffd"), (-0.25, 201, "\ufffd"))
    got = builder.add_output(news(rows((-3.0, 97, "a"), top=top)))
    assert got is not None and got["top_logprobs"] == [{"\ufffd": -0.125, "a": -3.0}]
    assert list(got["top_logprobs"][0]) == ["\ufffd", "a"], "best first"


def test_text_offsets_count_characters(token_bytes: TokenBytes) -> None:
    ids = [*"né".encode(), EOS, 33]
    output = rows(*((-1.0, i, "?") for i in ids))
    hidden = LogprobsBuilder(token_bytes, "", num_top=20, skip_special_tokens=True).add_output(news(output))
    shown = LogprobsBuilder(token_bytes, "", num_top=20, skip_special_tokens=False).add_output(news(output))
    assert hidden is not None and hidden["text_offset"] == [0, 1, 1, 2, 2]
    assert shown is not None and shown["text_offset"] == [0, 1, 1, 2, 2 + len("<eos>")]


def test_echoed_prompt_with_invisible_bos(token_bytes: TokenBytes) -> None:
    builder = LogprobsBuilder(token_bytes, "ab", num_top=20, skip_special_tokens=True)
    prompt = rows((None, EOS, "<eos>"), (-1.0, 97, "a"), (-2.0, 98, "b"))
    got = builder.add_output(news(rows((-3.0, 99, "c")), prompt))
    assert got is not None
    assert got["text_offset"] == [0, 0, 1, 2]
    assert got["token_logprobs"] == [None, -1.0, -2.0, -3.0]
    assert got["top_logprobs"] == [None, {"a": -1.0}, {"b": -2.0}, {"c": -3.0}]
