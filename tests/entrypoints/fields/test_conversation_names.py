"""Which conversation, and so which job, a request names by its headers and fields."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from baton.entrypoints.anthropic.messages import parse_messages
from baton.entrypoints.fields.conversation_names import (
    MAX_NAME_CHARS,
    NAME_HEADERS,
    NO_NAMES,
    ConversationNames,
    read_names,
)
from baton.entrypoints.fields.jobs import JOB_HEADERS, with_extras
from baton.entrypoints.native.generate import parse_generate
from baton.entrypoints.openai.chat import parse_chat
from baton.entrypoints.openai.completions import parse_completion
from baton.entrypoints.openai.responses.fields import parse_response
from baton.runtime.prompt import Prompt
from baton.scheduler.outcome import RequestRefused

UUID = "e4b487f6-0ad2-4370-9c2d-ba820b6ef70b"
OLD_USER = f"user_{'0' * 64}_account__session_{UUID}"
NEW_USER = json.dumps({"device_id": "d", "account_uuid": "", "session_id": UUID})

Given = tuple[dict[str, Any], dict[str, str]]
"""Fields and headers."""


def read(fields: dict[str, Any] | None = None, **headers: str) -> ConversationNames:
    """Names of a request; headers with _ in place of -."""
    return read_names(fields or {}, {name.replace("_", "-"): value for name, value in headers.items()})


STRONG: list[tuple[Given, str, str | None]] = [
    (({}, {"x-dynamo-session-id": "run:a"}), "dynamo:run:a", None),
    (({}, {"x-dynamo-session-id": "b", "x-dynamo-parent-session-id": "a"}), "dynamo:b", "dynamo:a"),
    (({}, {"x-claude-code-session-id": "s"}), "claude-code:s", None),
    (({}, {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}), "claude-code:s/a", "claude-code:s"),
    (
        ({}, {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a", "x-claude-code-parent-agent-id": "p"}),
        "claude-code:s/a",
        "claude-code:s/p",
    ),
    (({}, {"x-claude-code-session-id": "s", "x-claude-code-parent-agent-id": "p"}), "claude-code:s", None),
    (({}, {"session-id": "s", "thread-id": "s"}), "codex:s", None),
    (({}, {"session-id": "s", "thread-id": "t"}), "codex:t", "codex:s"),
    (({}, {"session-id": "s", "thread-id": "t", "x-codex-parent-thread-id": "p"}), "codex:t", "codex:p"),
    (({}, {"thread-id": "t"}), "codex:t", None),
    (({}, {"session_id": "s"}), "codex:s", None),
    (({}, {"x-session-id": "ses_1"}), "session:ses_1", None),
    (({}, {"x-session-id": "ses_2", "x-parent-session-id": "ses_1"}), "session:ses_2", "session:ses_1"),
    (({}, {"x-session-id": "ses_1", "x-session-affinity": "ses_1"}), "session:ses_1", None),
    (({"conversation": "c"}, {}), "conversation:c", None),
    (({"conversation": {"id": "c"}}, {}), "conversation:c", None),
    (({"conversation_id": "c"}, {}), "conversation-id:c", None),
    (({"session_id": "c"}, {}), "session-id:c", None),
    (({"metadata": {"user_id": OLD_USER}}, {}), f"claude-code:{UUID}", None),
    (({"metadata": {"user_id": NEW_USER}}, {}), f"claude-code:{UUID}", None),
]
SHARED: list[tuple[Given, str]] = [
    (({"prompt_cache_key": "k"}, {}), "prompt-cache-key:k"),
    (({"routing_key": "k"}, {}), "routing-key:k"),
    (({}, {"x-smg-routing-key": "k"}), "routing-key:k"),
    (({}, {"x-session-affinity": "k"}), "affinity:k"),
]


@pytest.mark.parametrize(("given", "job_id", "parent"), STRONG)
def test_strong_names_are_jobs(given: Given, job_id: str, parent: str | None) -> None:
    assert read_names(*given) == ConversationNames(job_id, parent)


@pytest.mark.parametrize(("given", "name"), SHARED)
def test_shared_names_are_not_jobs_by_themselves(given: Given, name: str) -> None:
    assert read_names(*given) == ConversationNames(shared=name)


def test_user_is_a_shared_name_that_is_not_spelled_out() -> None:
    names = [read({"user": "ann@example.org"}), read({"metadata": {"user_id": "ann@example.org"}}), read({"user": "b"})]
    assert names[0] == names[1] != names[2]
    assert all(each.shared is not None and each.shared.startswith("user:") for each in names)
    assert "ann" not in repr(names)


def test_sources_do_not_collide() -> None:
    """The same word from any two sources names two conversations, but for those that are one source."""
    word = [
        {"x-dynamo-session-id": "w"}, {"x-claude-code-session-id": "w"}, {"session-id": "w"}, {"x-session-id": "w"},
        {"x-smg-routing-key": "w"}, {"x-session-affinity": "w"},
    ]  # fmt: skip
    body = [{name: "w"} for name in ("conversation", "conversation_id", "session_id", "prompt_cache_key", "user")]
    names = [read_names({}, headers) for headers in word] + [read_names(fields, {}) for fields in body]
    assert len({(each.job_id, each.shared) for each in names}) == len(names)
    # A session that looks like a session with an agent is neither.
    agent = read(x_claude_code_session_id="a", x_claude_code_agent_id="b")
    assert read(x_claude_code_session_id="a/b").job_id != agent.job_id
    assert read(x_claude_code_session_id="a/b", x_claude_code_agent_id="c").job_id != (
        read(x_claude_code_session_id="a", x_claude_code_agent_id="b/c").job_id
    )


PRECEDENCE = [STRONG[number][0] for number in (0, 3, 7, 11, 14, 16, 17, 18)] + [given for given, _ in SHARED]
"""The first of any two goes before the other."""


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(PRECEDENCE, 2)))
def test_precedence_of_names(first: Given, second: Given) -> None:
    assert read_names(second[0] | first[0], second[1] | first[1]) == read_names(*first)


@pytest.mark.parametrize("given", [each[0] for each in STRONG] + [each[0] for each in SHARED])
def test_job_id_is_read_before_any_name(given: Given) -> None:
    assert read_names({"job_id": "j"} | given[0], given[1] | {"x-dynamo-session-final": "true"}) == NO_NAMES
    headers = {"x-job-id": "j"} | given[1]
    assert read_names(with_extras(given[0], headers), headers) == NO_NAMES


def test_names_are_found_in_extra_body() -> None:
    assert read_names(with_extras({"extra_body": {"conversation_id": "c"}}, {}), {}).job_id == "conversation-id:c"


@pytest.mark.parametrize("value", ["true", " True ", "1"])
def test_final_header_marks_the_last_step_of_strong_names(value: str) -> None:
    assert read(x_dynamo_session_id="s", x_dynamo_session_final=value).is_last_step
    assert read(x_claude_code_session_id="s", x_dynamo_session_final=value).is_last_step
    assert not read(x_dynamo_session_final=value).is_last_step
    assert not read({"user": "u"}, x_dynamo_session_final=value).is_last_step


@pytest.mark.parametrize("value", ["false", "0", "", "maybe"])
def test_other_values_of_the_final_header_do_nothing(value: str) -> None:
    assert not read(x_dynamo_session_id="s", x_dynamo_session_final=value).is_last_step


NOTHING: list[Any] = ["", "  ", "\t", None, 5, 1.5, True, [], ["a"], {}, {"id": 5}, {"id": ""}, {"id": None}]


@pytest.mark.parametrize("value", NOTHING)
def test_empty_and_mistyped_names_name_nothing(value: Any) -> None:
    for name in ("conversation", "conversation_id", "session_id", "prompt_cache_key", "routing_key", "metadata"):
        assert read({name: value}) == NO_NAMES, name
    assert read({"metadata": {"user_id": value}}) == NO_NAMES
    if isinstance(value, str):
        for header in (each.lower() for each in JOB_HEADERS if each in NAME_HEADERS):
            assert read_names({}, {header: value}) == NO_NAMES, header


def test_an_empty_name_does_not_hide_another() -> None:
    assert read({"conversation_id": "c"}, x_dynamo_session_id=" ", session_id="").job_id == "conversation-id:c"
    assert read(x_claude_code_session_id="s", x_claude_code_agent_id="").job_id == "claude-code:s"


@pytest.mark.parametrize(
    "user_id",
    [
        "user_1_session_2", "user_", "user_a_account_b_session_", "{", "{}", '{"session_id": 5}', '["session_id"]',
        '{"session_id": ""}', "[" * 1000, "{" * 1000, "user_" + "_account_" * 100, "user__account__session_" * 60,
    ],
)  # fmt: skip
def test_other_users_are_no_sessions(user_id: str) -> None:
    names = read({"metadata": {"user_id": user_id}})
    assert names.job_id is None and names.shared is not None


def test_long_names_are_replaced_by_digests() -> None:
    at_most, longer = "x" * MAX_NAME_CHARS, "x" * (MAX_NAME_CHARS + 1)
    assert read(x_dynamo_session_id=at_most).job_id == f"dynamo:{at_most}"
    names = [read(x_dynamo_session_id=each).job_id for each in (longer, longer + "x", "y" * 60_000)]
    assert len(set(names)) == 3 and all(name is not None and len(name) == len("dynamo:") + 32 for name in names)
    both = read(x_claude_code_session_id="s" * 60_000, x_claude_code_agent_id="a" * 60_000)
    assert both.job_id is not None and both.parent_job_id is not None and len(both.job_id) < 100
    assert both.job_id.startswith(both.parent_job_id)


def test_unprintable_names_are_replaced_by_digests() -> None:
    for value in ("a\x00b", "a\nb", "\x1b[2J", "\ud800", "a\u2028b"):
        name = read({"conversation_id": value}).job_id
        assert name is not None and name.isascii() and name.isprintable() and len(name) == 32 + len("conversation-id:")
    assert read({"conversation_id": "日本 😀"}).job_id == "conversation-id:日本 😀"


def test_header_names_are_decoded_as_utf8_or_latin1() -> None:
    assert read(x_dynamo_session_id="jöb 日本".encode().decode("latin-1")).job_id == "dynamo:jöb 日本"
    assert read(x_dynamo_session_id="jöb").job_id == "dynamo:jöb"


# -- every API ---------------------------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "Hello"}]


def prompt_of(api: str, names: ConversationNames, **more: Any) -> Prompt:
    match api:
        case "generate":
            return parse_generate({"text": "a"} | more, names=names).prompts[0]
        case "completions":
            return parse_completion({"prompt": "a"} | more, names=names).batch.prompts[0]
        case "chat":
            return parse_chat({"messages": MESSAGES} | more, names=names).call.prompt
        case "responses":
            return parse_response({"input": "a"} | more, names=names).call.prompt
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 5}
    return parse_messages(body | more, names=names).call.prompt


APIS = ("generate", "completions", "chat", "responses", "messages")


@pytest.mark.parametrize("api", APIS)
def test_every_api_takes_the_job_of_a_strong_name(api: str) -> None:
    spec = prompt_of(api, read(x_dynamo_session_id="s", x_dynamo_session_final="true")).spec
    assert (spec.job_id, spec.is_last_step) == ("dynamo:s", True)
    spec = prompt_of(api, read(x_dynamo_session_id="s"), is_last_step=True).spec
    assert (spec.job_id, spec.is_last_step) == ("dynamo:s", True)
    with pytest.raises(RequestRefused, match="without job_id"):
        prompt_of(api, NO_NAMES, is_last_step=True)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("field", ["conversation_id", "session_id"])
@pytest.mark.parametrize("value", ["c", 5, ["c"], {"id": "c"}])
def test_every_api_accepts_fields_that_name_conversations(api: str, field: str, value: Any) -> None:
    named = prompt_of(api, read({field: value}), **{field: value}).spec
    assert named.job_id == (f"{field.replace('_', '-')}:c" if value == "c" else None)


@pytest.mark.parametrize("api", APIS)
def test_every_api_takes_the_parent_of_a_strong_name(api: str) -> None:
    names = read(x_claude_code_session_id="s", x_claude_code_agent_id="a")
    assert prompt_of(api, names).spec.parent_job_id == "claude-code:s"
    assert prompt_of(api, names, parent_job_id="p").spec.parent_job_id == "p"
    assert prompt_of(api, NO_NAMES, job_id="j", parent_job_id="p").spec.parent_job_id == "p"
    with pytest.raises(RequestRefused, match="parent_job_id is set without job_id"):
        prompt_of(api, NO_NAMES, parent_job_id="p")


def test_prompts_of_a_batch_share_the_conversation() -> None:
    batch = parse_generate({"text": ["a", "b"]}, names=read(x_dynamo_session_id="s"))
    assert [each.spec.job_id for each in batch.prompts] == ["dynamo:s"] * 2
