"""The items of an input, and the messages that they are."""

from __future__ import annotations

from typing import Any

import pytest

from baton.entrypoints.fields.ignored import Ignored
from baton.entrypoints.openai.responses.items import read_input
from baton.scheduler.outcome import RequestRefused

CALL = {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": '{"path": "/"}'}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
CALLED = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": {"path": "/"}}}


def messages(*items: Any) -> list[dict]:
    return read_input(list(items), "r")[0]


def says(role: str, content: Any, **more: Any) -> dict:
    return {"role": role, "content": content, **more}


def test_string_input_is_a_user_message() -> None:
    read, listed = read_input("Hi", "r")
    assert read == [says("user", "Hi")]
    (item,) = listed
    assert item["content"] == [{"type": "input_text", "text": "Hi"}] and item["id"] == "msg_r_in0"


def test_content_is_a_string_or_parts() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    said = [{"type": "output_text", "text": "c", "annotations": []}]
    read = messages(says("system", "s"), says("developer", "d"), says("user", parts), says("assistant", said))
    assert read == [says("system", "s"), says("developer", "d"), says("user", "a\nb"), says("assistant", "c")]


def test_arguments_with_too_many_values_are_refused() -> None:
    each = CALL | {"arguments": "[" + ",".join(["[]"] * 100_000) + "]"}
    assert messages(each, each)
    with pytest.raises(RequestRefused, match="more than 500000 values") as error:
        messages(each, CALL, each, each)
    assert error.value.param == "input[3].arguments"


def test_items_of_one_answer_are_merged_into_one_message() -> None:
    other = CALL | {"call_id": "c2"}
    output = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "a.txt"}]}
    read = messages(says("user", "Hi"), THOUGHT, says("assistant", "Let me see."), CALL, other, output, THOUGHT)
    assert read == [
        says("user", "Hi"),
        says("assistant", "Let me see.", reasoning_content="Hm.", tool_calls=[CALLED, CALLED | {"id": "c2"}]),
        says("tool", "a.txt", tool_call_id="c1"),
        says("assistant", "", reasoning_content="Hm."),
    ]


def test_consecutive_answers_stay_separate() -> None:
    assert messages(says("assistant", "a"), says("assistant", "b")) == [says("assistant", "a"), says("assistant", "b")]
    read = messages(says("assistant", "a"), THOUGHT, says("assistant", "b"))
    assert read == [says("assistant", "a"), says("assistant", "b", reasoning_content="Hm.")]
    read = messages(CALL, THOUGHT, says("assistant", "b"))
    assert read == [says("assistant", "", tool_calls=[CALLED]), says("assistant", "b", reasoning_content="Hm.")]


def test_answer_ends_at_the_next_tool_output() -> None:
    output = {"type": "function_call_output", "call_id": "c1", "output": "a.txt"}
    answer, result = says("assistant", "", tool_calls=[CALLED]), says("tool", "a.txt", tool_call_id="c1")
    assert messages(CALL, output, CALL) == [answer, result, answer]


def test_encrypted_reasoning_is_dropped() -> None:
    hidden = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "…", "content": None}
    assert messages(hidden, says("assistant", "a")) == [says("assistant", "a")]
    summary = hidden | {"summary": [{"type": "summary_text", "text": "In short."}]}
    assert messages(summary) == [says("assistant", "", reasoning_content="In short.")]


def test_input_items_are_listed_as_parsed() -> None:
    output = {"type": "function_call_output", "call_id": "c1", "output": "a.txt", "status": "completed"}
    _, listed = read_input([says("user", "Hi"), THOUGHT, CALL | {"id": "fc_mine"}, output], "r")
    assert [(item["id"], item["type"]) for item in listed] == [
        ("msg_r_in0", "message"), ("rs_1", "reasoning"), ("fc_mine", "function_call"),
        ("fco_r_in3", "function_call_output"),
    ]  # fmt: skip
    assert listed[2]["arguments"] == CALL["arguments"] and listed[3]["output"] == "a.txt"


