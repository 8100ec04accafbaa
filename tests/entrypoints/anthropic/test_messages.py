"""The fields of Anthropic's messages: what is served, refused by name, and ignored."""

from __future__ import annotations

from typing import Any

import pytest

from baton.entrypoints.anthropic.messages import MessagesRequest, check_thinking, parse_messages
from baton.entrypoints.chat.prefix_rules import normalized, read_rules
from baton.entrypoints.chat.tools import Choice
from baton.entrypoints.fields.ignored import Ignored
from baton.entrypoints.http_statuses import status_of
from baton.scheduler.outcome import RequestRefused

HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
LS = {"name": "ls", "description": "lists", "input_schema": SCHEMA}


def parse(*messages: dict, **fields: Any) -> MessagesRequest:
    return parse_messages({"model": "m", "max_tokens": 9, "messages": list(messages) or HI} | fields)


def refused(*messages: dict, **fields: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as error:
        parse(*messages, **fields)
    assert status_of(error.value) == 400
    return error.value


def user(*blocks: dict) -> dict:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: dict) -> dict:
    return {"role": "assistant", "content": list(blocks)}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def result(call: str, content: Any, **fields: Any) -> dict:
    return {"type": "tool_result", "tool_use_id": call, "content": content, **fields}


def use(call: str, **fields: Any) -> dict:
    return {"type": "tool_use", "id": call, "name": "ls", "input": fields}


# -- fields ------------------------------------------------------------------------------------------------------------


def test_minimal_request_gets_defaults() -> None:
    asked = parse()
    call = asked.call
    assert call.conversation.messages == HI and call.conversation.tools is None and call.conversation.variables == {}
    assert not (call.stream or call.tools or call.may_call or call.conversation.goes_on)
    assert call.prompt.sampling.max_new_tokens == 9 and call.prompt.sampling.stop == ()
    assert (asked.thinking, asked.unenforced, asked.message_id) == (None, (), f"msg_{call.rid}")
    assert call.separate_reasoning and not call.prompt.spec.client


def test_sampling_and_baton_fields_are_read() -> None:
    asked = parse(
        temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["a", "b"], min_p=0.1, seed=7, min_tokens=2, rid="msg_mine",
        metadata={"user_id": "me"}, cache_salt="s", retain_ttl=5, priority=4, stream=True,
    )  # fmt: skip
    sampling, spec = asked.call.prompt.sampling, asked.call.prompt.spec
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop) == (0.5, 0.9, 3, ("a", "b"))
    assert (sampling.min_p, sampling.seed, sampling.min_new_tokens) == (0.1, 7, 2)
    assert asked.call.rid == "mine" and asked.message_id == "msg_mine" and asked.call.stream
    assert spec.namespace and (spec.retain_ttl, spec.priority) == (5, 4)
    assert spec.client == parse(user="me").call.prompt.spec.client != parse(user="you").call.prompt.spec.client
    assert parse_messages({"model": "m", "max_tokens": 9, "messages": HI}, rid="header").call.rid == "header"


@pytest.mark.parametrize("counts_only", [False, True])
@pytest.mark.parametrize("most", [0, -1, 2**63, 1.0, "9"])
def test_max_tokens_is_validated_even_when_only_counting(most: Any, counts_only: bool) -> None:
    with pytest.raises(RequestRefused) as error:
        parse_messages({"model": "m", "max_tokens": most, "messages": HI}, counts_only=counts_only)
    assert error.value.param == "max_tokens"


def test_nulls_and_metadata_fields_have_no_effect() -> None:
    asked = parse(
        cache_control={"type": "ephemeral"}, service_tier="auto", system=None, tools=None, tool_choice=None,
        stop_sequences=None, thinking=None, metadata={"user_id": None}, container=None, speed="standard",
        context_management={"edits": []}, output_config=None,
    )  # fmt: skip
    assert asked.call.conversation.messages == HI and not asked.call.prompt.spec.client


@pytest.mark.parametrize("name", ["model", "max_tokens", "messages"])
def test_missing_required_fields_are_named(name: str) -> None:
    for fields in ({name: None}, {}):
        body = {"model": "m", "max_tokens": 9, "messages": HI}
        del body[name]
        with pytest.raises(RequestRefused, match=f"{name} is missing") as error:
            parse_messages(body | fields)
        assert error.value.param == name


