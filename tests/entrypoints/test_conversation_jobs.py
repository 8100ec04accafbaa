"""Conversations of programs that send no job_id, on a real server: each is one job, by the name that it has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

TOY_MODEL = Path(__file__).parents[2] / "examples" / "toy_model"
SYSTEM = "You are a shell agent. Do not think aloud."
TASK = "How many lines are in manual.md?"
FOUND = "12 manual.md"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = ("--max-total-tokens", "8192", "--schedule-policy", "handoff", "--tool-call-parser", "hermes")
    with ServerUnderTest(TOY_MODEL, tmp_path_factory.mktemp("server"), *flags, behaviour=None) as running:
        yield running.wait_ready()


def job(server: ServerUnderTest, job_id: str) -> dict[str, Any]:
    answer = server.client.get(f"/jobs/{quote(job_id, safe='')}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def job_ids(server: ServerUnderTest, beginning: str = "") -> list[str]:
    jobs = server.client.get("/jobs").json()["jobs"]
    return [each["job_id"] for each in jobs if each["job_id"].startswith(beginning)]


def release_leases(server: ServerUnderTest) -> None:
    for lease in server.client.get("/cache/leases?limit=1000").json()["leases"]:
        server.client.post("/release", json={"rid": lease["rid"]})


def message(server: ServerUnderTest, messages: list[dict], **headers: str) -> str:
    """The answer to Anthropic's messages. headers: with _ in place of -."""
    body = {"model": "toy", "system": SYSTEM, "messages": messages, "max_tokens": 40, "temperature": 0}
    answer = server.client.post(
        "/v1/messages", json=body, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["content"][0]["text"]


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def test_edited_conversation_stays_in_its_job(server: ServerUnderTest) -> None:
    """The agent's program replaces the output of a tool in the middle, as Claude Code does."""
    name = "claude-code:edited"
    turns = [said("user", TASK)]
    for result in (FOUND, "ok"):
        turns += [said("assistant", message(server, turns, x_claude_code_session_id="edited")), said("user", result)]
    message(server, turns, x_claude_code_session_id="edited")
    assert job(server, name)["turns"] == 3
    before = job_ids(server)
    turns[2] = said("user", "[cleared]")
    message(server, turns, x_claude_code_session_id="edited")
    assert job(server, name)["turns"] == 4 and job_ids(server) == before
    assert server.client.delete(f"/jobs/{name}").status_code == 200


def test_two_programs_with_one_session_id_have_two_jobs(server: ServerUnderTest) -> None:
    """Interleaved, and with the same words."""
    turns = [said("user", TASK)]
    for count in (1, 2):
        texts = [message(server, turns, **{header: "one"}) for header in ("x_claude_code_session_id", "x_session_id")]
        assert texts[0] == texts[1]
        assert [job(server, name)["turns"] for name in ("claude-code:one", "session:one")] == [count, count]
        turns += [said("assistant", texts[0]), said("user", FOUND)]


def test_long_headers_are_shortened_or_refused(server: ServerUnderTest) -> None:
    """Up to the limit for all headers they are names; beyond that the connection refuses them."""
    for _ in range(2):
        message(server, [said("user", TASK)], x_dynamo_session_id="x" * 30_000)
    body = {"messages": [said("user", TASK)], "max_tokens": 1}
    for size in (60_000, 4_000_000):
        try:
            refused = server.client.post("/v1/chat/completions", json=body, headers={"x-dynamo-session-id": "x" * size})
        except httpx.TransportError:
            continue  # it was closed while the header was sent
        assert refused.status_code == 431
    (name,) = job_ids(server, "dynamo:")
    assert len(name) < 50 and job(server, name)["turns"] == 2


def test_final_header_ends_the_job(server: ServerUnderTest) -> None:
    turns = [said("user", TASK)]
    message(server, turns, x_dynamo_session_id="finite")
    assert not job(server, "dynamo:finite")["is_over"]
    message(server, turns, x_dynamo_session_id="finite", x_dynamo_session_final="true")
    known = job(server, "dynamo:finite")
    assert known["is_over"] and known["pins"] == []


def test_conversation_that_branches_100_times_is_one_job(server: ServerUnderTest) -> None:
    turns = [said("user", TASK)]
    turns.append(said("assistant", message(server, turns, x_session_id="tree")))
    for number in range(100):
        body = {"messages": [*turns, said("user", f"Branch {number}")], "max_tokens": 1, "temperature": 0}
        answer = server.client.post("/v1/chat/completions", json=body, headers={"x-session-id": "tree"})
        assert answer.status_code == 200, answer.text
    assert job(server, "session:tree")["turns"] == 101 and job(server, "session:tree")["open_requests"] == []


def test_subagents_are_jobs_with_their_parents(server: ServerUnderTest) -> None:
    session = {"x_claude_code_session_id": "family"}
    message(server, [said("user", TASK)], **session)
    agent = session | {"x_claude_code_agent_id": "a1"}
    message(server, [said("user", "Find it")], **agent)
    nested = session | {"x_claude_code_agent_id": "a2", "x_claude_code_parent_agent_id": "a1"}
    message(server, [said("user", "Look here")], **nested)
    chat(server, [said("user", "Find it")], {"thread-id": "t", "session-id": "gone"})
    chat(server, [said("user", "Find it")], job_id="child", parent_job_id="claude-code:family")
    parents = {each["job_id"]: each["parent_job_id"] for each in server.client.get("/jobs").json()["jobs"]}
    assert parents["claude-code:family"] is None and parents["codex:t"] is None
    assert parents["claude-code:family/a1"] == parents["child"] == "claude-code:family"
    assert parents["claude-code:family/a2"] == "claude-code:family/a1"
    assert server.client.delete("/jobs/claude-code:family").status_code == 200
    assert job(server, "claude-code:family/a1")["parent_job_id"] is None


# -- shared names ------------------------------------------------------------------------------------------------------


def chat(server: ServerUnderTest, messages: list[dict], headers: dict[str, str] | None = None, **fields: Any) -> str:
    """The answer to a chat."""
    body = {"messages": messages, "max_tokens": 40, "temperature": 0, **fields}
    answer = server.client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


BY_SHARED_NAME: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("prompt-cache-key:app", {"prompt_cache_key": "app"}, {}),
    ("routing-key:app", {"routing_key": "app"}, {}),
    ("routing-key:app2", {}, {"X-SMG-Routing-Key": "app2"}),
    ("affinity:app", {}, {"x-session-affinity": "app"}),
    ("user:", {"user": "app"}, {}),
]


