"""The fields of a chat: what is served, refused by name, and ignored."""

from __future__ import annotations

from typing import Any

import pytest

from baton.entrypoints.chat.tools import Choice, specs_of
from baton.entrypoints.fields.ignored import Ignored
from baton.entrypoints.http_statuses import status_of
from baton.entrypoints.openai.chat import ChatRequest, parse_chat
from baton.scheduler.outcome import RequestRefused

HI = [{"role": "user", "content": "Hi"}]
LS = {"type": "function", "function": {"name": "ls", "description": "lists", "parameters": {"type": "object"}}}
MANY_TOOLS = [{"function": {"name": f"t{number}"}} for number in range(40_000)]
"""As many as a body of megabytes holds: looking at each pair takes minutes."""


def parse(**fields: Any) -> ChatRequest:
    return parse_chat({"messages": HI} | fields)


def refused(**fields: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as error:
        parse(**fields)
    return error.value


def test_minimal_request_gets_defaults() -> None:
    asked = parse()
    call = asked.call
    assert call.conversation.messages == HI and call.conversation.add_generation_prompt
    assert not (call.stream or call.tools or call.may_call or call.conversation.goes_on or asked.include_usage)
    assert call.separate_reasoning and asked.logprobs is None and call.prompt.spec.logprobs is None
    assert call.prompt.sampling.max_new_tokens is None, "an answer may fill the context"
    assert asked.response_id == f"chatcmpl-{call.rid}"


def test_openai_sampling_names_are_read() -> None:
    asked = parse(
        max_completion_tokens=9, temperature=0.5, top_p=0.9, n=2, stop=["a", "b"], seed=7, presence_penalty=1,
        frequency_penalty=-1, logit_bias={"5": -100}, top_k=3, min_p=0.1, min_tokens=2, user="me", rid="mine",
    )  # fmt: skip
    sampling = asked.call.prompt.sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.n) == (9, 0.5, 0.9, 2)
    assert (sampling.stop, sampling.seed, sampling.top_k, sampling.min_p) == (("a", "b"), 7, 3, 0.1)
    assert sampling.min_new_tokens == 2 and sampling.logit_bias == {5: -100} and asked.call.rid == "mine"
    assert asked.call.prompt.spec.client
    vllm = parse(include_stop_str_in_output=True, allowed_token_ids=[7]).call.prompt.sampling
    assert vllm.no_stop_trim and vllm.allowed_token_ids == (7,)
    assert parse(bad_words=["b"]).call.prompt.sampling.bad_words == ("b",)
    assert parse(stop_regex="a+").call.prompt.sampling.stop_regex == ("a+",)
    assert parse(max_tokens=3).call.prompt.sampling.max_new_tokens == 3
    assert parse(max_tokens=3, max_completion_tokens=3).call.prompt.sampling.max_new_tokens == 3
    assert parse_chat({"messages": HI}, rid="header").call.rid == "header"


def test_logprobs() -> None:
    spec = parse(logprobs=True, top_logprobs=4).call.prompt.spec
    assert spec.logprobs is not None and (spec.logprobs.start_len, spec.logprobs.top_k) == (-1, 4)
    assert parse(logprobs=True).logprobs == 0


def test_null_and_metadata_fields_are_accepted() -> None:
    asked = parse(
        model=None, tools=None, tool_choice=None, response_format={"type": "text"}, functions=[], stop=None,
        metadata={"a": "b"}, store=True, service_tier="auto", stream_options=None, logprobs=False,
    )  # fmt: skip
    assert asked.model is None and not asked.call.may_call


# -- messages ----------------------------------------------------------------------------------------------------------


def test_every_message_role_is_converted() -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind."}]},
        {"role": "developer", "content": "And brief.", "name": "dev"},
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None,
            "function_call": None, "reasoning_content": "Hm.",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "ls", "arguments": '{"a": [1]}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "etc"},
        {"role": "assistant", "content": "Done.", "reasoning": "Ha."},
        {"role": "assistant", "content": None, "refusal": "No."},
    ]  # fmt: skip
    found = parse(messages=messages).call.conversation.messages
    assert found[0] == {"role": "system", "content": "Be\nkind."}
    assert found[1] == {"role": "developer", "content": "And brief.", "name": "dev"}
    call = {"id": "1", "type": "function", "function": {"name": "ls", "arguments": {"a": [1]}}}
    assert found[3] == {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]}
    assert found[4] == {"role": "tool", "content": "etc", "tool_call_id": "1"}
    assert found[5] == {"role": "assistant", "content": "Done.", "reasoning_content": "Ha."}
    assert found[6] == {"role": "assistant", "content": "No."}


