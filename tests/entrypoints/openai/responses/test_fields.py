"""The fields of a response: what is served, refused by name, and ignored."""

from __future__ import annotations

from typing import Any

import pytest

from baton.entrypoints.chat.tools import Choice
from baton.entrypoints.fields.foreign_fields import FOREIGN_OF
from baton.entrypoints.fields.ignored import Ignored
from baton.entrypoints.http_statuses import status_of
from baton.entrypoints.openai.responses.fields import (
    INCLUDABLE,
    LOGPROBS,
    PROPERTIES,
    ResponseRequest,
    parse_response,
)
from baton.entrypoints.openai.responses.tools import ToolOrigin, custom_input, qualified
from baton.scheduler.outcome import RequestRefused

LS = {"type": "function", "name": "ls", "description": "lists", "parameters": {"type": "object"}, "strict": True}


def parse(**fields: Any) -> ResponseRequest:
    return parse_response({"input": "Hi"} | fields)


def refused(**fields: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        parse(**fields)
    assert status_of(caught.value) == 400
    return caught.value


def test_minimal_request_gets_defaults() -> None:
    asked = parse(rid="r")
    call = asked.call
    assert call.conversation.messages == [{"role": "user", "content": "Hi"}] and asked.messages_before == []
    assert asked.store and not (asked.stream or asked.background or asked.wants_logprobs or call.stream)
    assert asked.previous is None and asked.metadata == {} and call.after is None
    assert call.prompt.sampling.max_new_tokens is None and call.prompt.sampling.temperature == 1.0
    assert (call.rid, call.tools, call.conversation.tools, call.choice) == ("r", [], None, Choice("none"))
    assert asked.echo["tool_choice"] == "auto" and asked.echo["text"] == {"format": {"type": "text"}}
    assert asked.echo["store"] is True and asked.echo["tools"] == [] and asked.echo["max_output_tokens"] is None


def test_null_is_the_default() -> None:
    nulls = dict.fromkeys([*PROPERTIES, *FOREIGN_OF["responses"]])
    asked = parse_response({**nulls, "input": "Hi", "rid": "r"})
    assert asked.call.prompt.sampling == parse(rid="r").call.prompt.sampling and asked.store


def test_openai_and_baton_sampling_names_are_read() -> None:
    asked = parse(
        max_output_tokens=9, temperature=0.5, top_p=0.9, stop=["a", "b"], seed=7, presence_penalty=1, min_tokens=2,
        frequency_penalty=-1, logit_bias={"5": -100}, top_k=3, min_p=0.1, user="me", cache_salt="s", retain_ttl=3,
    )  # fmt: skip
    sampling, spec = asked.call.prompt.sampling, asked.call.prompt.spec
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.n) == (9, 0.5, 0.9, 1)
    assert (sampling.stop, sampling.seed, sampling.top_k, sampling.min_new_tokens) == (("a", "b"), 7, 3, 2)
    assert spec.client and spec.namespace and spec.retain_ttl == 3
    echo = asked.echo
    assert (echo["max_output_tokens"], echo["temperature"], echo["top_p"], echo["user"]) == (9, 0.5, 0.9, "me")
    assert parse_response({"input": "Hi"}, rid="header").call.rid == "header"
    assert parse(rid="resp_r").call.rid == "r", "both forms are the same name"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"truncation": "auto"}, "truncation", "not supported"),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"max_tokens": 5, "max_output_tokens": 6}, "max_tokens", "max_output_tokens"),
        ({"n": 2}, "n", "not supported"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "a JSON Schema"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format", "its type is one of text, json_object, json_schema"),
        ({"text": {"style": 1}}, "text.style", "unknown"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort", "a string"),
        ({"reasoning": "high"}, "reasoning", "an object"),
        ({"include": ["everything"]}, "include", LOGPROBS),
        ({"top_logprobs": 2}, "top_logprobs", LOGPROBS),
        ({"top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs", "0 to 20"),
        ({"stream_options": {"usage": 1}, "stream": True}, "stream_options.usage", "unknown"),
        ({"stream_options": 1}, "stream_options", "an object"),
        ({"background": True, "store": False}, "store", "must be stored"),
        ({"background": True, "stream": True}, "background", "cannot be streamed"),
        ({"previous_response_id": "chatcmpl-1"}, "previous_response_id", "resp_"),
        ({"previous_response_id": "resp_"}, "previous_response_id", "1 to 512"),
        ({"metadata": {"a": 1}}, "metadata", "strings"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "16 keys"),
        ({"metadata": {"a": "b" * 513}}, "metadata", "512"),
        ({"metadata": {"a" * 65: ""}}, "metadata", "64"),
        ({"continuation_of": "r"}, "continuation_of", "previous_response_id"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"instructions": ["a"]}, "instructions", "a string"),
        ({"store": 1}, "store", "true or false"),
        ({"beam_width": 2}, "beam_width", "unknown field"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "its own field"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "web_search"),
        ({"tools": [LS, {"type": "mcp", "server_label": "x"}], "tool_choice": {"type": "mcp"}}, "tools[1]", "mcp"),
        ({"tools": [{"type": "image_generation"}, {"type": "mcp"}], "tool_choice": "required"}, "tools[0]", "image"),
        ({"tools": ["web_search"]}, "tools[0]", "an object"),
        ({"tools": ["namespace"]}, "tools[0]", "an object"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": 3}]}, "tools[0].tools", "a list"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [3]}]}, "tools[0].tools[0]", "an object"),
        ({"tools": [{"type": "custom", "name": "c", "format": {"type": "xml"}}]}, "tools[0].format", "grammar"),
        ({"tools": [LS, {"type": "custom", "name": "ls"}]}, "tools", "twice"),
        ({"tools": [{"type": "function", "function": {"name": "ls"}}]}, "tools[0].function", "unknown field"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0]", "tools[0].name"),
        ({"tools": [LS, LS]}, "tools", "twice"),
        ({"tools": [LS], "tool_choice": {"type": "function", "name": "rm"}}, "tool_choice", "rm"),
        ({"tools": [LS], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "allowed_tools"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ],
)  # fmt: skip
def test_refusals_name_the_field_and_the_remedy(fields: dict, param: str, words: str) -> None:
    error = refused(**fields)
    assert error.param == param and words in error.message, error.message


def test_tools_are_flat() -> None:
    asked = parse(tools=[LS], tool_choice={"type": "function", "name": "ls"}, parallel_tool_calls=False)
    nested = {"type": "function", "function": {k: LS[k] for k in ("name", "description", "parameters", "strict")}}
    assert asked.call.tools == [nested] == asked.call.conversation.tools
    assert asked.call.choice == Choice("named", "ls", parallel=False)
    assert asked.echo["tools"] == [LS] and asked.echo["parallel_tool_calls"] is False
    assert asked.echo["tool_choice"] == {"type": "function", "name": "ls"}
    assert parse(tools=[LS], tool_choice="none").call.conversation.tools is None
    assert parse(tools=[LS], tool_choice="required").call.choice == Choice("named", "ls")


def test_logprobs_are_requested_with_include() -> None:
    spec = parse(include=[LOGPROBS], top_logprobs=4).call.prompt.spec
    assert spec.logprobs is not None and (spec.logprobs.start_len, spec.logprobs.top_k) == (-1, 4)
    asked = parse(include=[name for name in INCLUDABLE if name != LOGPROBS])
    assert not asked.wants_logprobs


def test_reasoning_text_and_metadata_fields_are_read() -> None:
    asked = parse(
        reasoning={"effort": "low", "summary": "auto"}, text={"format": {"type": "text"}, "verbosity": "low"},
        chat_template_kwargs={"enable_thinking": False}, service_tier="auto", prompt_cache_key="k", instructions="Be.",
        metadata={"a": "b"}, previous_response_id="resp_before", truncation="disabled",
    )  # fmt: skip
    assert asked.call.conversation.variables == {"reasoning_effort": "low", "enable_thinking": False}
    assert asked.echo["reasoning"] == {"effort": "low", "summary": None} and asked.echo["prompt_cache_key"] == "k"
    assert asked.previous == "before" and asked.echo["previous_response_id"] == "resp_before"
    assert asked.messages_before == [{"role": "system", "content": "Be."}] and asked.metadata == {"a": "b"}


def test_background_response_is_streamed_internally() -> None:
    asked = parse(background=True)
    assert asked.background and asked.call.stream and not asked.stream


SPAWN = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [
    {"type": "function", "name": "spawn", "description": "starts one", "strict": False, "parameters": {}},
    {"type": "web_search"},
]}  # fmt: skip
PATCH = {"type": "custom", "name": "patch", "description": "Edits files.",
         "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}}  # fmt: skip


def test_custom_and_namespaced_tools_are_offered_as_functions() -> None:
    ignored = Ignored()
    tools = [SPAWN, PATCH, {"type": "web_search", "external_web_access": True}, LS, {"type": "local_shell"}]
    asked = parse_response({"input": "Hi", "tools": tools}, ignored=ignored)
    functions = [tool["function"] for tool in asked.call.tools]
    assert [function["name"] for function in functions] == ["agents__spawn", "patch", "ls"]
    assert 'lark grammar:\nstart: "x"' in functions[1]["description"]
    assert list(functions[1]["parameters"]["properties"]) == ["input"]
    assert sorted(ignored.reasons) == [
        "tools[0].tools[1]", "tools[1].format", "tools[2]", "tools[4]",
    ]  # fmt: skip
    assert ignored.reasons["tools[2]"] == "this server cannot run web_search"
    namespace, custom, function = asked.echo["tools"]
    assert [tool["name"] for tool in namespace["tools"]] == ["spawn"] and custom == PATCH
    assert function == {**LS, "strict": True} and functions[2]["strict"] is True and "strict" not in functions[0]
    assert asked.offered.origin("agents__spawn") == ToolOrigin("function", "spawn", "agents")
    assert asked.offered.origin("made_up") == ToolOrigin("function", "made_up")


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "custom", "name": "patch"}, "patch"),
        ({"type": "function", "namespace": "agents", "name": "spawn"}, "agents__spawn"),
        ({"type": "function", "name": "agents__spawn"}, "agents__spawn"),
    ],
)
def test_tool_choice_may_name_custom_and_namespaced_tools(choice: dict, name: str) -> None:
    assert parse(tools=[SPAWN, PATCH], tool_choice=choice).call.choice == Choice("named", name)


@pytest.mark.parametrize(("namespace", "name"), [(None, "f"), ("n", "n__f"), ("mcp__files__", "mcp__files__f")])
def test_tool_names_are_qualified_by_namespace(namespace: str | None, name: str) -> None:
    assert qualified(namespace, "f") == name


@pytest.mark.parametrize(
    ("arguments", "text"),
    [('{"input": "a\\nb"}', "a\nb"), ('{"input": 5}', '{"input": 5}'), ("*** Begin", "*** Begin"), ("[1]", "[1]"),
     ("", ""), ('{"input": ""}', "")],
)  # fmt: skip
def test_custom_tool_input_is_extracted_from_arguments(arguments: str, text: str) -> None:
    assert custom_input(arguments) == text