@pytest.mark.parametrize(("name", "fields", "headers"), BY_SHARED_NAME)
def test_edited_conversation_is_found_by_its_shared_name(
    server: ServerUnderTest, name: str, fields: dict[str, Any], headers: dict[str, str]
) -> None:
    turns = [said("system", SYSTEM), said("user", TASK)]
    turns += [said("assistant", chat(server, turns, headers, **fields)), said("user", FOUND)]
    (found,) = job_ids(server, name)
    assert chat(server, turns[:2], headers, **fields | {"max_tokens": 5}), "another that begins in the same way"
    (other,) = {*job_ids(server, name)} - {found}
    turns += [said("assistant", chat(server, turns, headers, **fields)), said("user", "Thanks")]
    turns[3] = said("user", "[cleared]")
    chat(server, turns, headers, **fields)
    turns[0] = said("system", f"{SYSTEM} Today is Monday.")  # it continues no recorded turn
    chat(server, turns, headers, **fields)
    assert sorted(job_ids(server, name)) == sorted([found, other])
    assert [job(server, each)["turns"] for each in (found, other)] == [4, 1]


def test_conversations_without_a_name_are_jobs_by_their_turns(server: ServerUnderTest) -> None:
    turns = [said("user", "How long is notes.txt?")]
    before = job_ids(server)
    turns += [said("assistant", chat(server, turns)), said("user", "5 notes.txt")]
    (name,) = set(job_ids(server)) - {*before}
    chat(server, turns)
    assert name.startswith("chat-") and job(server, name)["turns"] == 2
    assert not any("warm-up" in each for each in job_ids(server)), "the server's own requests are no jobs"


def test_strong_name_holds_where_messages_continue_another_job(server: ServerUnderTest) -> None:
    """A fork: its KV is handed over all the same."""
    release_leases(server)  # there is a limit to how many are kept
    turns = [said("user", "Check notes.log for errors.")]
    turns += [said("assistant", chat(server, turns, conversation_id="trunk")), said("user", "5 notes.log")]
    body = {"messages": turns, "max_tokens": 5, "temperature": 0, "conversation_id": "branch"}
    answer = server.client.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["baton"]["continuation"]["path"] == "handoff"
    assert [job(server, f"conversation-id:{name}")["turns"] for name in ("trunk", "branch")] == [1, 1]


def test_response_stays_in_the_job_of_the_previous_one(server: ServerUnderTest) -> None:
    """Also with other instructions, by which its prompt does not begin with the previous one."""
    asked = {"input": TASK, "instructions": SYSTEM, "max_output_tokens": 40, "temperature": 0}
    first = server.client.post("/v1/responses", json=asked).json()
    name = f"chat-{first['id'].removeprefix('resp_')}"
    again = asked | {"input": FOUND, "previous_response_id": first["id"], "prompt_cache_key": "app"}
    before = job_ids(server)
    for instructions in (SYSTEM, "Answer in English."):
        assert server.client.post("/v1/responses", json=again | {"instructions": instructions}).status_code == 200
    assert job(server, name)["turns"] == 3 and job_ids(server) == [each for each in before if each != name] + [name]


def test_client_that_returns_late_with_another_model_keeps_its_job(server: ServerUnderTest) -> None:
    """Its leases are gone by then."""
    turns = [said("user", TASK)]
    turns += [said("assistant", chat(server, turns, prompt_cache_key="late", model="one")), said("user", FOUND)]
    (name,) = job_ids(server, "prompt-cache-key:late")
    release_leases(server)
    assert job(server, name)["pins"] == []
    chat(server, turns, prompt_cache_key="late", model="two")
    assert job(server, name)["turns"] == 2 and job_ids(server, "prompt-cache-key:late") == [name]