TOO_DEEP = '{"a":' * 5000 + "1" + "}" * 5000


@pytest.mark.parametrize(
    ("arguments", "read"),
    [("", {}), (None, {}), ('{"a"', '{"a"'), ({"a": 1}, {"a": 1}), (TOO_DEEP, TOO_DEEP)],
    ids=["empty", "none", "unfinished", "an object", "too deep"],
)
def test_unparsable_call_arguments_are_kept_as_text(arguments: Any, read: Any) -> None:
    call = {"id": "1", "function": {"name": "ls", "arguments": arguments}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call]}]
    (found,) = parse(messages=messages).call.conversation.messages[1]["tool_calls"]
    assert found["function"]["arguments"] == read


def called(**fields: Any) -> dict[str, Any]:
    """A message with a call that has these fields."""
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "ls", "arguments": "{}"}} | fields]}


def test_arguments_with_too_many_values_are_refused_before_parsing() -> None:
    """They came as text, so the body's own limit has not seen them. All of a request count together."""
    each = "[" + ",".join(["[]"] * 100_000) + "]"
    message = called(function={"name": "ls", "arguments": each})
    assert parse(messages=[*HI, message, message]).call.conversation.messages[2]["tool_calls"]
    error = refused(messages=[*HI, message, message, message])
    assert error.param == "messages[3].tool_calls[0].function.arguments" and "more than 500000 values" in error.message


@pytest.mark.parametrize(
    ("messages", "param", "says"),
    [
        (None, "messages", "messages takes a list"),
        ([], "messages", "at least one"),
        ("Hi", "messages", "takes a list"),
        (["Hi"], "messages[0]", "it takes an object"),
        ([{"content": "Hi"}], "messages[0].role", "system or developer or user or assistant or tool"),
        ([{"role": "user"}], "messages[0]", "content is missing"),
        ([{"role": "user", "content": 5}], "messages[0].content", "a string or a list of parts"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]", '"type": "text"'),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]", "takes a string"),
        ([{"role": "user", "content": [{"type": ["text"]}]}], "messages[0].content[0]", '"type": "text"'),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0]", "image_url; this server takes text only",
        ),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0]", "input_audio"),
        ([{"role": "tool", "content": "etc", "tool_call_id": 5}], "messages[0].tool_call_id", "a string"),
        ([{"role": "assistant", "content": [{"type": "thinking", "text": 5}]}], "messages[0].content[0]", "a string"),
        ([{"role": "assistant"}], "messages[0]", "neither content nor tool_calls"),
        ([{"role": "assistant", "tool_calls": "ls"}], "messages[0].tool_calls", "takes a list"),
        ([{"role": "assistant", "content": "x", "tool_calls": {}}], "messages[0].tool_calls", "takes a list"),
        ([{"role": "assistant", "refusal": 5}], "messages[0].refusal", "a string"),
        ([{"role": "assistant", "content": "x", "reasoning_content": 0}], "messages[0].reasoning_content", "a string"),
        ([{"role": "assistant", "content": "x", "reasoning": 0}], "messages[0].reasoning", "is 0; it takes a string"),
        ([called(id=5)], "messages[0].tool_calls[0].id", "is 5; it takes a string"),
        ([called(function={"name": "ls", "arguments": [1]})], "messages[0].tool_calls[0].function.arguments", "[1]"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls[0]", '"arguments"'),
        ([{"role": "assistant", "content": "x", "function_call": {}}], "messages[0].tool_calls[0]", '"arguments"'),
    ],
)  # fmt: skip
def test_invalid_messages_are_refused(messages: Any, param: str, says: str) -> None:
    error = refused(messages=messages)
    assert error.param == param and says in error.message and status_of(error) == 400