@pytest.mark.parametrize(
    ("item", "param", "words"),
    [
        ({"type": "item_reference", "id": "msg_1"}, "input[1]", "item_reference"),
        ({"id": "msg_1"}, "input[1]", "item_reference"),
        ({"type": "compaction", "encrypted_content": "x"}, "input[1]", "compaction"),
        ({"type": "custom_tool_call", "call_id": "1", "name": "c"}, "input[1].input", "a string"),
        (
            {"type": "function_call", "call_id": "1", "name": "c", "arguments": "{}", "namespace": 5},
            "input[1].namespace",
            "a string",
        ),
        ({"type": ["message"]}, "input[1]", "not supported"),
        ({}, "input[1]", "not supported"),
        ("Hi", "input[1]", "object"),
        (says("tool", "x"), "input[1].role", "assistant"),
        (says("user", None), "input[1].content", "a string or a list"),
        (says("user", [{"type": "input_image", "image_url": "data:"}]), "input[1].content[0]", "input_image"),
        (says("user", [{"type": "input_file", "file_id": "f"}]), "input[1].content[0]", "input_file"),
        (says("user", [{"type": "input_audio"}]), "input[1].content[0]", "input_audio"),
        (CALL | {"arguments": {}}, "input[1].arguments", "a string"),
        (CALL | {"call_id": None}, "input[1].call_id", "a string"),
        ({"type": "function_call_output", "output": "x"}, "input[1].call_id", "a string"),
        (THOUGHT | {"content": [{"type": "reasoning_text"}]}, "input[1].content", "reasoning_text"),
        (THOUGHT | {"content": "Hm."}, "input[1].content", "reasoning_text"),
    ],
)
def test_refusals_name_the_input_item(item: Any, param: str, words: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        messages(says("user", "Hi"), item)
    assert caught.value.param == param and words in caught.value.message, caught.value.message


@pytest.mark.parametrize("given", [None, [], {}, 3])
def test_missing_input_is_refused(given: Any) -> None:
    with pytest.raises(RequestRefused, match="input takes a string"):
        read_input(given, "r")


def test_custom_and_namespaced_calls_are_read() -> None:
    ignored = Ignored()
    messages, listed = read_input(
        [
            says("user", "Hi"),
            {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
            {"type": "function_call", "call_id": "1", "namespace": "agents", "name": "spawn", "arguments": "{}"},
            {"type": "custom_tool_call", "id": "ctc_x", "call_id": "2", "name": "patch", "input": "*** x"},
            {"type": "function_call_output", "call_id": "1", "output": "one"},
            {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "two"}]},
        ],
        "r",
        ignored,
    )
    calls = [call["function"] for call in messages[1]["tool_calls"]]
    assert calls == [{"name": "agents__spawn", "arguments": {}}, {"name": "patch", "arguments": {"input": "*** x"}}]
    assert [message["content"] for message in messages[2:]] == ["one", "two"]
    assert [item["type"] for item in listed[1:]] == [
        "function_call", "custom_tool_call", "function_call_output", "custom_tool_call_output",
    ]  # fmt: skip
    assert listed[1]["namespace"] == "agents" and listed[2]["id"] == "ctc_x"
    assert list(ignored.reasons) == ["input[1]"]


def test_input_of_only_ignored_items_is_refused() -> None:
    with pytest.raises(RequestRefused, match="no item that the model can read"):
        read_input([{"type": "web_search_call", "id": "ws_1"}], "r")


def test_extra_keys_of_items_are_ignored() -> None:
    more = {
        "id": "i",
        "status": "completed",
        "phase": "x",
        "timestamp": 1,
        "provider_specific_fields": None,
        "caller": {},
    }
    part = {"type": "input_text", "text": "Hi", "annotations": [], "logprobs": [], "cache_control": None}
    items = [
        {"type": "message", "role": "user", "content": [part]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"},
        {"type": "function_call", "call_id": "c", "name": "ls", "arguments": "{}", "async": True},
        {"type": "function_call_output", "call_id": "c", "output": "a"},
    ]
    plain, _ = read_input(items, "r")
    assert read_input([item | more for item in items], "r")[0] == plain
