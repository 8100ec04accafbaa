"""Requests in the shape of those that Claude Code, Codex and opencode send, with words of our own: what `make
test-harnesses` finds with the programs, for every run of the tests."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

CALL = '<tool_call>\n{"name": "%s", "arguments": {"command": "ls"}}\n</tool_call>'
SAYS = [
    ["List it", CALL % "Bash"],
    ["Spawn one", CALL % "agents__spawn_agent"],
    ["Patch it", '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin"}}\n</tool_call>'],
    ["a_file", "There is a file."],
]
NO_EFFECT = "x-baton-warning"


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = ["--served-model-name", "served", "--serve-any-model-name", "--tool-call-parser", "hermes"]
    behaviour = {"says": SAYS, "step_s": 0.002, "context_length": 200_000}
    folder = tmp_path_factory.mktemp("server")
    with ServerUnderTest(model, folder, *flags, "--reasoning-parser", "none", behaviour=behaviour) as running:
        yield running.wait_ready()


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


# -- Claude Code -------------------------------------------------------------------------------------------------------

EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
CLAUDE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "x-api-key": "dummy",
    "x-app": "cli",
    "x-claude-code-session-id": "s",
}
CLAUDE: dict[str, Any] = {
    "model": "a-model-of-its-own",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder>\nToday\n</system-reminder>"},
                                     {"type": "text", "text": "List it", **EPHEMERAL}]},
        {"role": "system", "content": "There are agents."},
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.f03; cc_entrypoint=cli;"},
        {"type": "text", "text": "You are an agent.", **EPHEMERAL},
    ],
    "tools": [
        {"name": "Bash", "description": "Runs", "input_schema": {"type": "object"}, "strict": True},
        {"name": "Later", "description": "Does", "input_schema": {"type": "object"}, "defer_loading": True},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"s"}'},
    "max_tokens": 32000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}  # fmt: skip


def claude(server: ServerUnderTest, *more: dict[str, Any], path: str = "", **fields: Any) -> httpx.Response:
    body = copy.deepcopy(CLAUDE) | fields
    body["messages"] += more
    return server.client.post(f"/v1/messages{path}?beta=true", json=body, headers=CLAUDE_HEADERS)


def result(size: int = 0, number: int = 1) -> list[dict[str, Any]]:
    call = {"type": "tool_use", "id": f"t{number}", "name": "Bash", "input": {"command": "ls"}}
    output = {"type": "tool_result", "tool_use_id": f"t{number}", "content": "a_file".ljust(size, "x"),
              "is_error": False, **EPHEMERAL}  # fmt: skip
    return [{"role": "assistant", "content": [call]}, {"role": "user", "content": [output]}]


def test_claude_code_request_round_trip(server: ServerUnderTest) -> None:
    answer = claude(server)
    told = answer.headers[NO_EFFECT]
    assert all(name in told for name in ("tools[1].defer_loading", "tools[2]: this server cannot"))
    assert not any(name in told for name in ("strict", "context_management", "thinking"))
    found = events(answer)
    (block,) = [event["content_block"] for event in found if event["type"] == "content_block_start"]
    assert (block["type"], block["name"]) == ("tool_use", "Bash")
    delta = found[-2]
    assert delta["delta"]["stop_reason"] == "tool_use" and delta["context_management"] == {"applied_edits": []}
    last = events(claude(server, *result()))
    assert "".join(event["delta"].get("text", "") for event in last if event["type"] == "content_block_delta") == (
        "There is a file."
    )


def test_old_tool_results_are_cleared_from_the_prompt(server: ServerUnderTest) -> None:
    edit = {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 4200},
            "keep": {"type": "tool_uses", "value": 1}}  # fmt: skip
    history = [message for number in range(4) for message in result(1000, number)]
    edits: dict[str, Any] = {"context_management": {"edits": [edit]}}
    applied = events(claude(server, *history, **edits))[-2]["context_management"]["applied_edits"]
    assert [(each["type"], each["cleared_tool_uses"]) for each in applied] == [(edit["type"], 3)]
    cleared = applied[0]["cleared_input_tokens"]
    assert 2800 < cleared < 3000
    counted = claude(server, *history, path="/count_tokens", **edits).json()
    whole = claude(server, *history, path="/count_tokens", context_management=None).json()
    assert counted["input_tokens"] + cleared == whole["input_tokens"]
    assert counted["context_management"] == {"original_input_tokens": whole["input_tokens"]}
    assert "context_management" not in whole
    usage = events(claude(server, *history, **edits))[-2]["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted["input_tokens"]


@pytest.mark.parametrize("kind", ["enabled", "adaptive", "disabled"])
def test_thinking_is_accepted_without_reasoning_parser(server: ServerUnderTest, kind: str) -> None:
    thinking = {"type": kind} | ({"budget_tokens": 1024} if kind == "enabled" else {})
    answer = claude(server, thinking=thinking)
    assert events(answer)[-1]["type"] == "message_stop"


def test_image_in_tool_result_is_refused_by_name(server: ServerUnderTest) -> None:
    call, output = result()
    output["content"][0]["content"] = [{"type": "image", "source": {"type": "base64", "data": ""}}]
    error = claude(server, call, output)
    assert error.status_code == 400 and "image" in error.json()["error"]["message"]


def test_request_with_only_unrunnable_tools_is_refused(server: ServerUnderTest) -> None:
    error = claude(server, tools=CLAUDE["tools"][2:])
    assert error.status_code == 400 and "web_search_20250305" in error.json()["error"]["message"]


# -- Codex -------------------------------------------------------------------------------------------------------------


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name, "description": "Does", "strict": False, "parameters": {"type": "object"}}


def said(role: str, *texts: str) -> dict[str, Any]:
    parts = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "id": f"msg_{role}", "role": role, "content": parts}


CODEX: dict[str, Any] = {
    "model": "a-model-of-its-own",
    "stream": True,
    "tools": [
        function("Bash"),
        {"type": "namespace", "name": "agents", "description": "Agents", "tools": [function("spawn_agent")]},
        {"type": "custom", "name": "apply_patch", "description": "Edits",
         "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}},
        {"type": "web_search", "external_web_access": True},
        {"type": "image_generation", "output_format": "png"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "text": {"verbosity": "low"},
    "client_metadata": {"session_id": "s", "x-codex-turn-metadata": '{"turn":1}'},
}  # fmt: skip
CODEX_HEADERS = {"authorization": "Bearer dummy", "originator": "codex_exec", "session-id": "s"}


def codex(server: ServerUnderTest, words: str, *items: dict[str, Any]) -> httpx.Response:
    given = [said("developer", "You are an agent."), said("developer", "Skills", "Permissions"), said("user", "<env>"),
             said("user", words), *items]  # fmt: skip
    return server.client.post("/v1/responses", json=CODEX | {"input": given}, headers=CODEX_HEADERS)


@pytest.mark.parametrize(
    ("words", "called"),
    [
        ("List it", {"type": "function_call", "name": "Bash", "arguments": '{"command": "ls"}'}),
        ("Spawn one", {"type": "function_call", "namespace": "agents", "name": "spawn_agent",
                       "arguments": '{"command": "ls"}'}),
        ("Patch it", {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin"}),
    ],
)  # fmt: skip
def test_codex_request_round_trip(server: ServerUnderTest, words: str, called: dict[str, Any]) -> None:
    answer = codex(server, words)
    told = answer.headers[NO_EFFECT]
    assert all(name in told for name in ("tools[2].format", "tools[3]", "tools[4]")) and "client_metadata" not in told
    done = events(answer)[-1]
    assert done["type"] == "response.completed"
    (item,) = done["response"]["output"]
    assert {name: item.get(name) for name in called} == called
    assert [tool["type"] for tool in done["response"]["tools"]] == ["function", "namespace", "custom"]
    output = {"type": f"{called['type']}_output", "call_id": item["call_id"], "output": "a_file"}
    last = events(codex(server, words, item, output))[-1]["response"]
    assert last["output"][0]["content"][0]["text"] == "There is a file."


def test_ignored_tools_are_logged_once(server: ServerUnderTest) -> None:
    for _ in range(3):
        codex(server, "List it")
    assert server.log.count("tools[3] has no effect") + server.log.count("tools[2] has no effect") == 1


# -- opencode ----------------------------------------------------------------------------------------------------------


def test_opencode_request_round_trip(server: ServerUnderTest) -> None:
    tool = {"type": "function", "function": {"name": "Bash", "description": "Runs", "parameters": {"type": "object"}}}
    body: dict[str, Any] = {
        "model": "a-model-of-its-own",
        "max_tokens": 4096,
        "messages": [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": '"List it"'}],
        "tools": [tool],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"authorization": "Bearer dummy", "x-session-affinity": "s", "x-session-id": "s"}
    answer = server.client.post("/v1/chat/completions", json=body, headers=headers)
    assert NO_EFFECT not in answer.headers
    chunks = events(answer)
    calls = [chunk["choices"][0]["delta"].get("tool_calls") for chunk in chunks if chunk["choices"]]
    name, call_id = next((call[0]["function"]["name"], call[0]["id"]) for call in calls if call)
    assert name == "Bash" and chunks[-1]["usage"]["prompt_tokens"]
    called = {"id": call_id, "type": "function", "function": {"name": name, "arguments": '{"command":"ls"}'}}
    body["messages"] += [
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": call_id, "content": "a_file"},
    ]
    last = events(server.client.post("/v1/chat/completions", json=body, headers=headers))
    words = [chunk["choices"][0]["delta"].get("content") or "" for chunk in last if chunk["choices"]]
    assert "".join(words) == "There is a file."
    body["messages"][2] |= {"reasoning_content": "Hm."}
    assert server.client.post("/v1/chat/completions", json=body, headers=headers).status_code == 200


# -- all ---------------------------------------------------------------------------------------------------------------


def test_any_model_name_is_accepted(server: ServerUnderTest) -> None:
    listed = server.client.get("/v1/models", headers=CLAUDE_HEADERS).json()
    assert [model["id"] for model in listed["data"]] == ["served"] and listed["data"][0]["type"] == "model"
    assert server.client.get("/v1/models/a-model-of-its-own").json()["id"] == "served"