ECHOED = {
    "provider_specific_fields": {"a": 1}, "parsed": None, "phase": "final", "thinking_blocks": [{"type": "thinking"}],
    "reasoning_details": [{"type": "reasoning.text", "text": "t"}], "cache_control": {"type": "ephemeral"}, "id": "m1",
    "timestamp": 5, "annotations": [{"type": "url_citation"}], "audio": None, "function_call": None, "refusal": None,
    "images": None, "tool_calls": None, "name": None, "reasoning_content": None, "created": 1.5, "colour": "red",
}  # fmt: skip
"""Keys that clients send back with a message, or add to it."""


@pytest.mark.parametrize("values", ["as sent", "null"])
@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_extra_keys_of_messages_are_ignored(role: str, values: str) -> None:
    echoed = ECHOED if values == "as sent" else dict.fromkeys(ECHOED)
    ignored = Ignored()
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}, "annotations": []}
    asked = parse_chat({"messages": [{"role": role, "content": [part], **echoed}]}, ignored=ignored)
    assert asked.call.conversation.messages == [{"role": role, "content": "Hi"}] and not ignored.reasons


def test_keys_of_other_roles_are_ignored() -> None:
    odd = {"tool_calls": [{"id": 1}], "reasoning_content": "t", "refusal": "no", "tool_call_id": "c"}
    assert parse(messages=[{"role": "user", "content": "Hi", **odd}]).call.conversation.messages == HI


def test_extra_keys_of_tool_calls_are_ignored() -> None:
    call = {"id": "c", "type": "function", "index": 0, "extra_content": {}, "provider_specific_fields": None,
            "function": {"name": "ls", "arguments": "{}", "parsed_arguments": None}}  # fmt: skip
    (message,) = parse(messages=[{"role": "assistant", "tool_calls": [call]}]).call.conversation.messages
    assert message["tool_calls"] == [{"id": "c", "type": "function", "function": {"name": "ls", "arguments": {}}}]


@pytest.mark.parametrize("given", [{}, {"tool_call_id": None}])
def test_tool_results_without_id_are_accepted(given: dict[str, Any]) -> None:
    messages = [*HI, called(), {"role": "tool", "content": "a b", **given}, {"role": "function", "name": "ls"}]
    read = parse(messages=messages).call.conversation.messages
    assert read[2:] == [{"role": "tool", "content": "a b"}, {"role": "tool", "content": "", "name": "ls"}]


def test_legacy_function_call_is_converted() -> None:
    old = {"role": "assistant", "content": None, "function_call": {"name": "ls", "arguments": '{"a": 1}'}}
    (message,) = parse(messages=[old]).call.conversation.messages
    assert message["tool_calls"][0]["function"] == {"name": "ls", "arguments": {"a": 1}}


def test_reasoning_parts_of_a_message_are_separated() -> None:
    parts = [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "reasoning", "text": "So."},
        {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "Ho"},
    ]  # fmt: skip
    (message,) = parse(messages=[{"role": "assistant", "content": parts}]).call.conversation.messages
    assert message == {"role": "assistant", "content": "Ho", "reasoning_content": "Hm.\nSo."}
    assert refused(messages=[{"role": "user", "content": parts}]).param == "messages[0].content[0]"


def test_images_field_is_reported_as_ignored() -> None:
    ignored = Ignored()
    parse_chat({"messages": [{"role": "user", "content": "Hi", "images": ["data:"]}]}, ignored=ignored)
    assert ignored.reasons == {"messages[0].images": "the model reads text only"}


def test_prefix_message_is_continued() -> None:
    messages = [*HI, {"role": "assistant", "content": "Ho", "prefix": True}]
    assert parse(messages=messages).call.conversation.goes_on
    assert not parse(messages=messages, continue_final_message=False).call.conversation.goes_on