def test_counting_tokens_needs_no_max_tokens() -> None:
    body = {"model": "m", "messages": HI, "system": "S"}
    assert len(parse_messages(body, counts_only=True).call.conversation.messages) == 2


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"colour": "red"}, "unknown field colour", "colour"),
        ({"stop": ["x"], "stop_sequences": ["y"]}, "stop and stop_sequences mean the same", "stop"),
        ({"max_tokens": 0}, r"max_tokens is 0; use 1 or more", "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens is ", "max_tokens"),
        ({"min_tokens": 10}, r"min_tokens is 10; it exceeds max_tokens \(9\)", "min_tokens"),
        ({"temperature": 1.1}, "temperature is 1.1; use 0 to 1", "temperature"),
        ({"temperature": -0.1}, "temperature is -0.1; use 0 to 1", "temperature"),
        ({"top_p": 2}, "top_p is 2.0", "top_p"),
        ({"stop_sequences": "x"}, "a list of strings", "stop_sequences"),
        ({"stop_sequences": ["x", 1]}, "a list of strings", "stop_sequences"),
        ({"stop_sequences": ["x", ""]}, "an empty stop string", "stop_sequences"),
        ({"metadata": {"user": "me"}}, "unknown field metadata.user", "metadata.user"),
        ({"metadata": "me"}, "takes an object", "metadata"),
        ({"metadata": {"user_id": 7}}, "metadata.user_id is 7", "metadata.user_id"),
        ({"metadata": {"user_id": "a"}, "user": "b"}, "differ", "metadata.user_id"),
        ({"model": 1}, "model is 1", "model"),
        ({"container": "c"}, "container is not supported", "container"),
        ({"n": 2}, "n is not supported", "n"),
        ({"continuation_of": "x"}, "continuation_of is not supported", "continuation_of"),
        ({"keep_parent": True}, "keep_parent is not supported", "keep_parent"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "takes a JSON Schema", "output_config.format.schema"),
        ({"output_config": {"format": {"type": "xml"}}}, "its type is one of text", "output_config.format"),
        ({"output_config": {"effort": "huge"}}, "low or medium or high", "output_config.effort"),
        ({"output_config": "low"}, "takes an object", "output_config"),
        ({"system": 5}, "a string or a list of blocks", "system"),
        ({"system": [{"type": "image", "source": {}}]}, r"system\[0\] is of type \"image\"", "system[0]"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], message: str, param: str) -> None:
    with pytest.raises(RequestRefused, match=message) as error:
        parse(**fields)
    assert (status_of(error.value), error.value.param) == (400, param)


# -- thinking ----------------------------------------------------------------------------------------------------------


def test_thinking_sets_a_template_variable() -> None:
    enabled = parse(thinking={"type": "enabled", "budget_tokens": 2048, "display": "summarized"})
    assert (enabled.thinking, enabled.unenforced) == ("enabled", ("thinking.budget_tokens",))
    for asked, thinks in ((enabled, True), (parse(thinking={"type": "adaptive"}), True),
                          (parse(thinking={"type": "disabled"}), False)):  # fmt: skip
        assert asked.call.conversation.variables == {"enable_thinking": thinks}
    assert parse(thinking={"type": "adaptive"}).unenforced == ()
    assert parse(output_config={"effort": "low"}).call.conversation.variables == {"reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("thinking", "param"),
    [
        ("enabled", "thinking"),
        ({"type": "between_tools"}, "thinking.type"),
        ({"type": "adaptive", "budget_tokens": 5}, "thinking.budget_tokens"),
        ({"type": "enabled", "budget_tokens": 0}, "thinking.budget_tokens"),
        ({"type": "enabled", "budget_tokens": "5"}, "thinking.budget_tokens"),
    ],
)
def test_invalid_thinking_settings_are_refused(thinking: Any, param: str) -> None:
    assert refused(thinking=thinking).param == param


