"""vLLM's ``prompt_logprobs``: what is asked for, and the objects that come."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from baton.entrypoints.http_statuses import status_of
from baton.entrypoints.openai.chat import parse_chat
from baton.entrypoints.openai.common import prompt_logprobs
from baton.entrypoints.openai.completions import COMPLETION_NAMES, parse_completion
from baton.runtime.answer import Logprobs, Output, TokenLogprob
from baton.runtime.messages import LogprobChunk
from baton.scheduler.limits import check_logprob_limit
from baton.scheduler.outcome import FoundTokens, RequestRefused
from baton.scheduler.request_spec import LogprobOptions
from baton.scheduler.token_buffer import pack_ids
from tests.doubles.packed_logprobs import packed
from tests.doubles.prompts import make_prompt

CHAT = {"messages": [{"role": "user", "content": "a"}]}


def completion(**fields: Any) -> LogprobOptions | None:
    (prompt,) = parse_completion({"prompt": "ab", **fields}).batch.prompts
    return prompt.spec.logprobs


def chat(**fields: Any) -> LogprobOptions | None:
    return parse_chat(CHAT | fields).call.prompt.spec.logprobs


@pytest.mark.parametrize("parsed", [completion, chat])
def test_prompt_logprobs_set_start_and_top_k(parsed: Any) -> None:
    assert parsed() is None and parsed(prompt_logprobs=None) is None
    assert parsed(prompt_logprobs=0) == LogprobOptions(start_len=0, top_k=0, prompt_top_k=0)
    assert parsed(prompt_logprobs=5) == LogprobOptions(start_len=0, top_k=0, prompt_top_k=5)


def test_prompt_logprobs_combine_with_output_logprobs() -> None:
    assert completion(prompt_logprobs=5, logprobs=2) == LogprobOptions(start_len=0, top_k=2, prompt_top_k=5)
    assert completion(prompt_logprobs=5, logprobs=2, echo=True) == LogprobOptions(0, 2, 5)
    assert completion(prompt_logprobs=1, logprobs=2, echo=True) == LogprobOptions(0, 2, 2), "the echo wants two"
    assert completion(prompt_logprobs=1, logprobs=2) == LogprobOptions(0, 2, 1)
    assert completion(prompt_logprobs=1, echo=True) == LogprobOptions(0, 0, 1)
    assert chat(prompt_logprobs=1, logprobs=True, top_logprobs=2) == LogprobOptions(0, 2, 1)


@pytest.mark.parametrize("value", [-1, -2, True, "5", 1.0, [5], 2**70])
@pytest.mark.parametrize("parsed", [completion, chat])
def test_invalid_values_are_refused(parsed: Any, value: Any) -> None:
    with pytest.raises(RequestRefused, match="prompt_logprobs is") as caught:
        parsed(prompt_logprobs=value)
    assert caught.value.param == "prompt_logprobs" and status_of(caught.value) == 400


@pytest.mark.parametrize("parsed", [completion, chat])
def test_prompt_logprobs_are_refused_for_streams(parsed: Any) -> None:
    for value in (0, 3):
        with pytest.raises(RequestRefused, match="whole answers only") as caught:
            parsed(prompt_logprobs=value, stream=True)
        assert caught.value.param == "prompt_logprobs"
    assert parsed(prompt_logprobs=3, stream=False) is not None


def test_logprob_limit_error_names_the_exceeding_field() -> None:
    for name in ("prompt_logprobs", "logprobs"):
        asked = completion(**{"prompt_logprobs": 1, "logprobs": 1, name: 21})
        with pytest.raises(RequestRefused) as caught, COMPLETION_NAMES.translated():
            check_logprob_limit(asked, 20)
        assert caught.value.message.startswith(f"{name} is 21; this server gives at most 20.")
        assert caught.value.param == name
    check_logprob_limit(completion(prompt_logprobs=20), 20)


def of(logprobs: Logprobs, num_top: int) -> list:
    output = Output(
        make_prompt(rid="r"), 0, 0, "", [], prompt_tokens=0, completion_tokens=0, found=FoundTokens(0),
        input_logprobs=logprobs,
    )  # fmt: skip
    return list(prompt_logprobs(output, num_top))


def test_prompt_logprob_entries_list_token_first_with_rank() -> None:
    """The prompt's own token comes first, with its true rank; among the best it is not named twice."""
    chunk = LogprobChunk(
        ids=pack_ids([5, 6, 7]),
        values=_floats(float("nan"), -3.0, -0.25),
        top_ids=pack_ids([0, 0, 8, 9, 7, 8]),
        top_values=_floats(float("nan"), float("nan"), -0.5, -1.0, -0.25, -4.0),
        ranks=pack_ids([0, 17, 1]),
    )
    both = of(Logprobs([chunk], chr), 2)
    assert both == [
        None,
        {
            "6": {"logprob": -3.0, "rank": 17, "decoded_token": "\x06"},
            "8": {"logprob": -0.5, "rank": 1, "decoded_token": "\x08"},
            "9": {"logprob": -1.0, "rank": 2, "decoded_token": "\t"},
        },
        {
            "7": {"logprob": -0.25, "rank": 1, "decoded_token": "\x07"},
            "8": {"logprob": -4.0, "rank": 2, "decoded_token": "\x08"},
        },
    ]
    assert [list(entries) for entries in both[1:]] == [["6", "8", "9"], ["7", "8"]]
    assert [list(entries) for entries in of(Logprobs([chunk], chr), 0)[1:]] == [["6"], ["7"]]


def test_minus_infinity_is_encoded_as_in_vllm() -> None:
    rows = of(packed([TokenLogprob(None, 5), TokenLogprob(None, 6)]), 0)
    assert rows[0] is None and rows[1]["6"]["logprob"] == -9999.0


def test_empty_prompt_logprobs_give_an_empty_list() -> None:
    assert of(Logprobs(), 3) == []


def _floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)