def test_continue_final_message_continues_the_last_message() -> None:
    messages = [*HI, {"role": "assistant", "content": "Ho"}]
    conversation = parse(messages=messages, continue_final_message=True).call.conversation
    assert conversation.goes_on and not conversation.add_generation_prompt
    assert refused(continue_final_message=True).param == "continue_final_message"
    error = refused(messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert error.param == "continue_final_message"
    assert not parse(messages=messages, add_generation_prompt=False).call.conversation.goes_on


def test_chat_template_variables_and_documents_are_read() -> None:
    asked = parse(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low", documents=[{"text": "x"}])
    assert asked.call.conversation.variables == {"reasoning_effort": "low", "enable_thinking": False}
    assert asked.call.conversation.documents == [{"text": "x"}]
    assert "its own field" in refused(chat_template_kwargs={"messages": []}).message
    assert refused(chat_template_kwargs="fast").param == "chat_template_kwargs"
    assert refused(documents="x").param == refused(documents=["x"]).param == "documents"


# -- tools -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, Choice("auto")),
        ("auto", Choice("auto")),
        ("none", Choice("none")),
        ("required", Choice("named", "ls")),
        ({"type": "function", "function": {"name": "ls"}}, Choice("named", "ls")),
    ],
)
def test_tools_and_tool_choice_are_read(choice: Any, expected: Choice) -> None:
    call = parse(tools=[LS], tool_choice=choice).call
    assert call.tools == [LS] and call.choice == expected
    assert call.may_call == (expected.kind != "none")
    assert call.conversation.tools == ([LS] if call.may_call else None), "no tools are shown where none may be called"


def test_non_function_tools_are_ignored_beside_functions() -> None:
    ignored = Ignored()
    call = parse_chat({"messages": HI, "tools": [{"type": "web_search"}, LS]}, ignored=ignored).call
    assert call.tools == [LS] and ignored.reasons == {"tools[0]": "this server cannot run web_search"}


def test_strict_function_is_known_to_be_strict() -> None:
    for strict in (True, False, None):
        ignored = Ignored()
        tool = {"type": "function", "function": {"name": "ls", "strict": strict}}
        (spec,) = specs_of(parse_chat({"messages": HI, "tools": [tool]}, ignored=ignored).call.tools)
        assert spec.strict is (strict is True) and not ignored.reasons


def test_required_choice_among_several_tools_is_any() -> None:
    pwd = {"type": "function", "function": {"name": "pwd"}}
    assert parse(tools=[LS, pwd], tool_choice="required").call.choice == Choice("any")


def test_parallel_tool_calls_can_be_disabled() -> None:
    assert not parse(tools=[LS], parallel_tool_calls=False).call.choice.parallel


def described(description: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "a", "description": description}}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": "ls"}, "tools", "it takes a list"),
        ({"tools": ["ls"]}, "tools[0]", '"parameters"'),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "web_search"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0]", "letters, digits"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools[0]", "JSON schema"),
        ({"tools": [described(5)]}, "tools[0].function.description", "is 5; it takes a string"),
        ({"tools": [LS, LS]}, "tools", "'ls' twice"),
        ({"tools": [*MANY_TOOLS, LS, LS]}, "tools", "'ls' twice"),
        ({"tools": [LS], "tool_choice": "maybe"}, "tool_choice", "none, auto or required"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [LS], "tool_choice": {"type": "function", "function": {"name": "rm"}}}, "tool_choice", "not hold"),
        ({"tools": [LS], "tool_choice": {"name": "ls"}}, "tool_choice", "takes none, auto"),
        ({"tools": [LS], "parallel_tool_calls": "no"}, "parallel_tool_calls", "true or false"),
    ],
)
def test_invalid_tools_and_choices_are_refused(fields: dict[str, Any], param: str, says: str) -> None:
    error = refused(**fields)
    assert error.param == param and says in error.message


# -- everything else ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "differ"),
        ({"max_tokens": 0.5}, "max_tokens", "max_tokens"),
        ({"temperature": "hot"}, "temperature", "temperature"),
        ({"temperature": 2.01}, "temperature", "use 0 to 2"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
            "it takes a JSON Schema",
        ),
        (
            {"response_format": "xml"},
            "response_format",
            "its type is one of text, json_object, json_schema, structural_tag",
        ),
        ({"regex": "a", "choice": ["b"]}, "choice", "regex and choice both say"),
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
        ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
        ({"top_logprobs": 3}, "top_logprobs", "without logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
        ({"logprobs": 3}, "logprobs", "true or false"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
        ({"beam_width": 4}, "beam_width", "unknown field"),
        ({"continuation_of": "x"}, "continuation_of", "automatically"),
        ({"mesages": []}, "mesages", "did you mean messages?"),
        ({"prompt": "x"}, "prompt", "prompt is not supported; use messages, or /v1/completions"),
        ({"n": 0}, "n", "n"),
    ],
)
def test_invalid_requests_are_refused(fields: dict[str, Any], param: str, says: str) -> None:
    error = refused(**fields)
    assert error.param == param and says in error.message and status_of(error) == 400