@pytest.mark.parametrize(
    ("kind", "template", "thoughts_are_known", "is_told"),
    [
        (None, "", False, True),
        (None, "", True, True),
        ("enabled", "", False, False),
        ("enabled", "", True, True),
        ("enabled", "{% if enable_thinking %}", False, True),
        ("adaptive", "", False, True),
        ("adaptive", "", True, True),
        ("disabled", "", False, True),
        ("disabled", "", True, False),
        ("disabled", "{% if enable_thinking %}", True, True),
    ],
)
def test_thinking_without_template_support_is_reported(
    kind: str | None, template: str, thoughts_are_known: bool, is_told: bool
) -> None:
    ignored = Ignored()
    check_thinking(parse(thinking=kind and {"type": kind}), template, ignored, thoughts_are_known=thoughts_are_known)
    assert list(ignored.reasons) == ([] if is_told else ["thinking"])


# -- messages ----------------------------------------------------------------------------------------------------------


def test_every_content_block_type_is_converted() -> None:
    marked = {"cache_control": {"type": "ephemeral"}}
    asked = parse(
        user(text("List"), text("it.") | marked),
        assistant(
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "redacted_thinking", "data": "xyz"},
            text("Look:") | {"citations": None},
            use("1", path="/") | marked | {"caller": {"type": "direct"}},
            use("2"),
        ),
        user(result("1", "etc"), result("2", [text("a"), text("b")]), text("And?")),
        system=[text("Be"), text("kind.") | marked],
    )
    call = {"type": "function", "function": {"name": "ls", "arguments": {"path": "/"}}}
    assert asked.call.conversation.messages == [
        {"role": "system", "content": "Be\nkind."},
        {"role": "user", "content": "List\nit."},
        {
            "role": "assistant", "content": "Look:", "reasoning_content": "Hm.",
            "tool_calls": [{"id": "1", **call}, {"id": "2", **call, "function": {"name": "ls", "arguments": {}}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "etc"},
        {"role": "tool", "tool_call_id": "2", "content": "a\nb"},
        {"role": "user", "content": "And?"},
    ]  # fmt: skip
    assert not asked.call.conversation.goes_on


def test_tool_results_precede_text_and_mark_errors() -> None:
    asked = parse(
        *HI,
        assistant(use("1"), use("2")),
        user(text("Both?"), result("1", "gone", is_error=True), {"type": "tool_result", "tool_use_id": "2"}),
    )
    assert asked.call.conversation.messages[2:] == [
        {"role": "tool", "tool_call_id": "1", "content": "Error: gone"},
        {"role": "tool", "tool_call_id": "2", "content": ""},
        {"role": "user", "content": "Both?"},
    ]
    only_results = parse(*HI, assistant(use("1")), user(result("1", "x", is_error=False)))
    assert only_results.call.conversation.messages[2:] == [{"role": "tool", "tool_call_id": "1", "content": "x"}]


def test_consecutive_messages_of_one_role_are_merged() -> None:
    said = {"role": "assistant", "content": "So"}
    asked = parse(*HI, user(text("you")), said, assistant(text("what"), use("1")), user(result("1", "x")), *HI)
    assert [(message["role"], message["content"]) for message in asked.call.conversation.messages] == [
        ("user", "Hi\nyou"), ("assistant", "So\nwhat"), ("tool", "x"), ("user", "Hi"),
    ]  # fmt: skip
    assert asked.call.conversation.messages[1]["tool_calls"][0]["id"] == "1"


def test_assistant_prefill_is_continued() -> None:
    call = parse(*HI, {"role": "assistant", "content": "The best is ("}).call
    assert call.conversation.goes_on and call.conversation.messages[-1]["content"] == "The best is ("
    error = refused(*HI, assistant(text("Look:"), use("1")))
    assert "add a user message with its tool_result" in error.message and error.param == "messages"


def test_later_system_messages_are_kept_and_empty_ones_dropped() -> None:
    asked = parse(*HI, {"role": "system", "content": "Be brief."}, system="")
    assert asked.call.conversation.messages == [*HI, {"role": "system", "content": "Be brief."}]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("Hi", "messages[0]"),
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        (user({"type": "image", "source": {}}), "messages[0].content[0]"),
        (user({"type": "document", "source": {}}), "messages[0].content[0]"),
        (user(use("1")), "messages[0].content[0]"),
        (user({"type": "thinking", "thinking": "x", "signature": ""}), "messages[0].content[0]"),
        (user("x"), "messages[0].content[0]"),  # type: ignore[arg-type]
        (user({"type": "text"}), "messages[0].content[0].text"),
        (user(result("1", [{"type": "image", "source": {}}])), "messages[0].content[0].content[0]"),
        (user(result("1", 5)), "messages[0].content[0].content"),
        (user(result("1", "x", is_error="yes")), "messages[0].content[0].is_error"),
        (user({"type": "tool_result", "content": "x"}), "messages[0].content[0].tool_use_id"),
        (assistant(result("1", "x")), "messages[0].content[0]"),
        (assistant({"type": "server_tool_use", "id": "1"}), "messages[0].content[0]"),
        (assistant(use("1") | {"input": "x"}), "messages[0].content[0].input"),
        (assistant(use("1") | {"id": None}), "messages[0].content[0].id"),
        (assistant(use("1") | {"name": 5}), "messages[0].content[0].name"),
        (assistant({"type": "thinking", "signature": ""}), "messages[0].content[0].thinking"),
        ({"role": "system", "content": [use("1")]}, "messages[0].content[0]"),
    ],
)
def test_malformed_messages_are_refused(message: Any, param: str) -> None:
    assert refused(message, *HI).param == param


