"""A model's own sampling parameters, in each API that takes them: they stand where a request says nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from baton.entrypoints.anthropic.messages import parse_messages
from baton.entrypoints.native.generate import parse_generate
from baton.entrypoints.openai.chat import parse_chat
from baton.entrypoints.openai.completions import parse_completion
from baton.entrypoints.openai.responses.fields import parse_response
from baton.scheduler.sampling_params import SamplingParams

DEFAULTS = {
    "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.05, "max_new_tokens": 50,
}  # fmt: skip

TALK = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> SamplingParams:
    return parse_chat({"messages": TALK, **fields}, defaults=DEFAULTS).call.prompt.sampling


def completion(**fields: Any) -> SamplingParams:
    return parse_completion({"prompt": "a", **fields}, defaults=DEFAULTS).batch.prompts[0].sampling


def response(**fields: Any) -> SamplingParams:
    return parse_response({"input": "a", **fields}, defaults=DEFAULTS).call.prompt.sampling


def message(**fields: Any) -> SamplingParams:
    given = {"model": "m", "messages": TALK, "max_tokens": 9, **fields}
    return parse_messages(given, defaults=DEFAULTS).call.prompt.sampling


APIS = [chat, completion, response, message]


@pytest.mark.parametrize("api", APIS)
def test_model_defaults_fill_missing_sampling_parameters(api: Callable[..., SamplingParams]) -> None:
    sampling = api()
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        assert getattr(sampling, name) == DEFAULTS[name], name


@pytest.mark.parametrize("api", APIS)
def test_request_values_override_model_defaults_and_null_does_not(api: Callable[..., SamplingParams]) -> None:
    sampling = api(temperature=0, top_p=1.0, top_k=None)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 1.0, 20)


def test_default_output_limit_applies_to_chats_and_responses() -> None:
    assert chat().max_new_tokens == response().max_new_tokens == 50
    assert chat(max_tokens=7).max_new_tokens == chat(max_completion_tokens=7).max_new_tokens == 7
    assert response(max_output_tokens=7).max_new_tokens == 7
    assert completion().max_new_tokens == 16, "completions have OpenAI's own limit"
    assert message().max_new_tokens == 9


@pytest.mark.parametrize("fields", [{"beam_width": 4}, {"use_beam_search": True, "n": 4}])
def test_beam_search_ignores_model_sampling_defaults(fields: dict[str, Any]) -> None:
    sampling = completion(**fields)
    assert sampling.beam_width == 4 and sampling.temperature == 1.0 and sampling.repetition_penalty == 1.0


def test_native_api_ignores_model_sampling_defaults() -> None:
    """As in SGLang: there only its flag --preferred-sampling-params changes them."""
    assert parse_generate({"text": "a"}).prompts[0].sampling == SamplingParams()
