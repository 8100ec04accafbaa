"""A request that is longer than the context is refused in the words that each API's clients look for."""

from __future__ import annotations

import re
from typing import Any

import pytest

from baton.entrypoints.anthropic.messages import MESSAGE_NAMES, parse_messages
from baton.entrypoints.fields.field_names import FieldNames
from baton.entrypoints.http_statuses import status_of
from baton.entrypoints.native.generate import parse_generate
from baton.entrypoints.openai.chat import CHAT_NAMES, parse_chat
from baton.entrypoints.openai.completions import COMPLETION_NAMES, parse_completion
from baton.entrypoints.openai.responses.fields import RESPONSE_NAMES, parse_response
from baton.scheduler.outcome import ContextOverflow, RequestRefused, context_exceeded

PROMPT = ContextOverflow(context=4096, prompt=5019)
UNCOUNTED = ContextOverflow(context=4096, prompt=4097, at_least=True)
FULL = ContextOverflow(context=4096, prompt=4096)
BOTH = ContextOverflow(context=4096, prompt=4000, output=200)

SENT = {"chat": CHAT_NAMES, "completions": COMPLETION_NAMES, "responses": RESPONSE_NAMES, "messages": MESSAGE_NAMES}


def refused(names: FieldNames | None, overflow: ContextOverflow) -> RequestRefused:
    error = context_exceeded(overflow, "max_new_tokens" if overflow.output else "input_ids")
    with pytest.raises(RequestRefused) as caught:
        if names is None:
            raise error
        with names.translated():
            raise error
    assert status_of(caught.value) == 400 and caught.value.code == "context_length_exceeded"
    assert caught.value.overflow == overflow
    return caught.value


@pytest.mark.parametrize("api", ["chat", "completions", "responses"])
def test_overflow_message_matches_openai(api: str) -> None:
    names = SENT[api]
    what = {"chat": "messages", "completions": "prompt", "responses": "input"}[api]
    assert refused(names, BOTH).message == (
        f"This model's maximum context length is 4096 tokens. However, you requested 4200 tokens (4000 in the {what}, "
        f"200 in the completion). Please reduce the length of the {what} or completion."
    )
    assert refused(names, BOTH).param == ("max_output_tokens" if api == "responses" else "max_tokens")
    error = refused(names, PROMPT)
    assert error.param == what and error.message.endswith(
        f"However, your {what} resulted in 5019 tokens. Please reduce the length of the {what}."
    )
    assert "at least 4097 tokens" in refused(names, UNCOUNTED).message


def test_overflow_message_matches_anthropic() -> None:
    assert refused(MESSAGE_NAMES, PROMPT).message == "prompt is too long: 5019 tokens > 4096 maximum"
    assert refused(MESSAGE_NAMES, FULL).message == "prompt is too long: 4096 tokens > 4095 maximum"
    text = refused(MESSAGE_NAMES, BOTH).message
    assert re.match(r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)", text)
    assert refused(MESSAGE_NAMES, BOTH).param == "max_tokens"


def test_overflow_message_matches_sglang() -> None:
    assert (
        "The input (5019 tokens) is longer than the model's context length (4096 tokens"
        in refused(None, PROMPT).message
    )
    assert (
        "Requested token count exceeds the model's maximum context length of 4096 tokens" in refused(None, BOTH).message
    )
    assert "Use max_new_tokens <= 96" in refused(None, BOTH).message


LITELLM = (
    "exceed context limit", "this model's maximum context length is", "prompt is too long",
    "requested token count exceeds the model's maximum context length", "is longer than the model's context length",
)  # fmt: skip
"""What LiteLLM 1.110 looks for in the text of an error, in lower case, and raises ContextWindowExceededError. So do
harnesses that are built on it."""


@pytest.mark.parametrize("overflow", [PROMPT, UNCOUNTED, FULL, BOTH])
@pytest.mark.parametrize("api", [None, *SENT])
def test_litellm_recognises_every_overflow_message(api: str | None, overflow: ContextOverflow) -> None:
    text = refused(SENT[api] if api else None, overflow).message.lower()
    assert any(words in text for words in LITELLM)


MESSAGE = [{"role": "user", "content": "Hi"}]


def test_default_output_limit_is_clamped_to_the_context() -> None:
    def clamps(answer: Any) -> bool:
        batch = getattr(answer, "batch", None)
        prompt = answer.call.prompt if batch is None else batch.prompts[0]
        return prompt.spec.clamps_output

    assert clamps(parse_completion({"prompt": "x"})) and not clamps(parse_completion({"prompt": "x", "max_tokens": 16}))
    defaults = {"max_new_tokens": 512}
    assert clamps(parse_chat({"messages": MESSAGE}, defaults=defaults))
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        assert not clamps(parse_chat({"messages": MESSAGE, name: 5}, defaults=defaults))
    assert clamps(parse_response({"input": "x"}, defaults=defaults))
    assert not clamps(parse_response({"input": "x", "max_output_tokens": 5}, defaults=defaults))
    assert not clamps(parse_messages({"model": "m", "messages": MESSAGE, "max_tokens": 5}))
    each = [{"max_new_tokens": 5}, None, {"temperature": 0}]
    prompts = parse_generate({"text": ["a", "b", "c"], "sampling_params": each}).prompts
    assert [prompt.spec.clamps_output for prompt in prompts] == [False, True, True]