@pytest.mark.parametrize("messages", ["Hi", [], {}])
def test_messages_must_be_a_nonempty_list(messages: Any) -> None:
    assert refused(messages=messages).param == "messages"


# -- tools -------------------------------------------------------------------------------------------------------------


def test_tools_are_converted_to_function_schemas() -> None:
    marked = {"type": "custom", "cache_control": {"type": "ephemeral"}, "strict": False, "eager_input_streaming": True}
    asked = parse(tools=[LS | marked, {"name": "pwd", "input_schema": {}}])
    assert (
        asked.call.tools
        == asked.call.conversation.tools
        == [
            {"type": "function", "function": {"name": "ls", "description": "lists", "parameters": SCHEMA}},
            {"type": "function", "function": {"name": "pwd", "parameters": {}}},
        ]
    )
    assert asked.call.choice == Choice("auto") and asked.call.may_call


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        ({"type": "auto"}, Choice("auto")),
        ({"type": "auto", "disable_parallel_tool_use": True}, Choice("auto", parallel=False)),
        ({"type": "any", "disable_parallel_tool_use": False}, Choice("named", "ls")),
        ({"type": "tool", "name": "ls", "disable_parallel_tool_use": True}, Choice("named", "ls", parallel=False)),
        ({"type": "none"}, Choice("none")),
    ],
)
def test_tool_choice_is_read(given: dict, choice: Choice) -> None:
    asked = parse(tools=[LS], tool_choice=given)
    assert asked.call.choice == choice
    assert (asked.call.conversation.tools is None) is (choice.kind == "none"), "the model is told of them or not"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": LS}, "tools"),
        ({"tools": ["ls"]}, "tools[0]"),
        ({"tools": [LS, LS]}, "tools"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        ({"tools": [LS | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [LS | {"name": "x" * 129}]}, "tools[0].name"),
        ({"tools": [{"name": "ls"}]}, "tools[0].input_schema"),
        ({"tools": [LS | {"description": 5}]}, "tools[0].description"),
        ({"tools": [LS, {"type": "web_search_20250305", "name": "web_search"}],
          "tool_choice": {"type": "tool", "name": "web_search"}}, "tools[1]"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "any"}}, "tools[0]"),
        ({"tools": [LS, {"type": 5, "name": "x"}]}, "tools[1].type"),
        ({"tools": [LS], "tool_choice": "auto"}, "tool_choice"),
        ({"tools": [LS], "tool_choice": {"type": "function"}}, "tool_choice.type"),
        ({"tools": [LS], "tool_choice": {"type": "tool", "name": "pwd"}}, "tool_choice"),
        ({"tools": [LS], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [LS], "tool_choice": {"type": "auto", "name": "ls"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [LS], "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
         "tool_choice.disable_parallel_tool_use"),
    ],
)  # fmt: skip
def test_invalid_tools_are_refused(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def ignored_of(**fields: Any) -> tuple[MessagesRequest, dict[str, str]]:
    ignored = Ignored()
    return parse_messages({"model": "m", "max_tokens": 9, "messages": HI} | fields, ignored=ignored), ignored.reasons


def test_server_side_tools_are_ignored_with_reason() -> None:
    kinds = ("web_search_20250305", "bash_20250124", "text_editor_20250728", "computer_20250124", "mcp_toolset")
    tools = [{"type": kind, "name": kind.rpartition("_")[0], "max_uses": 3} for kind in kinds]
    asked, ignored = ignored_of(tools=[*tools, LS])
    assert [tool["function"]["name"] for tool in asked.call.tools] == ["ls"]
    assert ignored == {f"tools[{number}]": f"this server cannot run {kind}" for number, kind in enumerate(kinds)}
    asked, _ = ignored_of(tools=tools, tool_choice={"type": "none"})
    assert asked.call.tools == [], "nothing is asked of them"


def test_unenforced_tool_fields_are_reported() -> None:
    told = {"defer_loading": True, "allowed_callers": ["code_execution_20250825"],
            "input_examples": [{"path": "/"}]}  # fmt: skip
    asked, ignored = ignored_of(tools=[LS | told | {"cache_control": {"type": "ephemeral"}}])
    assert asked.call.tools == parse(tools=[LS]).call.tools and sorted(ignored) == sorted(f"tools[0].{x}" for x in told)
    off = {"strict": False, "defer_loading": None, "allowed_callers": ["direct"], "input_examples": []}
    assert ignored_of(tools=[LS | off])[1] == {}
    assert parse(tools=[LS | {"strict": True}]).call.tools[0]["function"]["strict"] is True


def test_unenforced_thinking_and_budget_fields_are_reported() -> None:
    fields = {"thinking": {"type": "adaptive", "display": "omitted"}, "output_config": {"task_budget": {"total": 9}}}
    assert sorted(ignored_of(**fields)[1]) == ["output_config.task_budget", "thinking.display"]


def test_tool_reference_is_rendered_as_its_name() -> None:
    found = [{"type": "tool_reference", "tool_name": "ls"}, text("and more")]
    asked = parse(user(text("Hi")), assistant(use("a")), user(result("a", found)))
    assert asked.call.conversation.messages[-1]["content"] == "ls\nand more"


def test_image_in_tool_result_is_refused_by_name() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    error = refused(user(text("Hi")), assistant(use("a")), user(result("a", [image])))
    assert (error.code, error.param) == ("unsupported_content", "messages[2].content[0].content[0]")


LABEL = "x-anthropic-billing-header: cc_version=2.1.197.%s; cc_entrypoint=cli; cch=%s;"


@pytest.mark.parametrize(
    ("system", "read"),
    [
        ([text(LABEL % ("f03", "a")), text("Be brief."), text("")], "Be brief.\n"),
        ([text(LABEL % ("2a7", "b") + "\nBe brief."), text("Really.")], "Be brief.\nReally."),
        (LABEL % ("1", "2") + "\nx-anthropic-other: y\nBe brief.", "Be brief."),
        ("Send x-anthropic-version: 1.\nx-anthropic-beta: 2", "Send x-anthropic-version: 1.\nx-anthropic-beta: 2"),
        ([text("Be brief."), text("x-anthropic: no label")], "Be brief.\nx-anthropic: no label"),
        (LABEL % (1, 2), ""),
    ],
)
def test_only_a_rule_drops_provider_labels_from_the_system_prompt(system: Any, read: str) -> None:
    whole = system if isinstance(system, str) else "\n".join(block["text"] for block in system)
    sent = parse(system=system).call.conversation
    assert sent.messages == [{"role": "system", "content": whole}, *HI]
    dropped = normalized(sent, read_rules("claude-code-billing"), {}).conversation.messages
    assert dropped == [*([{"role": "system", "content": read}] if read else []), *HI]


def test_extra_keys_of_messages_and_blocks_are_ignored() -> None:
    more = {"id": "m", "timestamp": 1, "cache_control": None, "provider_specific_fields": {"a": 1}, "index": 0}
    call = {"type": "tool_use", "id": "c", "name": "ls", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "a"}]}
    blocks = [[{"type": "text", "text": "Hi"}], [{"type": "thinking", "thinking": "t"}, call], [result]]
    roles = ["user", "assistant", "user"]
    body = {"model": "m", "max_tokens": 9}
    plain = [{"role": role, "content": content} for role, content in zip(roles, blocks, strict=True)]
    echoed = [
        {"role": role, "type": "message", "usage": {}, **more, "content": [more | block for block in content]}
        for role, content in zip(roles, blocks, strict=True)
    ]
    expected = parse_messages({**body, "messages": plain}).call.conversation
    assert parse_messages({**body, "messages": echoed}).call.conversation == expected
